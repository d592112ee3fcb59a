"""Requests and completions as JSON: prompts and conversations from files and rows, answers for `generate --json`.

One request is a mapping with "prompt" or "messages", as `Client.generate_many` takes it.
"""

import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from deepseek_triton_client import Answer, Cancelled, Completion, InvalidRequest, SamplingParams, Timeouts
from deepseek_triton_client._core.checked_request import batch_request
from deepseek_triton_tools.terminal.output_streams import complain
from deepseek_triton_tools.tool_errors import ToolError

Request = dict[str, Any]


def as_asked(request: Mapping[str, Any], *, chat: bool, system: str | None) -> Request:
    """Turn `request` into a conversation where that is wanted. A system message of its own stays. Raises ToolError for
    token ids, which are no message."""
    asked = dict(request)
    if "prompt" in asked and (chat or system is not None):
        content = asked.pop("prompt")
        if not isinstance(content, str):
            raise ToolError("token ids are no message: leave out --chat and --system")
        asked["messages"] = [{"role": "user", "content": content}]
    if system is not None:
        messages = asked["messages"]
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        if not any(message["role"] == "system" for message in messages):
            asked["messages"] = [{"role": "system", "content": system}, *messages]
    return asked


def problem_of_messages(messages: Any) -> str | None:
    """Say what is wrong with a conversation; None when nothing is."""
    try:
        batch_request({"messages": messages}, params=SamplingParams(), timeouts=Timeouts())
    except InvalidRequest as error:
        return error.message
    return None


def refused(params: SamplingParams, messages: Any = None) -> str:
    """Say what the wire contract refuses on every engine; "" for nothing. The types are right."""
    from deepseek_triton_build import backend_module  # here, because only a batch needs it

    contract, check_value = backend_module("contract"), backend_module("field_values").check_value
    fields, problems = {each.name: each for each in (*contract.SAMPLING_FIELDS, *contract.REQUEST_FIELDS)}, []
    for field, value in params.given():
        try:
            if (spec := fields.get(field.name)) and value != spec.off:
                check_value(spec, value)
        except ValueError as error:
            problems.append(str(error))
    for role in sorted({each["role"] for each in messages or () if isinstance(each, dict)}.difference(contract.ROLES)):
        problems.append(f"role: expected one of {', '.join(contract.ROLES)}, got {role!r:.100}")
    return "; ".join(problems)


def read_messages(path: Path) -> Any:
    """Read a conversation from a JSON file. Raises ToolError when it can't be read, or holds no conversation."""
    try:
        messages = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise ToolError(f"{file_name(path)} is not JSON: {error}") from error
    if (problem := problem_of_messages(messages)) is not None:
        raise ToolError(f"{file_name(path)}: {problem}")
    return messages


def read_text(path: Path) -> str:
    """Read the whole of a file; `-` is standard input. Raises ToolError when it can't be read or is not UTF-8."""
    try:
        content = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
        return content.decode("utf-8")
    except OSError as error:
        raise ToolError(f"{file_name(path)} can't be read: {error.strerror}", exit_code=2) from error
    except UnicodeDecodeError as error:
        raise ToolError(f"{file_name(path)} is not UTF-8: {error.reason} at byte {error.start}") from error


def file_name(path: Path) -> str:
    """The name of an input for messages; `-` is standard input."""
    return "standard input" if str(path) == "-" else str(path)


_ItemT = TypeVar("_ItemT")
_ReadT = TypeVar("_ReadT")

_MOST_PROBLEMS = 10


def checked_rows(
    name: str, kind: str, items: Iterable[tuple[int, _ItemT]], parse: Callable[[_ItemT], _ReadT]
) -> list[_ReadT]:
    """Parse the numbered items of a file. Each problem is one line on stderr.

    :param kind: names an item in messages, such as "line".
    :param parse: raises ToolError for a wrong item.
    :raises ToolError: when one is wrong.
    """
    parsed, num_wrong = [], 0
    for number, item in items:
        try:
            parsed.append(parse(item))
        except ToolError as error:
            num_wrong += 1
            if num_wrong <= _MOST_PROBLEMS:
                complain(f"{name} {kind} {number}: {error}")
    if num_wrong:
        total = num_wrong + len(parsed)
        shown = "" if num_wrong <= _MOST_PROBLEMS else f"; the first {_MOST_PROBLEMS} are listed"
        raise ToolError(f"{num_wrong} of {total} {kind}s of {name} are wrong{shown}")
    return parsed


def json_of_line(line: bytes) -> Any:
    """Raises ToolError, which leaves the line's number to the caller: json's own is always 1, or 2 at its end."""
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise ToolError(f"not JSON: {error.msg} at character {error.pos + 1}") from error
    except (ValueError, RecursionError) as error:
        raise ToolError(f"not JSON: {error}") from error


def cut_off_error(completion: Completion) -> Cancelled | None:
    """Return the error of an answer that the server ended before it was complete; None if there is none."""
    ends = [each.finish_reason for each in completion.answers if each.finish_reason in ("cancelled", "timeout")]
    return Cancelled(f"the answer is not complete: {ends[0]}", code="E_CANCELLED") if ends else None


def complain_of_cut(completion: Completion, verb: str) -> int:
    """Say that an answer is not complete. Returns the exit code of `verb`: 1 where the server ended the answer."""
    if cut_off := cut_off_error(completion):
        complain(f"deepseek-triton {verb}: {cut_off.message}")
    elif completion.finish_reason == "length" and completion.reasoning and not completion.text:
        complain(f"deepseek-triton {verb}: the answer is not complete: its reasoning reached max_tokens")
    return 1 if cut_off else 0


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
    counts = (completion.num_input_tokens, completion.num_output_tokens)
    num_input, num_output = ("?" if number is None else number for number in counts)
    parts = [f"{num_input} tokens in", f"{num_output} out"]
    if completion.time_to_first_token_s is not None:
        parts.append(f"first after {completion.time_to_first_token_s:.2f} s")
    parts.append(f"{completion.total_s:.2f} s in all")
    if (rate := tokens_per_s(completion)) is not None:
        parts.append(f"{rate:.1f} tokens/s")
    ended = completion.finish_reason or "ended"
    return f"{', '.join(parts)}; {ended}; {completion.request_id} on {completion.url}"


def tokens_per_s(completion: Completion) -> float | None:
    """Generated tokens a second over the whole request; None where the server doesn't count tokens."""
    if completion.num_output_tokens is None or completion.total_s <= 0:
        return None
    return completion.num_output_tokens / completion.total_s
