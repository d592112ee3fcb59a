"""The header of a safetensors file, which says what the file holds and how long it is. No weights are read.

The format (https://docs.rs/crate/safetensors): eight bytes with the header's length, little-endian; the header, a JSON
object of tensor -> {dtype, shape, data_offsets: [begin, end]}; the bytes of the tensors. The offsets count from the end
of the header.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, BinaryIO, NamedTuple

MAX_HEADER_BYTES = 100_000_000
"""Largest length that is believed. A real header has some hundred kilobytes."""
_PREFIX = 8
# Size of a tensor whose data type is not listed.
_NOT_KNOWN = -1
_METADATA = "__metadata__"
_LFS = b"version https://git-lfs"
_LARGEST_OFFSET = 2**63
_MOST_DIMENSIONS = 64
# Data type -> bits of one value. The sizes of other types are not checked.
_BITS: Mapping[str, int] = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}


class HeaderEntry(NamedTuple):
    """One tensor in a file's header."""

    begin: int
    """Byte of the file where its values begin."""
    end: int
    """Byte after its last one."""
    dtype: str
    """The format's name of its data type, such as "F8_E4M3"."""
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Header:
    """The content of a file's header, and the length of the file."""

    tensors: Mapping[str, HeaderEntry]
    """The tensors, in the order of the file."""
    length: int
    """Bytes that the file should have according to its header."""
    found: int
    """Bytes that the file has."""

    def tensors_beyond(self, end: int) -> list[str]:
        """Return the tensors that a file of `end` bytes does not hold completely."""
        return [name for name, entry in self.tensors.items() if entry.end > end]


class HeaderError(Exception):
    """The header can't be read. The message says what is wrong, and at which byte."""


class PointerError(HeaderError):
    """The file is the pointer that Git LFS puts in the place of a large file."""


def read_header(file: BinaryIO) -> Header:
    """Read the header of a file that was just opened.

    :raises HeaderError: when the file has no valid header.
    :raises OSError: when the file can't be read.
    """
    prefix = file.read(_PREFIX)
    if len(prefix) < _PREFIX:
        raise HeaderError(
            f"truncated: it ends at byte {len(prefix)}, within the {_PREFIX} bytes of the header's length"
        )
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER_BYTES:
        if prefix + file.read(len(_LFS) - _PREFIX) == _LFS:
            raise PointerError("it is a Git LFS pointer, not the file it points to (byte 0)")
        raise HeaderError(
            f"byte 0 says that the header has {length:,} bytes, and at most {MAX_HEADER_BYTES:,} are possible"
        )
    if length == 0:
        raise HeaderError("byte 0 says that the header has 0 bytes: nothing was written there, or the disk was full")
    content = file.read(length)
    if len(content) < length:
        at = f"byte {_PREFIX + len(content):,}"
        raise HeaderError(
            f"truncated: it ends at {at}, within its header, which by byte 0 ends at {_PREFIX + length:,}"
        )
    found = max(os.fstat(file.fileno()).st_size, _PREFIX + length)  # the file had at least these bytes a moment ago
    start = _PREFIX + length
    entries = ((name, _entry(name, entry, start)) for name, entry in _parse(content).items() if name != _METADATA)
    tensors = dict(sorted(entries, key=itemgetter(1)))
    end = start
    for name, entry in tensors.items():
        if entry.begin != end:
            unused = f"leaves {entry.begin - end:,} bytes before it unused"
            what = "overlaps the tensor before it" if entry.begin < end else unused
            raise HeaderError(f"the header at byte {_PREFIX} says that {name[:60]!r} {what}")
        end = entry.end
    return Header(tensors, end, found)


def _parse(content: bytes) -> dict[str, Any]:
    try:
        header = json.loads(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise HeaderError(f"the header is not UTF-8 at byte {_PREFIX + error.start}") from error
    except json.JSONDecodeError as error:
        at = _PREFIX + len(error.doc[: error.pos].encode())
        raise HeaderError(f"the header is not JSON at byte {at}: {error.msg}") from error
    except (RecursionError, ValueError) as error:
        raise HeaderError(f"the header at byte {_PREFIX} can't be read: {error}") from error
    if not isinstance(header, dict):
        raise HeaderError(f"the header at byte {_PREFIX} is not a JSON object")
    return header


def _entry(name: str, entry: Any, start: int) -> HeaderEntry:
    """Return a tensor, where `start` is the byte after the header. It loops instead of asking `all`, because a
    checkpoint has 92,000 tensors.

    :raises HeaderError: when the tensor's shape and type need another number of bytes.
    """
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    if not isinstance(offsets, list) or len(offsets) != 2 or type(offsets[0]) is not int or type(offsets[1]) is not int:
        raise HeaderError(f"the header at byte {_PREFIX} has no data_offsets for {name[:60]!r}")
    begin, end = offsets
    if not 0 <= begin <= end < _LARGEST_OFFSET:
        at = f"[{_number(begin)}, {_number(end)}]"
        raise HeaderError(f"the header at byte {_PREFIX} has data_offsets {at} for {name[:60]!r}")
    dtype, shape = entry.get("dtype"), entry.get("shape")
    size = _size(dtype, shape)
    if size is None:
        raise HeaderError(f"the header at byte {_PREFIX} has no dtype or no shape for {name[:60]!r}")
    if size not in (_NOT_KNOWN, end - begin):
        raise HeaderError(
            f"the header at byte {_PREFIX} gives {name[:60]!r} {end - begin:,} bytes, but a shape of {_number(size)}"
        )
    return HeaderEntry(start + begin, start + end, dtype, tuple(shape))


def _size(dtype: Any, shape: Any) -> int | None:
    """Return the bytes of a tensor: _NOT_KNOWN for an unlisted data type, None when type or shape are not valid."""
    if not isinstance(dtype, str) or not isinstance(shape, list) or len(shape) > _MOST_DIMENSIONS:
        return None
    bits = _BITS.get(dtype, 0)
    for n in shape:
        if type(n) is not int or not 0 <= n < _LARGEST_OFFSET:
            return None
        bits *= n
    return -(-bits // 8) if dtype in _BITS else _NOT_KNOWN


def _number(value: int) -> str:
    """Return a number as text. Python refuses to print very long ones."""
    return f"{value:,}" if abs(value) < _LARGEST_OFFSET else "2^63 or more"
