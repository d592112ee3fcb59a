"""The events of Triton's generate_stream as Parts."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from deepseek_triton_tools.gateway.triton.call import Part, UpstreamError
from deepseek_triton_tools.gateway.triton.server_errors import error_of_message

T = TypeVar("T")


class _Event(msgspec.Struct, gc=False):
    """One response of the model. An output with one value is the value itself, one with several is a list."""

    text_output: str | list[str] = ""
    reasoning_output: str | list[str] = ""
    finish_reason: str | list[str] = ""
    stop_reason: str | list[str] = ""
    num_input_tokens: int | list[int] = 0
    num_output_tokens: int | list[int] = 0
    num_cached_tokens: int | list[int] = 0
    num_reasoning_tokens: int | list[int] = 0
    output_ids: int | list[int] = []
    logprobs: str | list[str] = ""
    prompt_logprobs: str | list[str] = ""
    sequence_index: int | list[int] = 0
    error: str = ""


_decode = msgspec.json.Decoder(_Event).decode
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
        # An event may have many megabytes, so only what is new is searched for its end.
        begin = max(0, len(self._rest) - 1)
        self._rest += data
        if self._rest.find(b"\n\n", begin) < 0:
            return []
        *events, self._rest = self._rest.split(b"\n\n")
        parts: list[Part] = []
        for event in events:
            _, data_field, document = event.partition(b"data:")
            if data_field:
                try:
                    parts += parts_of(document)
                except UpstreamError as error:
                    self.error = error
                    break
        return parts


def parts_of(document: bytes | bytearray) -> list[Part]:
    """The parts in the JSON of one response. Raises UpstreamError."""
    try:
        event = _decode(document)
    except msgspec.DecodeError as error:
        raise UpstreamError(f"the server sent an event that is not the model's: {error}") from error
    if event.error:
        raise error_of_message(event.error)
    if isinstance(event.sequence_index, list):
        return _several(event, event.sequence_index)
    return [_part(event, 0, event.sequence_index, _listed(event.output_ids))]


def outputs_of(event: bytes) -> dict[str, object]:
    """The outputs in the one event of a task's answer. Raises UpstreamError."""
    try:
        outputs = msgspec.json.decode(event.partition(b"data:")[2], type=dict[str, object])
    except msgspec.DecodeError as error:
        raise UpstreamError(f"the server sent an answer that is not the model's: {error}") from error
    if "error" in outputs:
        raise error_of_message(str(outputs["error"]))
    return outputs


def _several(event: _Event, sequences: list[int]) -> list[Part]:
    counts = _listed(event.num_output_tokens)
    parts, begin = [], 0
    ids = _listed(event.output_ids)
    for at, sequence in enumerate(sequences):
        end = begin + counts[at] if at < len(counts) else begin
        parts.append(_part(event, at, sequence, ids[begin:end]))
        begin = end
    return parts


def _part(event: _Event, at: int, sequence: int, ids: list[int]) -> Part:
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
        ids,
        _at(event.logprobs, at),
        _at(event.prompt_logprobs, at),
    )


def _at(value: T | list[T], at: int) -> T:
    return value[at] if isinstance(value, list) else value


def _listed(value: int | list[int]) -> list[int]:
    return value if isinstance(value, list) else [value]
