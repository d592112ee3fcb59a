"""Makes up tokens without a model, as fast as asked: for load, aborts and throughput."""

from __future__ import annotations

from collections.abc import Mapping

from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput

from vllm_without_gpu.device_executor import DeviceExecutor
from vllm_without_gpu.made_tokens import MadeTokens


class FillerExecutor(DeviceExecutor):
    """An answer repeats its prompt, without the begin token. Sampling fields and grammars have no effect."""

    def load(self) -> None:
        self._prompts: dict[str, list[int]] = {}

    def generate(self, scheduled: SchedulerOutput, grammar: GrammarOutput | None) -> Mapping[str, MadeTokens]:
        for request_id in scheduled.finished_req_ids:
            self._prompts.pop(request_id, None)
        cached = scheduled.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for new in scheduled.scheduled_new_reqs:
            self._prompts[new.req_id] = list(new.prompt_token_ids)
            computed[new.req_id] = new.num_computed_tokens
        ends = {name: computed[name] + number for name, number in scheduled.num_scheduled_tokens.items()}
        return {name: self._made(name, end) for name, end in ends.items()}

    def _made(self, request_id: str, end: int) -> MadeTokens:
        """Return the token at position `end`, unless that is inside the prompt."""
        prompt = self._prompts[request_id]
        if end < len(prompt):
            return MadeTokens()
        repeated = prompt[1:] or prompt
        return MadeTokens([repeated[(end - len(prompt)) % len(repeated)]])
