"""The tensors of a checkpoint's safetensors files, read one at a time, and a few rows at a time."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt

from deepseek_triton_build.check import INDEX, HeaderError, files_read, read_header
from deepseek_triton_build.text import safe_name
from deepseek_triton_tools.tool_errors import CheckpointError

Array: TypeAlias = npt.NDArray[Any]

DTYPES: Mapping[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype("<f2"),
    "I32": np.dtype("<i4"),
    "F32": np.dtype("<f4"),
    "I64": np.dtype("<i8"),
    "F64": np.dtype("<f8"),
}
"""The format's name of a data type -> numpy's."""


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a checkpoint, and where it lies."""

    name: str
    dtype: str
    """A name of DTYPES."""
    shape: tuple[int, ...]
    file: Path
    begin: int
    """Byte of the file where its values begin."""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    @property
    def row_bytes(self) -> int:
        """Bytes of one row: of all values with the same first index."""
        return math.prod(self.shape[1:]) * DTYPES[self.dtype].itemsize

    def read(self, begin_row: int = 0, end_row: int | None = None) -> Array:
        """Read all rows, or some.

        :raises CheckpointError: when the file ends before them, or can't be read.
        """
        dtype = DTYPES[self.dtype]
        if not self.shape:
            return self._bytes_at(self.begin, dtype.itemsize).view(dtype).reshape(())
        num_rows = max(0, min(self.shape[0], self.shape[0] if end_row is None else end_row) - begin_row)
        stored = self._bytes_at(self.begin + begin_row * self.row_bytes, num_rows * self.row_bytes)
        return stored.view(dtype).reshape(num_rows, *self.shape[1:])

    def _bytes_at(self, offset: int, length: int) -> npt.NDArray[np.uint8]:
        found = np.empty(length, np.uint8)
        view = found.data
        try:
            with self.file.open("rb", buffering=0) as file:
                done = 0
                while done < length:
                    count = os.preadv(file.fileno(), [view[done:]], offset + done)
                    if not count:
                        raise CheckpointError(
                            f"{self.file}: it ends at byte {offset + done:,}, within the tensor {self.name}; "
                            "download it again"
                        )
                    done += count
        except OSError as error:
            raise CheckpointError(f"{self.file}: {error.strerror}") from error
        return found


class StoredTensors(Mapping[str, StoredTensor]):
    """All tensors of a checkpoint, in the order of its files."""

    def __init__(self, folder: Path, tensors: Mapping[str, StoredTensor]) -> None:
        self.folder = folder
        self._tensors = tensors

    def __getitem__(self, name: str) -> StoredTensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    @property
    def files(self) -> list[Path]:
        """The files, in the order of their names."""
        return sorted({tensor.file for tensor in self._tensors.values()})


def open_checkpoint(folder: Path) -> StoredTensors:
    """Read the headers of the files that the index names, or of all *.safetensors where there is none.

    :raises CheckpointError: naming every file that is missing, cut or damaged.
    """
    if not folder.is_dir():
        found = "a file" if folder.exists() else "nothing"
        raise CheckpointError(
            f"{safe_name(str(folder))}: expected a checkpoint's folder, found {found}; correct the path"
        )
    try:
        names = files_read(folder, only_indexed=(folder / INDEX).is_file())
    except OSError as error:
        raise CheckpointError(f"{folder}: can't be looked into: {error.strerror}") from error
    if not names:
        raise CheckpointError(f"{folder}: expected {INDEX} or *.safetensors files, found neither; download it again")
    tensors: dict[str, StoredTensor] = {}
    problems = []
    for name in names:
        try:
            tensors |= _tensors_of(folder / name)
        except CheckpointError as error:
            problems.append(str(error))
    if problems:
        raise CheckpointError("; ".join(problems))
    return StoredTensors(folder, tensors)


def read_config(folder: Path) -> dict[str, Any]:
    """Return the content of config.json.

    :raises CheckpointError: when it is missing or is no JSON object.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: expected JSON: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(config).__name__}")
    return config


def _tensors_of(path: Path) -> dict[str, StoredTensor]:
    try:
        with path.open("rb") as file:
            header = read_header(file)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except HeaderError as error:
        raise CheckpointError(f"{path}: {error}; download it again") from error
    if header.found < header.length:
        raise CheckpointError(
            f"{path}: truncated: it has {header.found:,} bytes, and its header asks for {header.length:,}; "
            "download it again"
        )
    unknown = sorted({entry.dtype for entry in header.tensors.values()} - DTYPES.keys())
    if unknown:
        raise CheckpointError(f"{path}: expected data types of {', '.join(DTYPES)}, found {', '.join(unknown)}")
    return {
        name: StoredTensor(name, entry.dtype, entry.shape, path, entry.begin) for name, entry in header.tensors.items()
    }
