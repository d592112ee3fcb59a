"""Responses -> chunks: what each response says of each answer, read and checked."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from deepseek_triton_client._core.exceptions import ProtocolError
from deepseek_triton_client._core.results import Chunk, Logprob, PerfMetrics, TokenLogprobs
from deepseek_triton_client._core.text_increments import Increments
from deepseek_triton_client._core.transport import Outputs


class ResponseReader:
    """Turns the responses of one request into chunks."""

    def __init__(self, num_answers: int, increments: Callable[[], Increments], *, says_end: bool) -> None:
        """`says_end`: the model sends a finish_reason with the end of every answer."""
        self.finished = False
        """Every answer has come with its finish_reason."""
        self._num_answers = num_answers
        self._increments = increments
        self._says_end = says_end
        self._answers: dict[int, Increments] = {}
        self._ended: set[int] = set()

    def chunks(self, outputs: Outputs) -> list[Chunk]:
        """What is new. Raises ProtocolError."""
        if _BESIDES_TEXT.isdisjoint(outputs):  # nearly every response
            text = outputs.get("text_output")
            if type(text) is str:
                new = self._answer(0).add(text, last=False)
                return [Chunk(new)] if new else []
        return self._all(outputs)

    def end(self) -> list[Chunk]:
        """The stream has ended: what was held back. Raises ProtocolError where an answer is not complete."""
        if self.finished:
            return []
        if self._says_end:
            raise ProtocolError("the stream ended without a finish_reason")
        if len(self._answers) < self._num_answers:
            raise ProtocolError(f"expected {self._num_answers} answers, and {len(self._answers)} came")
        held = [(index, self._answers[index].end()) for index in sorted(self._answers.keys() - self._ended)]
        return [Chunk(text, index) for index, text in held if text]

    def _answer(self, index: int) -> Increments:
        answer = self._answers.get(index)
        if answer is None:
            answer = self._answers[index] = self._increments()
        return answer

    def _all(self, outputs: Outputs) -> list[Chunk]:
        if not outputs:
            return []
        if "text_output" not in outputs:
            raise ProtocolError(f"expected the output text_output, got only {sorted(outputs)}")
        texts = [_text("text_output", each) for each in _values(outputs["text_output"])]
        rows = _rows(outputs, len(texts))
        found = [self._chunk(text, row) for text, row in zip(texts, rows, strict=True)]
        return [chunk for chunk in found if chunk.text or chunk != Chunk("", chunk.index)]

    def _chunk(self, text: str, row: dict[str, Any]) -> Chunk:
        index = row["index"]
        if not 0 <= index < self._num_answers:
            raise ProtocolError(f"expected {self._num_answers} answers, and one of index {index} came")
        ended = row.get("finish_reason") is not None
        new = self._answer(index).add(text, last=ended)
        if ended:
            self._ended.add(index)
            self.finished = len(self._ended) == self._num_answers
        return Chunk(new, **row)


def _rows(outputs: Outputs, count: int) -> list[dict[str, Any]]:
    """What a response says of each of its `count` answers: field of Chunk -> value. The text is not among them."""
    rows: list[dict[str, Any]] = [{"index": place} for place in range(count)]
    for name, value in outputs.items():
        if name in _COLUMNS:
            field, read = _COLUMNS[name]
            for row, each in zip(rows, _spread(name, _values(value), count), strict=True):
                row[field] = read(name, each)
    if "output_ids" in outputs:
        _add_output_ids(rows, _values(outputs["output_ids"]))
    if not _PERF.keys().isdisjoint(outputs):
        _add_perf_metrics(rows, outputs)
    return rows


def _values(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _spread(name: str, values: list[Any], count: int) -> list[Any]:
    """One value for each answer."""
    if len(values) == count:
        return values
    if len(values) == 1 and name in _OF_THE_REQUEST:
        return values * count
    raise ProtocolError(f"{name}: expected {count} values, one for each text, got {len(values)}")


def _add_output_ids(rows: list[dict[str, Any]], values: list[Any]) -> None:
    """They follow one another, num_output_tokens of each answer."""
    ids = [_integer("output_ids", each) for each in values]
    if len(rows) == 1:
        rows[0]["output_ids"] = tuple(ids)
        return
    counts = [row.get("num_output_tokens") or 0 for row in rows]
    if sum(counts) != len(ids):
        raise ProtocolError(f"output_ids: expected {sum(counts)}, as many as num_output_tokens says, got {len(ids)}")
    start = 0
    for row, count in zip(rows, counts, strict=True):
        row["output_ids"] = tuple(ids[start : start + count])
        start += count


def _add_perf_metrics(rows: list[dict[str, Any]], outputs: Outputs) -> None:
    """Of an answer that was not measured, or goes on beside one that ended, every value is 0."""
    given = {name: _spread(name, _values(outputs[name]), len(rows)) for name in _PERF if name in outputs}
    for place, row in enumerate(rows):
        metrics = {name: _PERF[name](name, values[place]) for name, values in given.items()}
        if any(metrics.values()):
            row["perf_metrics"] = PerfMetrics(**metrics)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ProtocolError(f"{name}: expected a text, got {value!r:.200}")
    return value


def _text_or_none(name: str, value: Any) -> str | None:
    text = _text(name, value)
    return None if text == "None" else text


def _finish_reason(name: str, value: Any) -> str | None:
    reason = _text_or_none(name, value)
    return "cancelled" if reason == "abort" else reason  # vLLM's word for it


def _integer(name: str, value: Any) -> int:
    """TensorRT-LLM's llmapi model sends some numbers as text."""
    if type(value) is int:
        return value
    if isinstance(value, str) and value.removeprefix("-").isdecimal() and len(value) <= 20:
        return int(value)
    raise ProtocolError(f"{name}: expected an integer, got {value!r:.200}")


