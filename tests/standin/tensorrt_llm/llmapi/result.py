"""CompletionOutput and the part of RequestOutput that handles responses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tensorrt_llm._record import RECORD

_COUNTS_CACHED_TOKENS = "cached_tokens" in RECORD["request_output"]["properties"]
_HAS_PERF_METRICS = "request_perf_metrics" in RECORD["completion_output"]["fields"]


class RequestError(RuntimeError):
    """Error of a request that has failed in a worker: a refusal, or a failure of its whole batch."""


@dataclass(slots=True)
class CompletionOutput:
    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[Any] = field(default_factory=list)
    prompt_logprobs: list[Any] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    generation_logits: Any = None
    disaggregated_params: Any = None
    _last_text_len: int = field(default=0, init=False, repr=False)
    _last_token_ids_len: int = field(default=0, init=False, repr=False)

    @property
    def length(self):
        return len(self.token_ids)

    @property
    def text_diff(self):
        return self.text[self._last_text_len :]

    @property
    def token_ids_diff(self):
        return self.token_ids[self._last_token_ids_len :]

    @property
    def logprobs_diff(self):
        return self.logprobs[:0]


if _HAS_PERF_METRICS:

    @dataclass(slots=True)
    class CompletionOutput(CompletionOutput):  # type: ignore[no-redef]
        request_perf_metrics: Any = None


class GenerationResult:
    """A running request. Awaiting and iterating always give this same object."""

    def __init__(self, sequence, prompt_token_ids, detokenizer):
        self.prompt_token_ids = prompt_token_ids
        self._outputs = [CompletionOutput(0)]
        self.context_logits = None
        if _COUNTS_CACHED_TOKENS:
            self.cached_tokens = 0
        self._sequence = sequence
        self._detokenizer = detokenizer
        self._done = False
        self._aborted = False

    @property
    def outputs(self):
        """Return another list every time, as TensorRT-LLM does."""
        return self._outputs[:1]

    @property
    def finished(self):
        return self._done

    def abort(self):
        self._aborted = True
        self._sequence.aborted.set()

    def aborted(self):
        return self._aborted

    def clear_logprob_params(self):
        self.outputs[0].logprobs = []

    def record_stats(self, output, stats=None):
        """Do nothing: statistics are not recorded here."""

    def result(self, timeout=None):
        while not self._done:
            self._handle(self._sequence.responses.get_blocking(timeout))
        return self

    async def aresult(self):
        while not self._done:
            self._handle(await self._sequence.responses.get())
        return self

    def __aiter__(self):
        return self

    async def __anext__(self):
        if self._done:
            raise StopAsyncIteration
        self._handle(await self._sequence.responses.get())
        return self

    def _handle(self, response):
        token_ids, logprobs, finish_reason, stop_reason, error, cached_tokens, metrics, part = response
        if error is not None:
            self._done = True
            raise RequestError(error) if isinstance(error, str) else error
        output = self._outputs[0]
        output._last_text_len, output._last_token_ids_len = len(output.text), len(output.token_ids)
        num_logprobs = len(output.logprobs)
        output.token_ids += token_ids
        output.logprobs += logprobs
        if self._detokenizer is not None:
            output.text = self._detokenizer.add(token_ids, final=finish_reason is not None)
        if _COUNTS_CACHED_TOKENS:
            self.cached_tokens = cached_tokens
        if finish_reason is None:
            return
        self._done = True
        output.disaggregated_params = part
        output.finish_reason, output.stop_reason = finish_reason, stop_reason
        if _HAS_PERF_METRICS:
            output.request_perf_metrics = metrics
        if finish_reason == "cancelled" and output.logprobs:
            output.logprobs.pop()  # an abort may come between a token and its logprobs
            assert not RECORD["completion_output"]["asserts_logprobs_of_cancelled"] or (
                num_logprobs <= len(output.logprobs)
            )
