"""The events of Triton's generate_stream as Parts."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from deepseek_triton_tools.gateway.triton.call import MOST_ANSWER_BYTES, Part, UpstreamError
from deepseek_triton_tools.gateway.triton.server_errors import NOT_JSON, error_of_message

T = TypeVar("T")


class _Event(msgspec.Struct, gc=False):
    """A response about several sequences: a value for each, in a list. Or an error."""

    text_output: str | list[str] = ""
    reasoning_output: str | list[str] = ""
    finish_reason: str | list[str] = ""
    stop_reason: str | list[str] = ""
    num_input_tokens: int | list[int] = 0
    num_output_tokens: int | list[int] = 0
    num_cached_tokens: int | list[int] = 0
    num_reasoning_tokens: int | list[int] = 0
    logprobs: str | list[str] = ""
    prompt_logprobs: str | list[str] = ""
    sequence_index: int | list[int] = 0
    error: str = ""


_decode_part = msgspec.json.Decoder(Part).decode
_decode_event = msgspec.json.Decoder(_Event).decode
_NOTHING = Part()
_NONE = "None"
"""The model's word for a finish reason and a stop reason that are not there."""


class EventReader:
    """Takes the bytes of a stream as they come."""

    def __init__(self) -> None:
        self.error: UpstreamError | None = None
        """Set by an event that is an error, or that is no event of the model. Nothing after it counts."""
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[Part]:
        """Return the parts of the events that are whole now, up to one that is an error."""
        if self._rest or not data.endswith(b"\n\n"):
            data = self._whole_events(data)
        parts: list[Part] = []
        for event in data.split(b"\n\n"):
            _, data_field, document = event.partition(b"data:")
            if data_field:
                try:
                    parts += _parts_of(document)
                except UpstreamError as error:
                    self.error = error
                    break
        return parts

    def _whole_events(self, data: bytes) -> bytes:
        """The bytes up to the last end of an event; the others are kept."""
        # An event may have many megabytes, so only what is new is searched for its end.
        begin = max(0, len(self._rest) - 1)
        self._rest += data
        if len(self._rest) > MOST_ANSWER_BYTES:
            self.error = UpstreamError(f"the server sent an event of more than {MOST_ANSWER_BYTES:,} bytes")
            self._rest.clear()
            return b""
        end = self._rest.rfind(b"\n\n", begin) + 2
        if end < 2:
            return b""
        whole = bytes(self._rest[:end])
        del self._rest[:end]
        return whole


def _parts_of(document: bytes) -> list[Part]:
    """The parts in the JSON of one response. Raises UpstreamError."""
    try:
        part = _decode_part(document)
    except NOT_JSON:  # it has lists, or is broken
        return _several(document)
    if part == _NOTHING:  # it may be an error
        return _several(document)
    if part.finish_reason == _NONE:
        part.finish_reason = ""
    if part.stop_reason == _NONE:
        part.stop_reason = ""
    return [part]


def outputs_of(event: bytes) -> dict[str, object]:
    """The outputs in the one event of a task's answer. Raises UpstreamError."""
    try:
        outputs = msgspec.json.decode(event.partition(b"data:")[2], type=dict[str, object])
    except NOT_JSON as error:
        raise UpstreamError(f"the server sent an answer that is not the model's: {error}") from error
    if "error" in outputs:
        raise error_of_message(str(outputs["error"]))
    return outputs


def _several(document: bytes) -> list[Part]:
    try:
        event = _decode_event(document)
    except NOT_JSON as error:
        raise UpstreamError(f"the server sent an event that is not the model's: {error}") from error
    if event.error:
        raise error_of_message(event.error)
    sequences = event.sequence_index if isinstance(event.sequence_index, list) else [event.sequence_index]
    try:
        return [_part(event, at, sequence) for at, sequence in enumerate(sequences)]
    except IndexError:
        text = f"expected a value for each of {len(sequences)} sequences, got less"
        raise UpstreamError(f"the server sent an event that is not the model's: {text}") from None


def _part(event: _Event, at: int, sequence: int) -> Part:
    finish_reason, stop_reason = _at(event.finish_reason, at), _at(event.stop_reason, at)
    return Part(
        sequence,
        _at(event.text_output, at),
        _at(event.reasoning_output, at),
        "" if finish_reason == _NONE else finish_reason,
        "" if stop_reason == _NONE else stop_reason,
        _at(event.num_input_tokens, at),
        _at(event.num_output_tokens, at),
        _at(event.num_cached_tokens, at),
        _at(event.num_reasoning_tokens, at),
        _at(event.logprobs, at),
        _at(event.prompt_logprobs, at),
    )


def _at(value: T | list[T], at: int) -> T:
    return value[at] if isinstance(value, list) else value
