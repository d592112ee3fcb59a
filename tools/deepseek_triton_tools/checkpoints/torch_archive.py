"""Reads tensors out of the files of torch.save, without PyTorch and without running what a file asks for.

Such a file is a zip archive: `data.pkl` is a pickle that names the tensors and where their values are, `data/0` and so
on are the values. A pickle may call any function, so this one may name those few only that a dictionary of tensors
needs; what they return here are plain records.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import ml_dtypes
import numpy as np

from deepseek_triton_build.text import safe_name, short_repr
from deepseek_triton_tools.checkpoints.stored_tensors import Array
from deepseek_triton_tools.tool_errors import CheckpointError

_MOST_PICKLE_BYTES = 2**26
"""The pickle of a calibrated DeepSeek-V3 has a few MiB per rank."""
_MOST_VALUE_BYTES = 2**28
"""Bytes of one tensor's storage that are read."""
_OPCODES = frozenset(
    {
        *("PROTO", "STOP", "MARK", "GLOBAL", "REDUCE", "BINPERSID"),
        *("EMPTY_DICT", "SETITEM", "SETITEMS", "EMPTY_LIST", "APPEND", "APPENDS"),
        *("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
        *("BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "NONE", "NEWTRUE", "NEWFALSE"),
        *("BINGET", "LONG_BINGET", "BINPUT", "LONG_BINPUT"),
    }
)
"""The operations that torch.save writes for a dictionary of tensors, with its default protocol 2."""
_STORAGES = {
    "FloatStorage": np.dtype("<f4"),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "HalfStorage": np.dtype("<f2"),
    "DoubleStorage": np.dtype("<f8"),
    "LongStorage": np.dtype("<i8"),
    "IntStorage": np.dtype("<i4"),
    "ShortStorage": np.dtype("<i2"),
    "CharStorage": np.dtype(np.int8),
    "ByteStorage": np.dtype(np.uint8),
    "BoolStorage": np.dtype(np.bool_),
}
_LEGACY = b"\x80\x02\x8a\x0a"
"""The first bytes of a file of PyTorch before 1.6."""


def read_torch_archive(path: Path, is_needed: Callable[[str], bool]) -> dict[str, Array]:
    """Return the tensors of a saved dictionary whose names are needed. The values of others are not read.

    :raises CheckpointError: when it can't be read, holds anything but tensors, numbers and names, or is damaged.
    """
    try:
        with path.open("rb") as file:
            start = file.read(4)
        if not start.startswith(b"PK"):
            what = "the format of PyTorch before 1.6" if start == _LEGACY else f"a file that begins with {start!r}"
            raise CheckpointError(
                f"{path}: expected a zip archive, as torch.save writes it, found {what}; write it again with "
                "PyTorch 1.6 or newer"
            )
        with zipfile.ZipFile(path) as archive:
            return _Archive(path, archive).tensors(is_needed)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    except (zipfile.BadZipFile, EOFError, RuntimeError, ValueError) as error:
        # zipfile raises all of these.
        raise CheckpointError(f"{path}: damaged: {error}; copy or calibrate it again") from error


@dataclass(frozen=True)
class _Storage:
    """A piece of the archive."""

    entry: str
    dtype: np.dtype[Any]


class _StorageType:
    """Stands for a type such as torch.FloatStorage. It has no room for what a pickle may want to set."""

    __slots__ = ("dtype",)

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self.dtype = dtype


@dataclass(frozen=True)
class _SavedTensor:
    """A tensor's place in a storage; the numbers count values."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _RebuildTensor:
    """Stands for torch._utils._rebuild_tensor_v2."""

    __slots__ = ()

    def __call__(self, storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> _SavedTensor:
        are_numbers = all(isinstance(values, tuple) and all(map(_is_size, values)) for values in (shape, strides))
        if not isinstance(storage, _Storage) or not _is_size(offset) or not are_numbers or len(shape) != len(strides):
            raise pickle.UnpicklingError("a tensor has no storage, shape or strides")
        return _SavedTensor(storage, offset, shape, strides)


class _NewDictionary:
    """Stands for collections.OrderedDict, of which torch.save makes empty ones only."""

    __slots__ = ()

    def __call__(self) -> dict[Any, Any]:
        return {}


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**62


class _Unpickler(pickle.Unpickler):
    """Knows no code but the above."""

    _KNOWN: ClassVar[dict[tuple[str, str], Any]] = {
        ("torch._utils", "_rebuild_tensor_v2"): _RebuildTensor(),
        ("collections", "OrderedDict"): _NewDictionary(),
        **{("torch", name): _StorageType(dtype) for name, dtype in _STORAGES.items()},
    }

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self._KNOWN[module, name]
        except KeyError:
            raise pickle.UnpicklingError(
                f"it asks for {safe_name(f'{module}.{name}')}, which no tensor needs"
            ) from None

    def persistent_load(self, pid: Any) -> _Storage:
        if (
            isinstance(pid, tuple)
            and len(pid) == 5
            and pid[0] == "storage"
            and isinstance(pid[1], _StorageType)
            and isinstance(pid[2], str)
        ):
            return _Storage(f"data/{pid[2]}", pid[1].dtype)
        raise pickle.UnpicklingError(f"it asks for {short_repr(pid)} in place of a storage")


class _Archive:
    def __init__(self, path: Path, archive: zipfile.ZipFile) -> None:
        self._path = path
        self._archive = archive
        pickles = [name for name in archive.namelist() if name.endswith("/data.pkl") and name.count("/") == 1]
        if len(pickles) != 1:
            raise CheckpointError(f"{path}: expected one NAME/data.pkl, as torch.save writes it, found {len(pickles)}")
        self._folder = pickles[0].removesuffix("data.pkl")

    def tensors(self, is_needed: Callable[[str], bool]) -> dict[str, Array]:
        if f"{self._folder}byteorder" in self._archive.namelist() and self._bytes("byteorder", 16) != b"little":
            raise CheckpointError(f"{self._path}: expected little-endian values, found another order of bytes")
        saved = self._unpickled()
        if not isinstance(saved, dict):
            raise CheckpointError(f"{self._path}: expected a dictionary of tensors, found {type(saved).__name__}")
        names = [name for name in saved if isinstance(name, str) and is_needed(name)]
        if others := [name for name in names if not isinstance(saved[name], _SavedTensor)]:
            what = type(saved[others[0]]).__name__
            raise CheckpointError(f"{self._path}: {safe_name(others[0])}: expected a tensor, found {what}")
        return {name: self._values(name, saved[name]) for name in names}

    def _unpickled(self) -> Any:
        content = self._bytes("data.pkl", _MOST_PICKLE_BYTES)
        try:
            _check_opcodes(content)
            _check_keys(content)
            return _Unpickler(io.BytesIO(content)).load()
        except Exception as error:
            # A hostile pickle may make the unpickler raise nearly anything.
            raise CheckpointError(
                f"{self._path}: expected a dictionary of tensors in data.pkl, and nothing of it was run: {error}"
            ) from error

    def _values(self, name: str, tensor: _SavedTensor) -> Array:
        dtype, count = tensor.storage.dtype, math.prod(tensor.shape)
        if not count:
            return np.empty(tensor.shape, dtype)
        last = tensor.offset + sum(
            (size - 1) * stride for size, stride in zip(tensor.shape, tensor.strides, strict=True)
        )
        end = (last + 1) * dtype.itemsize
        if max(end, count * dtype.itemsize) > _MOST_VALUE_BYTES:
            raise CheckpointError(f"{self._path}: {safe_name(name)}: expected a small tensor, found {count:,} values")
        content = self._bytes(tensor.storage.entry, _MOST_VALUE_BYTES)
        if len(content) < end:
            raise CheckpointError(
                f"{self._path}: {safe_name(name)}: expected {end:,} bytes in {tensor.storage.entry}, found "
                f"{len(content):,}; copy or calibrate it again"
            )
        values = np.frombuffer(content, np.uint8)[: len(content) // dtype.itemsize * dtype.itemsize].view(dtype)
        byte_strides = tuple(stride * dtype.itemsize for stride in tensor.strides)
        return np.lib.stride_tricks.as_strided(values[tensor.offset :], tensor.shape, byte_strides).copy()

    def _bytes(self, entry: str, most: int) -> bytes:
        """Return a piece of the archive. torch.save compresses none, so none can be larger than the file."""
        try:
            info = self._archive.getinfo(f"{self._folder}{entry}")
        except KeyError:
            raise CheckpointError(f"{self._path}: expected {safe_name(entry)} in the archive, found none") from None
        if info.compress_type != zipfile.ZIP_STORED or info.file_size > most:
            raise CheckpointError(
                f"{self._path}: expected at most {most:,} uncompressed bytes of {safe_name(entry)}, found "
                f"{info.file_size:,}"
            )
        return self._archive.read(info)


def _check_opcodes(content: bytes) -> None:
    """Refuse what torch.save doesn't write: it could allocate any amount of memory, or set attributes."""
    for count, (opcode, argument, _) in enumerate(pickletools.genops(content)):
        if opcode.name not in _OPCODES:
            raise pickle.UnpicklingError(f"it has the operation {opcode.name}, which no tensor needs")
        if opcode.name == "LONG_BINPUT" and isinstance(argument, int) and argument > count:
            raise pickle.UnpicklingError("it reserves memory for more objects than it has")


def _check_keys(content: bytes) -> None:
    """Refuse keys that are no text: the hash of a tuple of tuples may take years.

    It follows the stack of objects, of which it knows which are text, and the places where they are kept.
    """
    # None stands for a mark on the stack.
    is_text: list[bool | None] = []
    kept: dict[Any, bool | None] = {}
    for opcode, argument, _ in pickletools.genops(content):
        if opcode.name in ("BINPUT", "LONG_BINPUT"):
            kept[argument] = is_text[-1]
            continue
        if opcode.name in ("BINGET", "LONG_BINGET"):
            is_text.append(kept[argument])
            continue
        taken, num_taken = is_text, len(opcode.stack_before)
        # All objects from the last mark on are one argument.
        if pickletools.markobject in opcode.stack_before:
            mark = len(is_text) - 1 - is_text[::-1].index(None)
            taken, num_taken = is_text[mark + 1 :], num_taken - 2
            del is_text[mark:]
        keys = {"SETITEM": taken[-2:-1], "SETITEMS": taken[::2]}.get(opcode.name, [])
        if not all(keys):
            raise pickle.UnpicklingError("it has a dictionary with a key that is no text")
        del is_text[len(is_text) - num_taken :]
        is_text += [
            None if kind is pickletools.markobject else kind is pickletools.pyunicode for kind in opcode.stack_after
        ]
