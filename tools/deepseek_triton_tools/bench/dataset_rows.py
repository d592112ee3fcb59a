"""Rows of a dataset file, as trtllm-bench, `generate`, vLLM, Mooncake and AIPerf write them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepseek_triton_client import InvalidRequest, SamplingParams
from deepseek_triton_tools.generating.records import json_of_line
from deepseek_triton_tools.tool_errors import ToolError

HASHED_BLOCK = 512
"""Tokens that one hash id of a Mooncake trace stands for."""

_PROMPTS = {
    "input_ids": "token ids",
    "logits": "token ids",
    "prompt": "a text or token ids",
    "text_input": "a text",
    "input_length": "a whole number from 1",
}
"""Key -> what it holds. `logits` is trtllm-bench's old name of `input_ids`."""
_OUTPUTS = ("output_tokens", "output_length", "max_tokens")
_MEANT_FOR_OTHERS = ("task_id", "id", "request_id", "model", "stream", "streaming")
_KEYS = (*_PROMPTS, *_OUTPUTS, "timestamp", "hash_ids")
_SAMPLING = tuple(field.name for field in fields(SamplingParams))
_ALIKE = 0.8


@dataclass(frozen=True, slots=True)
class HashedPrompt:
    """A prompt of which only the length is known, and which blocks it has in common with others."""

    length: int
    hash_ids: tuple[int, ...]
    """One for each 512 tokens; the last one may stand for fewer. Tokens without one are in no other prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetRow:
    prompt: str | NDArray[np.int32] | HashedPrompt
    output_tokens: int | None
    at_s: float | None = None
    """Seconds, by the trace's own clock in the file, after the first request later."""
    fields: Mapping[str, Any] | None = None
    """Sampling fields."""


def parse_row(line: bytes, *, vocab_size: int | None = None) -> DatasetRow:
    """Read one line of JSON. Raises ToolError with everything that is wrong with it.

    :param vocab_size: token ids are below it; None where it is not known.
    """
    row = json_of_line(line)
    if isinstance(row, str):
        row = {"prompt": row}
    if isinstance(row, dict) and isinstance(row.get("payload"), dict):
        row |= row.pop("payload")
    if not isinstance(row, dict):
        raise ToolError(f"expected an object with a prompt, got {row!r:.100}")
    parts: dict[str, Any] = {}
    problems: list[str] = []
    # Each takes what it knows out of the row. What is left for the last has to be sampling fields.
    readers: dict[str, Callable[[], Any]] = {
        "prompt": lambda: _prompt(row, vocab_size),
        "output_tokens": lambda: _output_tokens(row),
        "at_s": lambda: _seconds(row),
        "fields": lambda: _fields(row),
    }
    for name, read in readers.items():
        try:
            parts[name] = read()
        except ToolError as error:
            problems.append(str(error))
    if problems:
        raise ToolError("; ".join(problems))
    return DatasetRow(**parts)


def _prompt(row: dict[str, Any], vocab_size: int | None) -> str | NDArray[np.int32] | HashedPrompt:
    if row.pop("messages", None) is not None:
        raise ToolError("messages can't be sent as a prompt: render them with the model's chat template")
    name, value = _one_of(row, tuple(_PROMPTS))
    if name is None:
        raise ToolError(f"expected one of {', '.join(_PROMPTS)}, got {', '.join(row) or 'nothing'}")
    if name == "input_length":
        hash_ids = row.pop("hash_ids", None)
        if _is_count(value):
            return HashedPrompt(value, _hash_ids(hash_ids, value))
    if isinstance(value, str) and value and "text" in _PROMPTS[name]:
        if not can_be_sent(value):
            raise ToolError(f"{name}: half of a surrogate pair can't be sent: {value!r:.100}")
        return value
    is_ids = "token ids" in _PROMPTS[name] and isinstance(value, list) and {*map(type, value)} == {int}
    if not is_ids or min(value) < 0 or max(value) >= 2**31:
        raise ToolError(f"{name}: expected {_PROMPTS[name]}, got {value!r:.100}")
    if vocab_size is not None and max(value) >= vocab_size:
        most = f"token ids from 0 to {vocab_size - 1}, the server's vocabulary"
        raise ToolError(f"{name}: expected {most}, got {max(value)}")
    return np.array(value, np.int32)  # takes a tenth of a list's memory


def _hash_ids(hash_ids: Any, length: int) -> tuple[int, ...]:
    if hash_ids is None:
        return ()
    if not isinstance(hash_ids, list) or not all(type(each) is int and each >= 0 for each in hash_ids):
        raise ToolError(f"hash_ids: expected whole numbers from 0, got {hash_ids!r:.100}")
    if len(hash_ids) < length // HASHED_BLOCK:
        raise ToolError(
            f"hash_ids: expected {length // HASHED_BLOCK} or more, one for each {HASHED_BLOCK} tokens of "
            f"input_length {length}, got {len(hash_ids)}"
        )
    return tuple(hash_ids)


def _output_tokens(row: dict[str, Any]) -> int | None:
    name, value = _one_of(row, _OUTPUTS)
    if value is None:
        return None
    if _is_count(value):
        return int(value)
    raise ToolError(f"{name}: expected a whole number from 1, got {value!r:.100}")


def _seconds(row: dict[str, Any]) -> float | None:
    """The file has milliseconds."""
    value = row.pop("timestamp", None)
    if value is None:
        return None
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < float("inf"):
        return value / 1000
    raise ToolError(f"timestamp: expected milliseconds from 0, got {value!r:.100}")


def _fields(row: dict[str, Any]) -> Mapping[str, Any] | None:
    left = {name: value for name, value in row.items() if name not in _MEANT_FOR_OTHERS}
    # The client's own hint, which this one precedes, knows sampling fields only.
    for name in left.keys() - set(_SAMPLING):
        meant = difflib.get_close_matches(name, (*_KEYS, *_SAMPLING), n=1, cutoff=_ALIKE)
        if meant and meant[0] in _KEYS:
            raise ToolError(f"unknown {name!r}; did you mean {meant[0]!r}?")
    try:
        SamplingParams().merged(left)
    except InvalidRequest as error:
        raise ToolError(error.message) from error
    return left or None


def _one_of(row: dict[str, Any], names: tuple[str, ...]) -> tuple[str | None, Any]:
    """Take the one of these keys that the row has, and its value. It is a problem if it has several."""
    values = {name: row.pop(name) for name in names if name in row}
    if len(values) > 1:
        raise ToolError(f"expected only one of {' and '.join(values)}")
    return next(iter(values.items()), (None, None))


def can_be_sent(text: str) -> bool:
    """Whether `text` can be encoded. Half of a surrogate pair is valid JSON, but has no UTF-8."""
    return re.search("[\ud800-\udfff]", text) is None


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 < value < 2**31
