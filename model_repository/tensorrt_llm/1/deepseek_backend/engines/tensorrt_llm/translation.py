"""Translates requests into TensorRT-LLM's form, and its answers, failures and statistics back.

A failure is the fault of the client, of one request or of the whole engine. An exception of the forward pass or the
sampler reaches every running request as a RequestError with its text, and the engine goes on. A worker's refusal of a
single request comes in the same form.
"""

import json
import math
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, cast, get_args

from deepseek_backend.contract import MAX_LOGPROBS, SAMPLING_BY_NAME, SAMPLING_FIELDS, ErrorCode
from deepseek_backend.engines.base import FinishReason, Logprob, PerfMetrics, TokenLogprobs
from deepseek_backend.engines.generate_request import GenerateRequest, SamplingParams
from deepseek_backend.errors import BackendError, ContextLostError, EngineError, RequestError, describe
from deepseek_backend.release import Conflict, LogprobSupport

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""Character that a tokenizer writes for one whose last bytes are missing."""
_GUIDES = tuple(field.name for field in SAMPLING_FIELDS if field.guided)
# Number of tokens at the end that tell whether a text ends inside a character. A character has at most four tokens, but
# special tokens may stand between them.
_TAIL = 16
MAX_LIKELIEST = 64
"""Most tokens requested per position, so that the sampled one is among them. Each costs time on the loop thread."""
MAX_FAULTS_IN_A_ROW = 3
"""Number of faults without a token in between, after which the engine will not recover."""
_LASTING = ("an illegal memory access", "device-side assert", "unspecified launch failure", "misaligned address")
"""Messages of CUDA errors after which nothing works in that process."""
# Part of a message of tensorrt_llm/executor/base_worker.py, _deduce_max_tokens: the workers may have cut max_seq_len to
# their memory.
_TOO_LONG = "`default_max_tokens`"
# Beginning of a message of tensorrt_llm/_torch/pyexecutor/guided_decoder.py, which fails the one request whose guide it
# can't compile.
_BAD_GUIDE = "Guided decoding error"
# Part of the messages "Error in kv cache transfer for generation requests" of tensorrt_llm/_torch/pyexecutor/
# py_executor.py, and of later ones; in any case. They fail only the requests whose transfer failed or timed out.
_TRANSFER_FAILED = "kv cache transfer"


def complete_text(text: str, num_chars_sent: int, *, final: bool) -> str:
    """Return the part of `text`, the whole text so far, that may be sent after `num_chars_sent` characters.

    TensorRT-LLM holds incomplete characters back, except with tokenizers without an incremental form. With these the
    replacement character at the end waits for the step that completes it; in the last step it is sent.
    """
    new = text[num_chars_sent:]
    return new if final else new.rstrip(INCOMPLETE)


def whole_text(text: str, token_ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> str:
    """Return the text of an ended request, with the incomplete character that `token_ids` may end with.

    TensorRT-LLM's default, tokenizers' DecodeStream, never gives out what it holds back. Its own detokenizer does at
    the end (TLLM_INCREMENTAL_DETOKENIZATION_BACKEND).
    """
    if not decode(token_ids[-_TAIL:]).endswith(INCOMPLETE):
        return text
    whole = decode(token_ids)
    return whole if whole.startswith(text) else text


def sampling_params(request: GenerateRequest, *, seeded: bool) -> dict[str, Any]:
    """Return keyword arguments of tensorrt_llm.SamplingParams, but for max_tokens, which the caller has to add.

    Stop strings, the echo of the prompt and its special tokens are handled outside TensorRT-LLM.

    :param seeded: the sampler takes a seed, and without one draws the same numbers for every request.
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
        # Up to 1.1 TensorRT-LLM's test for greedy decoding looks at top_k and top_p only, so that a temperature alone
        # has no effect. A top_p of 1 makes it sample and cuts nothing off. A seeded sampler without a seed uses a fixed
        # one.
        params |= {
            "temperature": sampling.temperature,
            "top_k": sampling.top_k or None,
            "top_p": 1.0 if sampling.top_p is None and not sampling.top_k else sampling.top_p,
            "min_p": sampling.min_p,
            "seed": random.getrandbits(63) if seeded and sampling.seed is None else sampling.seed,
        }
    return {name: value for name, value in params.items() if value is not None}


