"""Responses into chunks: what each response says about each answer, and which of its text is new."""

import json
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from typing import Any

from deepseek_triton_client._core.exceptions import ProtocolError
from deepseek_triton_client._core.interfaces import Outputs
from deepseek_triton_client._core.results import Chunk, Logprob, PerfMetrics, TokenLogprobs

_INCOMPLETE = "\ufffd"
"""At the end of a text this marks a character whose last bytes a later token may bring."""


class Deltas:
    """The texts of one answer, added in order: each is an increment."""

    def add(self, text: str, *, last: bool) -> str:
        """Return the new text; `last`: no more will come. Raises ProtocolError for a text that can't follow."""
        return text

    def end(self) -> str:
        """Return the text that was held back, when the stream ends without saying which text was the last."""
        return ""


class Cumulative(Deltas):
    """Each text repeats all before it. Text that was returned stays, even if a later text is shorter."""

    def __init__(self) -> None:
        self._returned = ""
        """Text that was returned; a prefix of the text received."""
        self._text = ""
        """The text received last; of two of which one begins with the other, the longer one."""

    def add(self, text: str, *, last: bool) -> str:
        stable = text if last else text.rstrip(_INCOMPLETE)
        if not text.startswith(self._returned):
            if self._returned.startswith(stable):  # shorter than before, as when a stop string was cut off
                return ""
            raise ProtocolError(
                f"expected each text of the stream to begin with the one before it, got {text[-80:]!r} after "
                f'{self._returned[-80:]!r}; where the texts are increments, make the client with stream_mode="delta"'
            )
        self._text = text
        return self._return_new(stable)

    def end(self) -> str:
        return self._return_new(self._text)

    def _return_new(self, text: str) -> str:
        new = text[len(self._returned) :]
        if new:
            self._returned = text
        return new


class ResponseReader:
    """Reads the responses to one request."""

    def __init__(self, num_answers: int, increments: type[Deltas], *, says_end: bool) -> None:
        """`says_end`: the model sends a finish_reason at the end of every answer."""
        self.finished = False
        """Whether every answer has come, with its finish_reason."""
        self._num_answers = num_answers
        self._says_end = says_end
        self._answers = defaultdict[int, Deltas](increments)
        self._ended: set[int] = set()

    def chunks(self, outputs: Outputs) -> list[Chunk]:
        """Return the chunks of one response. Raises ProtocolError."""
        if _OTHER_OUTPUTS.isdisjoint(outputs):  # true for nearly every response
            text = outputs.get("text_output")
            if type(text) is str:
                new = self._answers[0].add(text, last=False)
                return [Chunk(new)] if new else []
        return self._read_all(outputs)

    def end(self) -> list[Chunk]:
        """Return the text held back until the end of the stream. Raises ProtocolError for an incomplete answer."""
        if self.finished:
            return []
        if self._says_end:
            raise ProtocolError(
                "the stream ended without a finish_reason: the server lost the end of the answer, which Triton's HTTP "
                "front end does under load; grpc:// is not affected"
            )
        if len(self._answers) < self._num_answers:
            raise ProtocolError(f"expected {self._num_answers} answers, got {len(self._answers)}")
        held = [(index, self._answers[index].end()) for index in sorted(self._answers.keys() - self._ended)]
        return [Chunk(text, index) for index, text in held if text]

    def _read_all(self, outputs: Outputs) -> list[Chunk]:
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
            raise ProtocolError(f"expected {self._num_answers} answers, got one with index {index}")
        ended = row.get("finish_reason") is not None
        new = self._answers[index].add(text, last=ended)
        if ended:
            self._ended.add(index)
            self.finished = len(self._ended) == self._num_answers
        return Chunk(new, **row)


class ModelInfoReader(ResponseReader):
    """Reads the answer to the task "describe": what the model is counts as the text."""

    def chunks(self, outputs: Outputs) -> list[Chunk]:
        return super().chunks({**outputs, "text_output": outputs.get("model_info")})


def read_model_info(text: str) -> dict[str, Any]:
    """Return what the model is. Raises ProtocolError."""
    with suppress(ValueError, RecursionError):
        info = json.loads(text)
        if isinstance(info, dict):
            return info
    raise ProtocolError(f"model_info: expected a JSON object, got {text!r:.200}")


