"""Writing a safetensors file whole or not at all, a few rows of a tensor at a time.

The header comes first, so what will be written has to be known before. Names, types and shapes alone decide it, so that
the same tensors make the same bytes wherever and whenever they are written.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from deepseek_triton_tools.checkpoints.stored_tensors import DTYPES, Array
from deepseek_triton_tools.host.whole_file import part_of

_ALIGNED = 8
"""Bytes to which the header is padded, as the safetensors library pads it."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class OutputTensor:
    """A tensor to write."""

    name: str
    dtype: str
    """A name of DTYPES."""
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def header_bytes(tensors: Sequence[OutputTensor]) -> bytes:
    """Return the beginning of a file with these tensors in this order."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        begin, end = end, end + tensor.num_bytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNED)
    return len(text).to_bytes(8, "little") + text


def file_size(tensors: Sequence[OutputTensor]) -> int:
    """Return the bytes of a file with these tensors."""
    return len(header_bytes(tensors)) + sum(tensor.num_bytes for tensor in tensors)


def dealt(
    items: Sequence[_T], outputs: Callable[[_T], Sequence[OutputTensor]], shard_bytes: int
) -> dict[str, list[_T]]:
    """Return the items of each file, by its name: files of about `shard_bytes`, filled in the order of the items.

    Within a file, items whose bytes are no multiple of eight come last, so that all others are aligned.
    """
    groups: list[list[_T]] = [[]]
    size = 0
    for item in items:
        num_bytes = sum(tensor.num_bytes for tensor in outputs(item))
        if groups[-1] and size + num_bytes > shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(item)
        size += num_bytes
    return {
        f"model-{number:05}-of-{len(groups):06}.safetensors": sorted(
            group, key=lambda item: any(tensor.num_bytes % _ALIGNED for tensor in outputs(item))
        )
        for number, group in enumerate(groups, start=1)
    }


class ShardWriter:
    """A file that gets its name when `finish` is called, after all of it has reached the disk.

    A block that ends without it leaves nothing. A process that is killed leaves a file with another name, until
    `sweep` is called. Several processes may write the same file at once: the last one's has the name.
    """

    def __init__(self, path: Path, tensors: Sequence[OutputTensor]) -> None:
        self.size = file_size(tensors)
        self._path = path
        self._scratch = part_of(path)
        self._header = header_bytes(tensors)
        self._digest = hashlib.sha256()
        self._written = 0

    def __enter__(self) -> "ShardWriter":
        self._file = self._scratch.open("wb", buffering=0)
        self._write(memoryview(self._header))
        return self

    def write(self, rows: Array) -> None:
        """Write the next values, in the order of the tensors."""
        if rows.size:
            self._write(np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data)

    def finish(self) -> str:
        """Bring the file to the disk under its name, and return its SHA-256. Call it last.

        :raises ValueError: when fewer or more values were written than the tensors have.
        """
        if self._written != self.size:
            raise ValueError(f"{self._path}: expected {self.size:,} bytes, got {self._written:,}")
        os.fsync(self._file.fileno())
        os.replace(self._scratch, self._path)
        return self._digest.hexdigest()

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._scratch.unlink(missing_ok=True)

    def _write(self, data: memoryview) -> None:
        self._digest.update(data)
        # An unbuffered file may take a part only, and the kernel takes at most 2 GiB at once.
        while data:
            count = self._file.write(data)
            self._written += count
            data = data[count:]