def guide(sampling: SamplingParams) -> dict[str, Any]:
    """Return keyword arguments of tensorrt_llm.llmapi.GuidedDecodingParams; none for a request without a guide."""
    return {name.removeprefix("guided_"): value for name in _GUIDES if (value := getattr(sampling, name))}


def refuse_conflicts(sampling: SamplingParams, conflicts: Iterable[Conflict]) -> None:
    """Refuse fields that TensorRT-LLM supports one by one, but not together.

    :raises RequestError: E_UNSUPPORTED.
    """
    for conflict in conflicts:
        values = {name: getattr(sampling, name) for name in conflict.fields}
        if all(value not in (None, (), SAMPLING_BY_NAME[name].neutral) for name, value in values.items()):
            raise RequestError(f"{', '.join(conflict.fields)}: {conflict.why}", code=ErrorCode.UNSUPPORTED)


def perf_metrics(metrics: Any) -> PerfMetrics:
    """Return CompletionOutput.request_perf_metrics in our form; the times are of TensorRT-LLM's steady clock."""
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


def generation_seconds(metrics: Any) -> float:
    """Return the seconds from the first token to the last; NaN where the metrics do not have them."""
    if metrics is None or not metrics.timing_metrics.first_token_time:
        return math.nan
    duration: timedelta = metrics.timing_metrics.last_token_time - metrics.timing_metrics.first_token_time
    return max(0.0, duration.total_seconds())


def _nanoseconds(time: timedelta) -> int:
    return time // timedelta(microseconds=1) * 1000


def finish_reason(reason: str) -> FinishReason:
    """Check TensorRT-LLM's finish reason, whose names are ours.

    :raises EngineError: for an unknown one.
    """
    if reason not in get_args(FinishReason):
        raise EngineError(f"TensorRT-LLM ended a request with the unknown finish reason {reason!r}")
    return cast("FinishReason", reason)


def num_logprobs(sampling: SamplingParams, support: LogprobSupport | None) -> int | None:
    """Return TensorRT-LLM's `logprobs` for ours. Its 0 means none, so that its 1 is our 0: the generated token alone.

    A sampler that gives the likeliest tokens only leaves the sampled token out when it is not among them. It is surely
    among them in greedy decoding, and with a top_k no larger than the most tokens that may be requested. Other requests
    are refused.

    :raises RequestError: E_UNSUPPORTED, for more than the sampler gives.
    """
    if sampling.logprobs is None:
        return None
    if support is None:  # never ignored in silence; with MTP it would end every other request
        raise RequestError("logprobs: this sampler has none", code=ErrorCode.UNSUPPORTED)
    if support.of == "sampled":
        _check_most(sampling.logprobs, 0, "this sampler has that of the sampled token only")
        return 1
    _check_most(sampling.logprobs, support.most or MAX_LOGPROBS, "this release has no more")
    if sampling.greedy:
        return max(1, sampling.logprobs)
    most = support.most or MAX_LIKELIEST
    if not sampling.top_k or sampling.top_k > most:
        raise RequestError(
            f"logprobs: this sampler has those of the likeliest tokens only, and the sampled one may be none of them: "
            f"expected greedy decoding{f' or a top_k of at most {most}' if most > 1 else ''}",
            code=ErrorCode.UNSUPPORTED,
        )
    return max(sampling.logprobs, sampling.top_k)


def token_logprobs(
    token_ids: Sequence[int], entries: Sequence[Mapping[int, Any]], sampling: SamplingParams, text: Callable[[int], str]
) -> list[TokenLogprobs]:
    """Return `entries`, one for each of `token_ids`, in the form of the engine protocol.

    :raises EngineError: when they don't belong to the tokens: no answer is better than another token's numbers.
    """
    if len(entries) != len(token_ids) or not all(
        isinstance(entry, Mapping) and token_id in entry for entry, token_id in zip(entries, token_ids, strict=True)
    ):
        raise EngineError("TensorRT-LLM sent log-probabilities that do not belong to the tokens it sent")
    # The ranks are TensorRT-LLM's; where only the sampled token is known that is 1.
    result: list[TokenLogprobs] = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        own = Logprob(token_id, float(entry[token_id].logprob), entry[token_id].rank, text(token_id))
        others = sorted((other.rank, token, other.logprob) for token, other in entry.items() if token != token_id)
        likeliest = [row for row in others if row[0] <= (sampling.logprobs or 0)]
        result.append([own, *(Logprob(token, float(value), rank, text(token)) for rank, token, value in likeliest)])
    return result