def _rows(outputs: Outputs, count: int) -> list[dict[str, Any]]:
    """Fields of Chunk for each of the `count` answers in a response, without the text."""
    rows: list[dict[str, Any]] = [{"index": index} for index in range(count)]
    for name, value in outputs.items():
        if name in _COLUMNS:
            field, read = _COLUMNS[name]
            for row, each in zip(rows, _spread(name, _values(value), count), strict=True):
                row[field] = read(name, each)
    if "output_ids" in outputs:
        _add_output_ids(rows, _values(outputs["output_ids"]))
    measured = {name: _spread(name, _values(outputs[name]), count) for name in _PERF if name in outputs}
    for index, row in enumerate(rows if measured else ()):
        metrics = {name: _PERF[name](name, values[index]) for name, values in measured.items()}
        if any(metrics.values()):  # all are 0 for an answer that was not measured or has not ended
            row["perf_metrics"] = PerfMetrics(**metrics)
    return rows


def _values(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _spread(name: str, values: list[Any], count: int) -> list[Any]:
    """Return one value for each answer."""
    if len(values) == count:
        return values
    if len(values) == 1 and name in _SHARED_BY_ANSWERS:
        return values * count
    raise ProtocolError(f"{name}: expected {count} values, one for each text, got {len(values)}")


def _add_output_ids(rows: list[dict[str, Any]], values: list[Any]) -> None:
    """Divide the ids, which follow one another, among the answers: each has num_output_tokens of them."""
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


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ProtocolError(f"{name}: expected a text, got {value!r:.200}")
    return value


def _text_or_none(name: str, value: Any) -> str | None:
    text = _text(name, value)
    return None if text == "None" else text


def _finish_reason(name: str, value: Any) -> str | None:
    reason = _text_or_none(name, value)
    return "cancelled" if reason == "abort" else reason  # vLLM says abort


def _integer(name: str, value: Any) -> int:
    """Read an integer. TensorRT-LLM's llmapi model sends some numbers as text."""
    if type(value) is int:
        return value
    if isinstance(value, str) and value.removeprefix("-").isdecimal() and len(value) <= 20:
        return int(value)
    raise ProtocolError(f"{name}: expected an integer, got {value!r:.200}")


def _number(name: str, value: Any) -> float:
    with suppress(ValueError, OverflowError):
        if isinstance(value, (int, float, str)) and not isinstance(value, bool):
            return float(value)
    raise ProtocolError(f"{name}: expected a number, got {value!r:.200}")


def _logprobs(name: str, value: Any) -> tuple[TokenLogprobs | None, ...]:
    """Read JSON: for each token an object of token id -> {logprob, rank, decoded_token}, or null; or null for all."""
    try:
        return tuple(
            None
            if token is None
            else tuple(
                Logprob(int(token_id), float(entry["logprob"]), entry.get("rank"), entry.get("decoded_token"))
                for token_id, entry in token.items()
            )
            for token in json.loads(_text(name, value)) or ()
        )
    except (ValueError, TypeError, AttributeError, KeyError, OverflowError, RecursionError) as exc:
        raise ProtocolError(f"{name}: expected log-probabilities as JSON, got {value!r:.200}") from exc


_COLUMNS: dict[str, tuple[str, Callable[[str, Any], Any]]] = {
    "sequence_index": ("index", _integer),
    "reasoning_output": ("reasoning", _text),
    "finish_reason": ("finish_reason", _finish_reason),
    "stop_reason": ("stop_reason", _text_or_none),
    "num_input_tokens": ("num_input_tokens", _integer),
    "num_output_tokens": ("num_output_tokens", _integer),
    "num_cached_tokens": ("num_cached_tokens", _integer),
    "num_reasoning_tokens": ("num_reasoning_tokens", _integer),
    "cumulative_logprob": ("cumulative_logprob", lambda name, value: None if value == "None" else _number(name, value)),
    "logprobs": ("logprobs", _logprobs),
    "prompt_logprobs": ("prompt_logprobs", _logprobs),
}
"""Output name -> field of Chunk, and how to read its values. These outputs have one value for each answer."""

_PERF: dict[str, Callable[[str, Any], Any]] = {
    field.name: _number if "float" in str(field.type) else _integer for field in fields(PerfMetrics)
}

_SHARED_BY_ANSWERS = frozenset({"num_input_tokens", "num_cached_tokens", *_PERF})
"""Outputs whose single value holds for all of several answers."""

_OTHER_OUTPUTS = frozenset({*_COLUMNS, "output_ids", *_PERF})
"""Outputs that are read besides the text. Further ones are ignored: a newer server may send more."""
