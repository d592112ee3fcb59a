"""The header of a safetensors file: what it holds and how long it has to be. No weights are read.

The format: eight bytes with the header's length, little-endian; the header, a JSON object of tensor ->
{dtype, shape, data_offsets: [begin, end]}; the tensors' bytes, which the offsets count from the header's end
(https://docs.rs/crate/safetensors).
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_HEADER_BYTES = 100_000_000
"""A real header has some hundred kilobytes; a larger number is no length."""
_PREFIX = 8
_METADATA = "__metadata__"
_LFS = b"version https://git-lfs"


@dataclass(frozen=True)
class Header:
    tensors: frozenset[str]
    length: int
    """Bytes that the file has by its header."""
    found: int
    """Bytes that it has."""


class HeaderError(Exception):
    """The header can't be read: what is wrong, and at which byte."""


def read_header(path: Path) -> Header:
    """:raises HeaderError: when it isn't one.
    :raises OSError: when the file can't be read.
    """
    with path.open("rb") as file:
        found = os.fstat(file.fileno()).st_size
        prefix = file.read(_PREFIX)
        if len(prefix) < _PREFIX:
            raise HeaderError(f"it ends at byte {len(prefix)}, within the {_PREFIX} bytes of the header's length")
        length = int.from_bytes(prefix, "little")
        if length > min(found - _PREFIX, MAX_HEADER_BYTES):
            raise HeaderError(_too_long(prefix + file.read(len(_LFS) - _PREFIX), length, found))
        content = file.read(length)
    tensors = _parse(content)
    end = max((_end(name, entry) for name, entry in tensors.items() if name != _METADATA), default=0)
    return Header(frozenset(tensors.keys() - {_METADATA}), _PREFIX + length + end, found)


def _too_long(start: bytes, length: int, found: int) -> str:
    if start == _LFS:
        return "it is a Git LFS pointer, not the file it points to (byte 0)"
    return f"byte 0 says that the header has {length:,} bytes, of a file of {found:,}"


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


def _end(name: str, entry: Any) -> int:
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(offset) is int for offset in offsets):
        raise HeaderError(f"the header at byte {_PREFIX} has no data_offsets for {name[:60]!r}")
    begin, end = offsets
    if not 0 <= begin <= end:
        raise HeaderError(f"the header at byte {_PREFIX} has data_offsets {offsets} for {name[:60]!r}")
    return int(end)
