"""Rows of a dataset file, as trtllm-bench, `generate`, vLLM, Mooncake and AIPerf write them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepseek_triton_client import InvalidRequest, SamplingParams
from deepseek_triton_tools.generating.prompt_sources import json_of_line
from deepseek_triton_tools.tool_errors import ToolError

HASHED_BLOCK = 512
"""Tokens that one hash id of a Mooncake trace stands for."""

_PROMPTS = ("input_ids", "logits", "prompt", "text_input", "input_length")
"""`logits` is trtllm-bench's old name of `input_ids`."""
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
    reader = _RowReader(row, vocab_size)
    parsed = DatasetRow(
        prompt=reader.prompt(),
        output_tokens=reader.output_tokens(),
        at_s=reader.at_s(),
        fields=reader.fields(),
    )
    if reader.problems:
        raise ToolError("; ".join(reader.problems))
    return parsed


class _RowReader:
    """Takes out of `row` what it knows. What is left has to be sampling fields."""

    def __init__(self, row: dict[str, Any], vocab_size: int | None) -> None:
        self._row = row
        self._vocab_size = vocab_size
        self.problems: list[str] = []

    def prompt(self) -> str | NDArray[np.int32] | HashedPrompt:
        if "messages" in self._row:
            self.problems.append("messages can't be sent as a prompt: render them with the model's chat template")
            del self._row["messages"]
            return ""
        name = self._one_of(_PROMPTS)
        if name is None:
            self.problems.append(f"expected one of {', '.join(_PROMPTS)}, got {', '.join(self._row) or 'nothing'}")
            return ""
        value = self._row.pop(name)
        if name == "input_length":
            return self._hashed_prompt(value)
        if isinstance(value, str) and value and name in ("prompt", "text_input"):
            if not can_be_sent(value):
                self.problems.append(f"{name}: half of a surrogate pair can't be sent: {value!r:.100}")
            return value
        ids = _token_ids(value)
        if ids is None or name == "text_input":
            expected = {"prompt": "a text or token ids", "text_input": "a text"}.get(name, "token ids")
            self.problems.append(f"{name}: expected {expected}, got {value!r:.100}")
            return ""
        if self._vocab_size is not None and (highest := int(ids.max())) >= self._vocab_size:
            self.problems.append(
                f"{name}: expected token ids from 0 to {self._vocab_size - 1}, the server's vocabulary, got {highest}"
            )
        return ids

    def _hashed_prompt(self, length: Any) -> HashedPrompt:
        hash_ids = self._row.pop("hash_ids", None)
        if not _is_count(length):
            self.problems.append(f"input_length: expected a whole number from 1, got {length!r:.100}")
        elif hash_ids is not None and not (
            isinstance(hash_ids, list) and all(type(hash_id) is int and hash_id >= 0 for hash_id in hash_ids)
        ):
            self.problems.append(f"hash_ids: expected whole numbers from 0, got {hash_ids!r:.100}")
        elif hash_ids is not None and len(hash_ids) < length // HASHED_BLOCK:
            self.problems.append(
                f"hash_ids: expected {length // HASHED_BLOCK} or more, one for each {HASHED_BLOCK} tokens of "
                f"input_length {length}, got {len(hash_ids)}"
            )
        else:
            return HashedPrompt(length, tuple(hash_ids or ()))
        return HashedPrompt(0, ())

    def output_tokens(self) -> int | None:
        name = self._one_of(_OUTPUTS)
        value = None if name is None else self._row.pop(name)
        if value is None or _is_count(value):
            return value
        self.problems.append(f"{name}: expected a whole number from 1, got {value!r:.100}")
        return None

    def at_s(self) -> float | None:
        """The time in seconds; the file has milliseconds."""
        value = self._row.pop("timestamp", None)
        if value is None:
            return None
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < float("inf"):
            return value / 1000
        self.problems.append(f"timestamp: expected milliseconds from 0, got {value!r:.100}")
        return None

    def fields(self) -> Mapping[str, Any] | None:
        fields = {name: value for name, value in self._row.items() if name not in _MEANT_FOR_OTHERS}
        for name in [name for name in fields if name not in _SAMPLING]:
            # The client's own hint, which this one precedes, knows sampling fields only.
            meant = difflib.get_close_matches(name, (*_KEYS, *_SAMPLING), n=1, cutoff=_ALIKE)
            if meant and meant[0] in _KEYS:
                self.problems.append(f"unknown {name!r}; did you mean {meant[0]!r}?")
                del fields[name]
        try:
            SamplingParams().merged(fields)
        except InvalidRequest as error:
            self.problems.append(error.message)
        return fields or None

    def _one_of(self, names: tuple[str, ...]) -> str | None:
        """The name that the row has. It is a problem if it has several."""
        present = [name for name in names if name in self._row]
        if len(present) > 1:
            self.problems.append(f"expected only one of {' and '.join(present)}")
            for name in present[1:]:
                del self._row[name]
        return present[0] if present else None


def can_be_sent(text: str) -> bool:
    """Whether `text` can be encoded. Half of a surrogate pair is valid JSON, but has no UTF-8."""
    return re.search("[\ud800-\udfff]", text) is None


def _token_ids(value: Any) -> NDArray[np.int32] | None:
    """The ids as an array, which takes a tenth of the memory; None for anything else."""
    if not isinstance(value, list) or not value or {*map(type, value)} != {int}:
        return None
    return np.array(value, np.int32) if min(value) >= 0 and max(value) < 2**31 else None


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 < value < 2**31
