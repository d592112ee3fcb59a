"""Inputs and outputs as bytes, for both protocols. No I/O; what names mean is `dialect`'s matter.

Tensors are as in Triton's gRPC protocol: little-endian; each BYTES element follows its length in 4 bytes. This uses
`struct`, not numpy, which costs more than it saves for the few elements of a text request.
"""

import json
import math
import operator
import struct
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any

from deepseek_triton_client._core.exceptions import InvalidRequest, ProtocolError, ServerError, error_from_server
from deepseek_triton_client._core.interfaces import Input, Outputs

_FORMATS = {
    "BOOL": "?",
    "INT8": "b",
    "INT16": "h",
    "INT32": "i",
    "INT64": "q",
    "UINT8": "B",
    "UINT16": "H",
    "UINT32": "I",
    "UINT64": "Q",
    "FP16": "e",
    "FP32": "f",
    "FP64": "d",
}
_SIZES = {datatype: struct.calcsize(f"<{code}") for datatype, code in _FORMATS.items()}
_LENGTH = struct.Struct("<I")


def encode(datatype: str, elements: Sequence[Any]) -> bytes:
    if datatype == "BYTES":
        texts = [element.encode() for element in elements]
        return b"".join(_LENGTH.pack(len(text)) + text for text in texts)
    return struct.pack(f"<{len(elements)}{_FORMATS[datatype]}", *elements)


def decode(name: str, datatype: str, data: bytes) -> list[Any] | None:
    """Return the elements of a tensor; None for an unknown datatype. Raises ProtocolError, naming `name`."""
    if datatype != "BYTES" and datatype not in _FORMATS:
        return None
    try:
        if datatype != "BYTES":
            return list(struct.unpack(f"<{len(data) // _SIZES[datatype]}{_FORMATS[datatype]}", data))
        start, texts = 0, []
        while start < len(data):
            (length,) = _LENGTH.unpack_from(data, start)
            start += 4
            if start + length > len(data):
                raise ValueError(f"expected an element of {length} bytes, got {len(data) - start}")
            texts.append(str(data[start : start + length], "utf-8"))
            start += length
        return texts
    except (ValueError, struct.error) as exc:
        raise ProtocolError(f"{name}: expected {datatype} elements, got {data[:64]!r} ({exc})") from exc


_EXPECTED = {
    "BYTES": "a text",
    "BOOL": "true or false",
    "INT32": "a whole number from -2^31 to 2^31 - 1",
    "UINT64": "a whole number from -2^63 to 2^64 - 1",  # the seed
    "FP32": "a number",
}


def checked(name: str, datatype: str, value: Any, also: str = "") -> Any:
    """Return `value` as a plain Python object of the datatype. Raises InvalidRequest; `also`: what it expects too."""
    try:
        element = _plain(datatype, value)
        encode(datatype, [element])
    except (TypeError, ValueError, OverflowError, struct.error) as exc:
        raise InvalidRequest(f"{name}: expected {also}{_EXPECTED[datatype]}, got {value!r:.200}") from exc
    return element


def _plain(datatype: str, value: Any) -> Any:
    """Raises TypeError or OverflowError for a value of another kind."""
    if datatype == "BYTES" and isinstance(value, str):
        return value
    is_boolean = isinstance(value, bool)
    if datatype == "BOOL":
        # numpy's bool is no subclass of bool, and numpy may not be installed.
        kind = type(value)
        is_boolean = is_boolean or (kind.__module__ == "numpy" and kind.__name__ in ("bool", "bool_"))
        if is_boolean:
            return bool(value)
    elif datatype in ("INT32", "UINT64") and not is_boolean:
        return operator.index(value)
    elif datatype == "FP32" and isinstance(value, Real) and not is_boolean and math.isfinite(value):
        return float(value)
    raise TypeError


def encode_json(request_id: str, inputs: Sequence[Input]) -> bytes:
    """Return the body of a POST to generate_stream."""
    body: dict[str, Any] = {"id": request_id}
    for each in inputs:
        body[each.name] = each.values[0] if len(each.values) == 1 else list(each.values)
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()


def decode_json(data: bytes) -> Outputs:
    """Return the outputs in an event of generate_stream. Raises its `{"error": ...}`, or ProtocolError."""
    outputs = json_object(data)
    if "error" in outputs:
        raise error_from_server(error_text(outputs["error"]), otherwise=ServerError)
    return outputs


_CODES = {
    "unsupported_parameter": "E_UNSUPPORTED",
    "context_length_exceeded": "E_PROMPT_TOO_LONG",
    "overloaded": "E_OVERLOADED",
    "unavailable": "E_UNAVAILABLE",
    "cancelled": "E_CANCELLED",
    "internal_error": "E_INTERNAL",
}
"""A gateway's code of an error -> the backend's."""


def error_text(error: Any) -> str:
    """Triton's errors are texts; OpenAI's are objects with a message, before which a gateway's code is put."""
    error = error if isinstance(error, dict) else {"message": error}
    code, message = _CODES.get(str(error.get("code"))), str(error.get("message", error))
    return f"[{code}] {message}" if code else message


def decode_tensors(tensors: Iterable[tuple[str, str, bytes]]) -> Outputs:
    """Return the outputs of a gRPC response, given as (name, datatype, contents). Outputs of unknown datatypes are left
    out. Raises ProtocolError for contents that don't fit their datatype."""
    outputs: dict[str, Any] = {}
    for name, datatype, data in tensors:
        values = decode(name, datatype, data)
        if values is not None:
            outputs[name] = values[0] if len(values) == 1 else values
    return outputs


def json_object(data: bytes) -> dict[str, Any]:
    """Return a JSON object. Raises ProtocolError for anything but a JSON object in UTF-8."""
    try:
        # Decoded here, because json.loads would guess at UTF-16 and accept halves of surrogate pairs.
        value = json.loads(data.decode())
        if b"\\u" in data:  # an escape may be half of a pair too, which no file and no terminal takes
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as exc:
        raise ProtocolError(f"expected a JSON object, got {data[:200]!r}") from exc
    if not isinstance(value, dict):
        raise ProtocolError(f"expected a JSON object, got {data[:200]!r}")
    return value