def _check_most(given: int, most: int, why: str) -> None:
    if given > most:
        raise RequestError(f"logprobs: expected at most {most}, got {given}; {why}", code=ErrorCode.UNSUPPORTED)


def worker_refusal(message: str, *, guided: bool, shared: bool) -> BackendError | None:
    """Return the error of a request, if the worker's message is known to concern that request alone.

    :param guided: the request has a guide.
    :param shared: another server computes a part of the request.
    """
    if shared and _TRANSFER_FAILED in message.lower():
        return ContextLostError(f"TensorRT-LLM could not hand the KV cache over: {message}")
    if _TOO_LONG in message:
        return RequestError(f"the prompt is too long for this model: {message}", code=ErrorCode.PROMPT_TOO_LONG)
    if guided and message.startswith(_BAD_GUIDE):
        return RequestError(f"TensorRT-LLM refused the guide: {message}")
    return None


def cause_of_death(llm: Any) -> str:
    """Return why the engine is dead; "" while it is alive. Before 1.3, LLM has no public method for it."""
    executor = getattr(llm, "_executor", None)
    if executor is None:
        return ""
    if executor.is_shutdown():  # generate_async itself asks this
        return "TensorRT-LLM's executor has shut down"
    # Futures of the workers' main functions: one that is done means that its worker has ended, whatever the executor
    # believes. Under trtllm-llmapi-launch there may be none.
    for future in getattr(executor, "mpi_futures", ()):
        if future.done():
            cause = None if future.cancelled() else future.exception()
            return "a worker of TensorRT-LLM has ended" + (f": {describe(cause)}" if cause else "")
    return ""


class Faults:
    """Counts the engine's faults.

    A fault fails every running request, but counts once. A further one counts only if it fails a request that began, or
    got a token, after the fault before.
    """

    def __init__(self) -> None:
        self.count = 0
        """Number of faults so far. A request remembers the number at its start and at each of its tokens."""
        self._in_a_row = 0

    def token_came(self) -> None:
        self._in_a_row = 0

    def add(self, message: str, count_before: int) -> str:
        """Count a fault; return why the engine is beyond use, or "".

        :param message: error with which a request has failed.
        :param count_before: `count` when that request was last known to be well.
        """
        if count_before == self.count:
            self.count += 1
            self._in_a_row += 1
        if any(part in message for part in _LASTING):
            return f"the GPU has failed: {message}"
        if self._in_a_row >= MAX_FAULTS_IN_A_ROW:
            return f"TensorRT-LLM has failed {self._in_a_row} times in a row, with no token between: {message}"
        return ""


@dataclass(slots=True)
class IterationStats:
    """Numbers of the latest iteration, and sums over all iterations; all zero before the first."""

    num_queued: int = 0
    """Number of requests that the engine holds and has not scheduled."""
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    tokens_per_block: int = 0
    num_draft_tokens: int = 0
    """Sum over all iterations."""
    num_accepted_draft_tokens: int = 0
    """Sum over all iterations."""
    worked_at_s: float = 0.0
    """Time at which an iteration with requests was last reported, by time.monotonic()."""
    extra: dict[str, float] = field(default_factory=dict)

    def add(self, row: Mapping[str, Any] | str | bytes) -> None:
        """Add one iteration, as a mapping or its JSON. Sections may be missing or null."""
        values = row if isinstance(row, Mapping) else json.loads(row)
        cache = values.get("kvCacheStats") or {}
        drafts = values.get("specDecodingStats") or {}
        if _whole(values, "numActiveRequests"):
            self.worked_at_s = time.monotonic()
        self.num_queued = _whole(values, "numQueuedRequests")
        self.kv_blocks_used = _whole(cache, "usedNumBlocks")
        self.kv_blocks_total = _whole(cache, "maxNumBlocks")
        self.tokens_per_block = _whole(cache, "tokensPerBlock")
        self.num_draft_tokens += _whole(drafts, "numDraftTokens")
        self.num_accepted_draft_tokens += _whole(drafts, "numAcceptedTokens")
        self.extra = {
            "iteration_ms": float(values.get("iterLatencyMS") or 0.0),
            "kv_blocks_reused": float(cache.get("reusedBlocks") or 0),
            "kv_blocks_missed": float(cache.get("missedBlocks") or 0),
        }


def _whole(values: Mapping[str, Any], name: str) -> int:
    return int(values.get(name) or 0)
