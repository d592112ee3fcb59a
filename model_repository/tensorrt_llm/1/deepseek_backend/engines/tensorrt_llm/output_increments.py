"""Makes steps of a request's output: the text and tokens that its sink has not got yet.

The output grows in place with every response that is read. The new part is counted from what was sent. TensorRT-LLM's
own text_diff and token_ids_diff won't do, because they know the last response only: several may have been read since,
the last step's text may be longer than TensorRT-LLM's, and a tokenizer without an incremental form may change the end
of an earlier text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deepseek_backend.engines.base import Step, TokenLogprobs
from deepseek_backend.engines.generate_request import GenerateRequest
from deepseek_backend.engines.prompt_tokenizer import PromptTokenizer
from deepseek_backend.engines.tensorrt_llm.requested_logprobs import token_logprobs
from deepseek_backend.engines.tensorrt_llm.translation import (
    complete_text,
    finish_reason,
    generation_seconds,
    perf_metrics,
    whole_text,
)


class OutputIncrements:
    """The steps of one request; `output` is its RequestOutput."""

    def __init__(
        self, request: GenerateRequest, output: Any, tokenizer: PromptTokenizer, *, is_whole: bool = False
    ) -> None:
        """`is_whole`: the answer comes in one response, with its performance metrics."""
        self._sampling = request.sampling
        self._is_whole = is_whole
        self._output = output
        self._tokenizer = tokenizer
        self._num_chars_sent = 0
        self.num_tokens_sent = 0

    def take(self, *, cut_short: bool) -> Step:
        """Return a step with what is new, which may be nothing; the last step once there is a finish reason.

        :param cut_short: the request was aborted, or reading it has failed, so that tokens may have no logprobs.
        :raises EngineError: for logprobs that do not belong to the tokens.
        """
        output = self._output.outputs[0]  # read once, because each access copies or sorts a list
        reason = output.finish_reason
        token_ids = self._new_token_ids(output)
        text = self._new_text(output, token_ids)
        logprobs: Sequence[TokenLogprobs] = ()
        if self._sampling.logprobs is not None:
            may_be_short = reason == "cancelled" or (reason is None and cut_short)
            token_ids, logprobs = self._with_logprobs(output, token_ids, may_be_short=may_be_short)
        step = Step(text, token_ids, logprobs=logprobs)
        step.num_cached_tokens = num_cached_tokens(self._output)
        self.num_tokens_sent += len(token_ids)
        if reason is not None:
            step.finish_reason, step.stop_reason = finish_reason(reason), output.stop_reason
            if self._is_whole:
                step.generation_s = generation_seconds(output.request_perf_metrics)
            if self._sampling.return_perf_metrics and output.request_perf_metrics is not None:
                step.perf_metrics = perf_metrics(output.request_perf_metrics)
        return step

    def _new_token_ids(self, output: Any) -> Sequence[int]:
        token_ids: Sequence[int] = output.token_ids[self.num_tokens_sent :]
        return token_ids

    def _new_text(self, output: Any, token_ids: Sequence[int]) -> str:
        """Return the text of `token_ids`, the new ones, with what was held back before them."""
        final = output.finish_reason is not None
        whole = whole_text(output.text, output.token_ids, self._decode) if final else output.text
        text = complete_text(whole, self._num_chars_sent, final=final)
        self._num_chars_sent += len(text)
        return text

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._sampling.skip_special_tokens is not False)

    def _with_logprobs(
        self, output: Any, token_ids: Sequence[int], *, may_be_short: bool
    ) -> tuple[Sequence[int], Sequence[TokenLogprobs]]:
        """Return the tokens and their logprobs. TensorRT-LLM lists those of a stop word behind the tokens' own."""
        start = self.num_tokens_sent
        entries = (output.logprobs or [])[start : start + len(token_ids)]
        if may_be_short:
            token_ids = token_ids[: len(entries)]
        return token_ids, token_logprobs(token_ids, entries, self._sampling, self._tokenizer.text)


def num_cached_tokens(output: Any) -> int:
    """Return a RequestOutput's number of prompt tokens from the KV cache, which is known from 1.2 on."""
    return getattr(output, "cached_tokens", 0) or 0
