"""A completion as JSON, for `generate --json` and the rows of a batch."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

from deepseek_triton_client import Answer, Completion, DeepseekTritonError

_DETAILS = ("output_ids", "cumulative_logprob", "logprobs", "prompt_logprobs")
"""Fields of an answer that the record has only when they were asked for."""


def completion_record(completion: Completion) -> dict[str, Any]:
    """Return `completion` as JSON. Text and details are those of the first answer; `answers` has all, if several."""
    first, *others = completion.answers
    record = _answer_record(first) | {
        "num_input_tokens": completion.num_input_tokens,
        "num_output_tokens": completion.num_output_tokens,
        "num_cached_tokens": completion.num_cached_tokens,
        "time_to_first_token_s": completion.time_to_first_token_s,
        "total_s": completion.total_s,
        "request_id": completion.request_id,
        "url": completion.url,
    }
    if completion.perf_metrics is not None:
        record["perf_metrics"] = asdict(completion.perf_metrics)
    if others:
        record["answers"] = [_answer_record(answer) for answer in completion.answers]
    return record


def _answer_record(answer: Answer) -> dict[str, Any]:
    record: dict[str, Any] = {"text": answer.text}
    if answer.reasoning:
        record["reasoning"] = answer.reasoning
    record |= {"finish_reason": answer.finish_reason, "stop_reason": answer.stop_reason}
    whole = asdict(answer)
    return record | {name: whole[name] for name in _DETAILS if whole[name] not in (None, ())}


def error_record(error: DeepseekTritonError) -> dict[str, Any]:
    return {"type": type(error).__name__, "code": error.code, "message": error.message}


def as_json(record: Any) -> str:
    """Write `record` as JSON on one line. Infinite numbers and NaN, which JSON can't express, become null."""
    return json.dumps(_finite(record), ensure_ascii=False, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return value


def usage_line(completion: Completion) -> str:
    """One line: how many tokens, how fast, and which server answered."""
    parts = [f"{_count(completion.num_input_tokens)} tokens in", f"{_count(completion.num_output_tokens)} out"]
    if completion.time_to_first_token_s is not None:
        parts.append(f"first after {completion.time_to_first_token_s:.2f} s")
    parts.append(f"{completion.total_s:.2f} s in all")
    rate = tokens_per_s(completion)
    if rate is not None:
        parts.append(f"{rate:.1f} tokens/s")
    ended = completion.finish_reason or "ended"
    return f"{', '.join(parts)}; {ended}; {completion.request_id} on {completion.url}"


def tokens_per_s(completion: Completion) -> float | None:
    """Generated tokens a second over the whole request; None where the server doesn't count tokens."""
    if completion.num_output_tokens is None or completion.total_s <= 0:
        return None
    return completion.num_output_tokens / completion.total_s


def _count(number: int | None) -> str:
    return "?" if number is None else str(number)