def _number(name: str, value: Any) -> float:
    try:
        if isinstance(value, (int, float, str)) and not isinstance(value, bool):
            return float(value)
    except (ValueError, OverflowError) as exc:
        raise ProtocolError(f"{name}: expected a number, got {value!r:.200}") from exc
    raise ProtocolError(f"{name}: expected a number, got {value!r:.200}")


def _number_or_none(name: str, value: Any) -> float | None:
    return None if value == "None" else _number(name, value)


def _logprobs(name: str, value: Any) -> tuple[TokenLogprobs | None, ...]:
    """Of JSON: for each token an object of token id -> {logprob, rank, decoded_token}, or null; or null for all."""
    try:
        document = json.loads(_text(name, value))
        return tuple(None if token is None else _token(token) for token in document or ())
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as exc:
        raise ProtocolError(f"{name}: expected log-probabilities as JSON, got {value!r:.200}") from exc


def _token(token: Mapping[str, Mapping[str, Any]]) -> TokenLogprobs:
    return tuple(
        Logprob(int(token_id), float(entry["logprob"]), entry.get("rank"), entry.get("decoded_token"))
        for token_id, entry in token.items()
    )


_COLUMNS: dict[str, tuple[str, Callable[[str, Any], Any]]] = {
    "sequence_index": ("index", _integer),
    "reasoning_output": ("reasoning", _text),
    "finish_reason": ("finish_reason", _finish_reason),
    "stop_reason": ("stop_reason", _text_or_none),
    "num_input_tokens": ("num_input_tokens", _integer),
    "num_output_tokens": ("num_output_tokens", _integer),
    "num_cached_tokens": ("num_cached_tokens", _integer),
    "cumulative_logprob": ("cumulative_logprob", _number_or_none),
    "logprobs": ("logprobs", _logprobs),
    "prompt_logprobs": ("prompt_logprobs", _logprobs),
}
"""Output with one value for each answer -> field of Chunk, and how it is read."""

_PERF: dict[str, Callable[[str, Any], Any]] = {
    field.name: _number if "float" in str(field.type) else _integer for field in fields(PerfMetrics)
}

_OF_THE_REQUEST = frozenset({"num_input_tokens", "num_cached_tokens", *_PERF})
"""Where there is one value for several answers, it holds for each."""

_BESIDES_TEXT = frozenset({*_COLUMNS, "output_ids", *_PERF})

OUTPUT_NAMES = frozenset({"text_output", *_BESIDES_TEXT})
"""All that are read. Others are passed over: a newer server may send more."""
