"""Between our requests and TensorRT-LLM's: pure functions."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from deepseek_backend.contract import SAMPLING_BY_NAME, SAMPLING_FIELDS, ErrorCode
from deepseek_backend.engines.base import FinishReason, PerfMetrics
from deepseek_backend.engines.generate_request import GenerateRequest, SamplingParams
from deepseek_backend.errors import EngineError, RequestError
from deepseek_backend.release import Conflict

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer puts for a character whose last bytes are missing."""
_TAIL = 16
"""So many tokens say whether a text ends inside a character: it has four at most, but for special ones between."""

_FINISH_REASONS: Mapping[str, FinishReason] = {
    "stop": "stop",
    "length": "length",
    "timeout": "timeout",
    "cancelled": "cancelled",
}


def complete_text(text: str, num_chars_sent: int, *, final: bool) -> str:
    """What of `text`, the whole text so far, may be sent after `num_chars_sent` characters.

    TensorRT-LLM holds incomplete characters back, but for tokenizers without an incremental form; what stands for one
    at the end waits for the step that completes it. In the last step it is what the text is.
    """
    new = text[num_chars_sent:]
    return new if final else new.rstrip(INCOMPLETE)


def whole_text(text: str, token_ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> str:
    """`text` of an ended request, and the incomplete character that `token_ids` end with.

    TensorRT-LLM's default, tokenizers' DecodeStream, never says what it holds back; its own detokenizer does at the end
    (TLLM_INCREMENTAL_DETOKENIZATION_BACKEND).
    """
    if not decode(token_ids[-_TAIL:]).endswith(INCOMPLETE):
        return text
    whole = decode(token_ids)
    return whole if whole.startswith(text) else text


def sampling_params(request: GenerateRequest, *, seeded: bool) -> dict[str, Any]:
    """Keyword arguments of tensorrt_llm.SamplingParams for `request`; max_tokens, whose default is 32, is the caller's.

    Stop strings, the echo of the prompt and its special tokens are done outside TensorRT-LLM. `seeded`: the sampler
    takes a seed, and without one draws the same numbers for every request.
    """
    sampling = request.sampling
    params: dict[str, Any] = {
        "exclude_input_from_output": True,
        "add_special_tokens": False,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "min_tokens": sampling.min_tokens,
        "stop_token_ids": list(sampling.stop_token_ids) or None,
        "ignore_eos": sampling.ignore_eos,
        "skip_special_tokens": sampling.skip_special_tokens,
        "include_stop_str_in_output": sampling.include_stop_str_in_output,
        "bad": list(sampling.bad) or None,
        "return_perf_metrics": sampling.return_perf_metrics,
    }
    if not sampling.greedy:
        params |= _random_sampling(request, seeded=seeded)
    return {name: value for name, value in params.items() if value is not None}


def _random_sampling(request: GenerateRequest, *, seeded: bool) -> dict[str, Any]:
    """The fields that make TensorRT-LLM sample at all.

    Up to 1.1 its test for greedy decoding looks at top_k and top_p only, so a temperature alone changes nothing; a
    top_p of 1 says "sample" and cuts nothing off. A seeded sampler without a seed uses a fixed one.
    """
    sampling = request.sampling
    return {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k or None,
        "top_p": 1.0 if sampling.top_p is None and not sampling.top_k else sampling.top_p,
        "min_p": sampling.min_p,
        "seed": secrets.randbits(63) if seeded and sampling.seed is None else sampling.seed,
    }


def guide(sampling: SamplingParams) -> dict[str, Any]:
    """Keyword arguments of tensorrt_llm.llmapi.GuidedDecodingParams; empty for a request without a guide."""
    return {name.removeprefix("guided_"): value for name in _GUIDES if (value := getattr(sampling, name))}


_GUIDES = tuple(field.name for field in SAMPLING_FIELDS if field.guided)


def refuse_conflicts(sampling: SamplingParams, conflicts: Iterable[Conflict]) -> None:
    """:raises RequestError: for fields that TensorRT-LLM has one by one and not together."""
    for conflict in conflicts:
        if all(_asks(sampling, name) for name in conflict.fields):
            raise RequestError(f"{', '.join(conflict.fields)}: {conflict.why}", code=ErrorCode.UNSUPPORTED)


def _asks(sampling: SamplingParams, name: str) -> bool:
    value = getattr(sampling, name)
    return value not in (None, (), SAMPLING_BY_NAME[name].neutral)


def perf_metrics(metrics: Any) -> PerfMetrics:
    """CompletionOutput.request_perf_metrics as the wire has it; the times are of TensorRT-LLM's steady clock."""
    timing, cache, drafts = metrics.timing_metrics, metrics.kv_cache_metrics, metrics.speculative_decoding
    return PerfMetrics(
        kv_cache_reused_block=cache.num_reused_blocks,
        kv_cache_missed_block=cache.num_missed_blocks,
        kv_cache_alloc_new_blocks=cache.num_new_allocated_blocks,
        kv_cache_alloc_total_blocks=cache.num_total_allocated_blocks,
        kv_cache_hit_rate=cache.kv_cache_hit_rate,
        arrival_time_ns=_nanoseconds(timing.arrival_time),
        first_scheduled_time_ns=_nanoseconds(timing.first_scheduled_time),
        first_token_time_ns=_nanoseconds(timing.first_token_time),
        last_token_time_ns=_nanoseconds(timing.last_token_time),
        acceptance_rate=drafts.acceptance_rate,
        total_accepted_draft_tokens=drafts.total_accepted_draft_tokens,
        total_draft_tokens=drafts.total_draft_tokens,
    )


def _nanoseconds(time: timedelta) -> int:
    return time // timedelta(microseconds=1) * 1000


def finish_reason(reason: str) -> FinishReason:
    try:
        return _FINISH_REASONS[reason]
    except KeyError:
        raise EngineError(f"TensorRT-LLM ended a request with the unknown finish reason {reason!r}") from None
