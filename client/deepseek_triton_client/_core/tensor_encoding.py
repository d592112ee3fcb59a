"""Tensor contents as in Triton's gRPC protocol: little-endian; each BYTES element follows its length in 4 bytes.

This uses `struct`, not numpy, which costs more than it saves for the few elements of a text request.
"""

from __future__ import annotations

import math
import operator
import struct
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

from deepseek_triton_client._core.exceptions import InvalidRequest, ProtocolError

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
    try:
        if datatype == "BYTES":
            return _texts(data)
        if datatype not in _FORMATS:
            return None
        return list(struct.unpack(f"<{len(data) // _SIZES[datatype]}{_FORMATS[datatype]}", data))
    except (ValueError, struct.error) as exc:
        raise ProtocolError(f"{name}: expected {datatype} elements, got {data[:64]!r} ({exc})") from exc


def _texts(data: bytes) -> list[str]:
    """Raises ValueError or struct.error."""
    size, start, texts = len(data), 0, []
    while start < size:
        (length,) = _LENGTH.unpack_from(data, start)
        start += 4
        end = start + length
        if end > size:
            raise ValueError(f"expected an element of {length} bytes, got {size - start}")
        texts.append(str(data[start:end], "utf-8"))
        start = end
    return texts


def checked(name: str, datatype: str, value: Any) -> Any:
    """Return `value` as a plain Python object that fits the datatype. Raises InvalidRequest, naming `name`."""
    try:
        element = _CONVERSIONS[datatype](value)
        encode(datatype, [element])
    except (TypeError, ValueError, OverflowError, struct.error) as exc:
        raise InvalidRequest(f"{name}: expected a value that fits {datatype}, got {value!r:.200}") from exc
    return element


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _boolean(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_"):
        return bool(value)  # numpy's bool is no subclass of bool, and numpy may not be installed
    raise TypeError


def _integer(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError
    return operator.index(value)


def _finite_number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError
    if not math.isfinite(value):
        raise ValueError
    return float(value)


_CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "BYTES": _text,
    "BOOL": _boolean,
    "INT32": _integer,
    "UINT64": _integer,
    "FP32": _finite_number,
}
