"""One request in the engine: its prompt, and how its tokens are chosen, made into text and ended."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal

from deepseek_backend.engines.base import FinishReason, PerfMetrics, Step, StepSink
from deepseek_backend.engines.detokenizer import Detokenizer
from deepseek_backend.engines.generate_request import GenerateRequest
from deepseek_backend.engines.prompting import check_ids, check_prompt_length, prompt_token_ids
from deepseek_backend.engines.reference.checkpoint_loading import LoadedCheckpoint
from deepseek_backend.engines.reference.token_sampling import TokenSampler, spellings
from deepseek_backend.errors import BackendError


class BatchedGeneration:
    """An open request. It is made in the caller's thread; from then on the engine's thread owns it."""

    sampler: TokenSampler
    """Set by `make_sampler`."""

    def __init__(
        self, request: GenerateRequest, sink: StepSink, checkpoint: LoadedCheckpoint, max_seq_len: int
    ) -> None:
        """Make the request. This needs the tokenizer only, not the model.

        :raises RequestError: when the prompt can't be served.
        """
        self._arrived_ns = time.monotonic_ns()
        sampling = request.sampling
        self.request = request
        self.sink = sink
        self.prompt_ids = prompt_token_ids(request, checkpoint.encode, checkpoint.vocab_size)
        check_prompt_length(len(self.prompt_ids), max_seq_len - 1, limit="engine_options.max_seq_len")
        check_ids(sampling.logit_bias or (), checkpoint.vocab_size, field="logit_bias")
        self.last_token_id = -1
        self.num_generated = 0
        self.scheduled_ns = 0
        """Time at which its prefill began, by time.monotonic_ns(); 0 before."""
        self._first_token_ns = self._last_token_ns = 0
        self._max_tokens = min(request.max_tokens, max_seq_len - len(self.prompt_ids))
        self._eos_token_ids = frozenset() if sampling.ignore_eos else checkpoint.eos_token_ids
        self._detokenizer = Detokenizer(
            checkpoint.tokenizer, skip_special_tokens=sampling.skip_special_tokens is not False
        )
        self._bad_sequences = spellings(checkpoint.tokenizer, sampling.bad)
        self._checkpoint = checkpoint

    def make_sampler(self) -> None:
        """Make the arrays that sampling needs. The engine's thread calls it before the prefill."""
        sampling, checkpoint = self.request.sampling, self._checkpoint
        self.sampler = TokenSampler(
            sampling,
            prompt_ids=self.prompt_ids,
            end_ids=checkpoint.eos_token_ids.union(sampling.stop_token_ids),
            bad_sequences=self._bad_sequences,
            vocab_size=checkpoint.vocab_size,
        )

    def advance(self, token_id: int) -> Step:
        """Return the step of a generated token. A token that ends the text is counted, but shown only on request."""
        self.last_token_id = token_id
        self.num_generated += 1
        if self.request.sampling.return_perf_metrics:
            self._last_token_ns = time.monotonic_ns()
            self._first_token_ns = self._first_token_ns or self._last_token_ns
        finish_reason, stop_reason = self._ending(token_id)
        is_shown = stop_reason is not None and self.request.sampling.include_stop_str_in_output
        text = self._detokenizer.add(token_id) if finish_reason != "stop" or is_shown else ""
        if finish_reason is not None:
            text += self._detokenizer.flush()
        return self.step(text=text, token_ids=(token_id,), finish_reason=finish_reason, stop_reason=stop_reason)

    def step(
        self,
        *,
        text: str = "",
        token_ids: Sequence[int] = (),
        finish_reason: FinishReason | None = None,
        stop_reason: int | None = None,
        error: BackendError | None = None,
    ) -> Step:
        has_metrics = finish_reason is not None and self.request.sampling.return_perf_metrics
        return Step(
            text=text,
            token_ids=token_ids,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            num_input_tokens=len(self.prompt_ids),
            error=error,
            perf_metrics=self._perf_metrics() if has_metrics else None,
        )

    def _perf_metrics(self) -> PerfMetrics:
        """Return the metrics. A KV block is one token, and no cache is shared between requests."""
        # The last token never enters the cache, because the model does not see it.
        num_cached = len(self.prompt_ids) + self.num_generated - 1 if self.num_generated else 0
        return PerfMetrics(
            kv_cache_missed_block=len(self.prompt_ids) if self.num_generated else 0,
            kv_cache_alloc_new_blocks=num_cached,
            kv_cache_alloc_total_blocks=num_cached,
            arrival_time_ns=self._arrived_ns,
            first_scheduled_time_ns=self.scheduled_ns,
            first_token_time_ns=self._first_token_ns,
            last_token_time_ns=self._last_token_ns,
        )

    def _ending(self, token_id: int) -> tuple[Literal["stop", "length"] | None, int | None]:
        """Return finish_reason and stop_reason after `token_id`."""
        if token_id in self._eos_token_ids:
            return "stop", None
        if token_id in self.request.sampling.stop_token_ids:
            return "stop", token_id
        return ("length" if self.num_generated >= self._max_tokens else None), None
