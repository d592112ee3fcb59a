"""Makes up tokens without a model, as fast as asked: for load, aborts and throughput."""

from __future__ import annotations

from collections.abc import Mapping

from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput

from vllm_without_gpu.device_executor import DeviceExecutor
from vllm_without_gpu.made_tokens import MadeTokens

_FIRST_ID = 100
"""Ids below it may be special tokens."""


class FillerExecutor(DeviceExecutor):
    """The n-th token of an answer depends on the prompt and n. Sampling fields and grammars have no effect."""

    def load(self) -> None:
        self._prompts: dict[str, tuple[int, int]] = {}
        """Id of a request -> the length and the sum of its prompt."""
        self._vocab_size = self.model_config.get_vocab_size() - 2 * _FIRST_ID

    def generate(self, scheduled: SchedulerOutput, grammar: GrammarOutput | None) -> Mapping[str, MadeTokens]:
        for request_id in scheduled.finished_req_ids:
            self._prompts.pop(request_id, None)
        cached = scheduled.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for new in scheduled.scheduled_new_reqs:
            self._prompts[new.req_id] = len(new.prompt_token_ids), sum(new.prompt_token_ids)
            computed[new.req_id] = new.num_computed_tokens
        ends = {name: computed[name] + number for name, number in scheduled.num_scheduled_tokens.items()}
        return {name: self._made(name, end) for name, end in ends.items()}

    def _made(self, request_id: str, end: int) -> MadeTokens:
        """Return the token at position `end`, unless that is inside the prompt."""
        length, seed = self._prompts[request_id]
        return MadeTokens([_FIRST_ID + (seed + end * 7) % self._vocab_size]) if end >= length else MadeTokens()
