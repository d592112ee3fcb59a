"""The tensors of a checkpoint's safetensors files, read one at a time, and a few rows at a time."""

import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt

from deepseek_triton_build.check import INDEX, HeaderError, files_read, read_header, read_json_object
from deepseek_triton_build.text import first_names, safe_name, short_repr
from deepseek_triton_tools.checkpoints.folder_files import UNFINISHED, is_unfinished
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
_LAYER = re.compile(r"(?:(?:model\.)?layers|(mtp))\.(\d{1,9})\.")
_INFERENCE_FILE = re.compile(r"model\d+-mp\d+\.safetensors", re.ASCII)
"""The files that DeepSeek-V3's inference/convert.py makes of a checkpoint, one for each GPU, with other names."""
_MOST_DIMENSIONS = 32
"""numpy 1 has no more."""
_PIECE_BYTES = 2**24
"""Bytes of one tensor that are in memory at once where nothing is computed."""


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

    def pieces(self, num_rows: int | None = None) -> Iterator[Array]:
        """Read all rows, or the first `num_rows`, a few at a time: as many as may be in memory."""
        if not self.shape:
            yield self.read()
        elif self.num_bytes:
            # Without values it may have any number of rows.
            end, step = self.shape[0] if num_rows is None else num_rows, max(1, _PIECE_BYTES // self.row_bytes)
            for begin in range(0, end, step):
                yield self.read(begin, min(begin + step, end))

    def _bytes_at(self, offset: int, length: int) -> npt.NDArray[np.uint8]:
        content = np.empty(length, np.uint8)
        view = content.data
        try:
            with self.file.open("rb", buffering=0) as file:
                done = 0
                # The kernel reads at most 2 GiB at once.
                while done < length:
                    if not (count := os.preadv(file.fileno(), [view[done:]], offset + done)):
                        raise CheckpointError(
                            f"{self.file}: it ends at byte {offset + done:,}, within the tensor {self.name}; "
                            "download it again"
                        )
                    done += count
        except OSError as error:
            raise CheckpointError(f"{self.file}: {error.strerror}") from error
        return content


class StoredTensors(dict[str, StoredTensor]):
    """All tensors of a checkpoint, in the order of its files."""

    def __init__(self, folder: Path, tensors: Mapping[str, StoredTensor]) -> None:
        super().__init__(tensors)
        self.folder = folder

    @property
    def files(self) -> list[Path]:
        """The files, in the order of their names."""
        return sorted({tensor.file for tensor in self.values()})


def open_checkpoint(folder: Path) -> StoredTensors:
    """Read the headers of the files that the index names, or of all *.safetensors where there is none.

    :raises CheckpointError: naming every file that is missing, cut or damaged, and tensors that the index names and no
        file has.
    :raises UnusableCheckpointError: when the index can't be read.
    """
    if not folder.is_dir():
        what = "a file" if folder.exists() else "nothing"
        raise CheckpointError(
            f"{safe_name(str(folder))}: expected a checkpoint's folder, found {what}; correct the path"
        )
    if is_unfinished(folder):
        raise CheckpointError(f"{folder}: {UNFINISHED}")
    try:
        names = files_read(folder, only_indexed=(folder / INDEX).is_file())
    except OSError as error:
        raise CheckpointError(f"{folder}: can't be looked into: {error.strerror}") from error
    if not names:
        raise CheckpointError(f"{folder}: expected {INDEX} or *.safetensors files, found neither; download it again")
    if any(map(_INFERENCE_FILE.fullmatch, names)):
        raise CheckpointError(
            f"{folder}: expected a checkpoint as on Hugging Face, found one of DeepSeek's inference code; name "
            "the folder that it was made of"
        )
    by_file: dict[str, dict[str, StoredTensor]] = {}
    problems = []
    for name in names:
        try:
            by_file[name] = read_tensors(folder / name)
        except CheckpointError as error:
            problems.append(str(error))
    if problems:
        raise CheckpointError("; ".join(problems))
    tensors = {name: tensor for each in by_file.values() for name, tensor in each.items()}
    if (folder / INDEX).is_file():
        weight_map = read_json_object(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise CheckpointError(
                f"{folder / INDEX}: expected weight_map, a mapping of tensor to file; download it again"
            )
        if missing := sorted(weight_map.keys() - tensors.keys()):
            raise CheckpointError(
                f"{folder}: expected every tensor that {INDEX} names, found no {first_names(missing)}; "
                "download it again"
            )
    return StoredTensors(folder, tensors)


def read_config(folder: Path) -> dict[str, Any]:
    """Return the content of config.json.

    :raises CheckpointError: when it is missing.
    :raises UnusableCheckpointError: when it can't be read or is no JSON object.
    """
    path = folder / "config.json"
    if not path.exists():
        raise CheckpointError(f"{path}: expected the model's config.json, found none; correct the path, or download it")
    return read_json_object(path)


def config_number(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Return an entry of config.json, or `default` where it is missing or null.

    :raises CheckpointError: when it is no whole number of at least 0, or is missing without a default.
    """
    number = config.get(key)
    number = default if number is None else number
    if type(number) is not int or number < 0:
        raise CheckpointError(
            f"config.json: expected {key} as a whole number, found {short_repr(number)}; download it again"
        )
    return number


def read_tensors(path: Path) -> dict[str, StoredTensor]:
    """Read the header of one safetensors file.

    :raises CheckpointError: when it is missing, cut or damaged, or has data types that are not known here.
    """
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path}: expected a file, found a folder, a pipe or a device; remove it")
    try:
        with path.open("rb") as file:
            header = read_header(file)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except HeaderError as error:
        raise CheckpointError(f"{path}: expected a safetensors file: {error}; download it again") from error
    if header.found < header.length:
        raise CheckpointError(
            f"{path}: truncated: it has {header.found:,} bytes, and its header asks for {header.length:,}; "
            "download it again"
        )
    deep = [name for name, entry in header.tensors.items() if len(entry.shape) > _MOST_DIMENSIONS]
    if deep:
        raise CheckpointError(
            f"{path}: expected at most {_MOST_DIMENSIONS} dimensions, found more of {first_names(deep)}"
        )
    unknown = sorted({entry.dtype for entry in header.tensors.values()} - DTYPES.keys())
    if unknown:
        raise CheckpointError(f"{path}: expected data types of {', '.join(DTYPES)}, found {first_names(unknown)}")
    return {
        name: StoredTensor(name, entry.dtype, entry.shape, path, entry.begin) for name, entry in header.tensors.items()
    }


def layer_of(name: str) -> int | None:
    """Return the number of the layer that a tensor is in; None for embeddings, the last norm and the head.

    The layers of V4's draft, `mtp.N`, come after any other.
    """
    match = _LAYER.match(name)
    return int(match[2]) + (10**9 if match[1] else 0) if match else None


def in_order(name: str) -> tuple[int, list[tuple[int, str]]]:
    """Return a key that sorts by layer, with embeddings first, then by name, with numbers as numbers."""
    layer = layer_of(name)
    parts = [(len(part), part) if part.isdecimal() else (0, part) for part in name.split(".")]
    return (-1 if layer is None else layer, parts)
