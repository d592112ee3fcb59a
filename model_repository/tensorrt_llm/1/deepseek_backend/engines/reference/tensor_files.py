"""The tensors of a checkpoint's safetensors files, as float32 arrays.

numpy has neither bfloat16 nor FP8, and the safetensors package gives such tensors to torch only. The format is simple:
eight bytes with the length of the header, the header (JSON: tensor -> dtype, shape, data_offsets), the bytes.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from deepseek_backend.engines.reference.deepseek_config import read_json
from deepseek_backend.errors import EngineError
from deepseek_backend.field_values import quoted

Array = npt.NDArray[np.float32]

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
CHECKSUMS = "checksums.sha256"
_HASHED_AT_ONCE = 2**24
_MAX_HEADER_BYTES = 100_000_000
_STORED_AS: Mapping[str, Any] = {
    "F8_E4M3": np.uint8,
    "BF16": np.dtype("<u2"),
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
}


def _e4m3_values() -> Array:
    """Return the number that each byte means: 1 sign bit, 4 bits of exponent (bias 7), 3 of mantissa; no infinity."""
    byte = np.arange(256)
    exponent, mantissa = byte >> 3 & 15, byte & 7
    magnitude = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    magnitude[byte & 127 == 127] = np.nan
    return np.where(byte & 128, -magnitude, magnitude).astype(np.float32)


_E4M3 = _e4m3_values()


def check_checksums(folder: Path) -> None:
    """Compare the files in `folder` with its checksums.sha256, in the form of sha256sum, where there is one.

    :raises EngineError: naming each file that is missing, cut or changed.
    """
    listing = folder / CHECKSUMS
    if not listing.is_file():
        return
    lines = listing.read_text(encoding="utf-8").splitlines()
    if not lines:
        raise EngineError(f"{CHECKSUMS} is empty: copy the checkpoint again")
    problems = []
    for line in lines:
        expected, _, name = line.partition(" ")
        name = name.removeprefix(" ").removeprefix("*")
        path = folder / name
        if not path.is_file():
            problems.append(f"{name} is missing")
        elif _sha256(path) != expected:
            problems.append(f"{name} is not the file that it should be")
    if problems:
        raise EngineError(f"{'; '.join(problems)}, by {CHECKSUMS}: copy the checkpoint again")


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_HASHED_AT_ONCE):
            digest.update(piece)
    return digest.hexdigest()


@dataclass(frozen=True)
class _Entry:
    """Where one tensor lies."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    """First byte in the file."""
    end: int


class TensorFiles:
    """Reads tensors by their names, from one file or from the several that an index names."""

    def __init__(self, folder: Path, block_size: tuple[int, int]) -> None:
        """Read the headers.

        :param block_size: rows and columns of an FP8 matrix that share a scale.
        :raises EngineError: when a file is missing or cut, or is no safetensors file.
        """
        self._block_size = block_size
        if (folder / WEIGHTS).is_file() or not (folder / INDEX).is_file():
            paths = [folder / WEIGHTS]
        else:
            weight_map: dict[str, str] = read_json(folder / INDEX).get("weight_map", {})
            if not isinstance(weight_map, dict) or not all(map(_is_file_name, weight_map.values())):
                raise EngineError(f"{INDEX}: expected weight_map, the name of a file for each tensor")
            paths = [folder / name for name in sorted(set(weight_map.values()))]
        self._entries = {name: entry for path in paths for name, entry in _read_header(path).items()}

    def get(self, name: str, *shape: int) -> Array:
        """Return a tensor as float32. FP8 is multiplied by its scales, the tensor `name` + "_scale_inv".

        :raises EngineError: when it is missing, has another shape, or holds a NaN or an infinite number.
        """
        entry = self._entries.get(name)
        if entry is None:
            raise EngineError(f"the checkpoint has no tensor {name}; config.json asks for it")
        if entry.shape != shape:
            raise EngineError(f"tensor {name}: expected shape {list(shape)} by config.json, got {list(entry.shape)}")
        if entry.dtype not in _STORED_AS:
            known = ", ".join(_STORED_AS)
            raise EngineError(f"tensor {name}: expected a data type of {known}, got {entry.dtype}")
        stored_as = np.dtype(_STORED_AS[entry.dtype])
        count = (entry.end - entry.begin) // stored_as.itemsize
        if count != math.prod(shape):
            raise EngineError(f"tensor {name}: expected {math.prod(shape):,} numbers, got the place of {count:,}")
        stored = np.fromfile(entry.path, stored_as, count, offset=entry.begin).reshape(shape)
        if entry.dtype == "F8_E4M3":
            tensor = self._dequantized(name, stored)
        elif entry.dtype == "BF16":
            tensor = (stored.astype(np.uint32) << 16).view(np.float32)
        else:
            tensor = stored.astype(np.float32, copy=False)
        if not np.isfinite(tensor).all():
            raise EngineError(f"tensor {name}: expected numbers, got an infinite one or NaN: copy the checkpoint again")
        return tensor

    def _dequantized(self, name: str, stored: npt.NDArray[np.uint8]) -> Array:
        rows, columns = stored.shape
        block_rows, block_columns = self._block_size
        scales = self.get(f"{name}_scale_inv", -(-rows // block_rows), -(-columns // block_columns))
        values = _E4M3[stored]
        values *= scales.repeat(block_rows, 0)[:rows].repeat(block_columns, 1)[:, :columns]
        return values


def _is_file_name(name: object) -> bool:
    return isinstance(name, str) and name not in ("", ".", "..") and not {"/", "\0"} & set(name)


def _read_header(path: Path) -> dict[str, _Entry]:
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > _MAX_HEADER_BYTES:
                raise EngineError(f"{path.name}: no safetensors file: it begins with {length:,} as its header's length")
            header = json.loads(file.read(length))
        size = path.stat().st_size
    except OSError as error:
        raise EngineError(f"{path.name}: can't be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise EngineError(f"{path.name}: no safetensors file: its header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise EngineError(f"{path.name}: no safetensors file: its header is no JSON object")
    start = 8 + length
    entries = {}
    for name, about in header.items():
        if name == "__metadata__":
            continue
        match about:
            case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(begin), int(end)]} if (
                all(type(size) is int and size >= 0 for size in shape) and 0 <= begin <= end
            ):
                entries[name] = _Entry(path, dtype, tuple(shape), start + begin, start + end)
            case _:
                raise EngineError(f"{path.name}: no safetensors file: its header tells no place of {quoted(name)}")
        if start + end > size:
            raise EngineError(
                f"{path.name}: it is cut: it has {size:,} bytes, and {quoted(name)} ends at byte {start + end:,}"
            )
    return entries
