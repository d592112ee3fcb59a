"""Tensor contents as Triton's gRPC protocol carries them: little-endian, BYTES elements behind a 4-byte length.

Plain `struct`: the tensors of a text request hold a handful of elements, so numpy would cost more than it saves.
"""

from __future__ import annotations

import math
import operator
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from deepseek_triton_client._errors import InvalidRequest, ProtocolError


@dataclass(frozen=True, slots=True)
class Tensor:
    """One input of a request. Its shape is `[num_elements]`."""

    name: str
    datatype: str
    num_elements: int
    data: bytes


_FORMATS = {"BOOL": "<?", "INT32": "<i", "UINT64": "<Q", "FP32": "<f"}
_LENGTH = struct.Struct("<I")


def encode(datatype: str, elements: Sequence[Any]) -> bytes:
    if datatype == "BYTES":
        texts = [element.encode() for element in elements]
        return b"".join(_LENGTH.pack(len(text)) + text for text in texts)
    return b"".join(struct.pack(_FORMATS[datatype], element) for element in elements)


def decode_one(datatype: str, data: bytes) -> Any:
    """The only element of a tensor. Raises ProtocolError where `data` is anything else."""
    try:
        if datatype != "BYTES":
            return struct.unpack(_FORMATS[datatype], data)[0]
        (length,) = _LENGTH.unpack_from(data)
        if len(data) != _LENGTH.size + length:
            raise ValueError(f"an element of {length} bytes was announced")
        return data[_LENGTH.size :].decode()
    except (KeyError, ValueError, struct.error) as exc:
        raise ProtocolError(f"expected one {datatype} element, got {data[:64]!r} ({exc})") from exc


def checked(name: str, datatype: str, value: Any) -> Any:
    """`value` as a plain Python object that fits the datatype. Raises InvalidRequest, naming `name`."""
    try:
        element = _CONVERSIONS[datatype](value)
        encode(datatype, [element])
    except (TypeError, ValueError, OverflowError, struct.error) as exc:
        raise InvalidRequest(f"{name}: expected a value that fits {datatype}, got {value!r}") from exc
    return element


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _integer(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError
    return operator.index(value)


def _finite(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError
    if not math.isfinite(value):
        raise ValueError
    return float(value)


_CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "BYTES": _text,
    "BOOL": _truth,
    "INT32": _integer,
    "UINT64": _integer,
    "FP32": _finite,
}
