"""The scales of the experts' inputs: FP8 activations of W4AFP8 are a value divided by the scale of their matrix.

They are read from one safetensors file, as it is published beside W4AFP8 checkpoints, or from what ModelOpt's
examples/deepseek/ptq.py writes. There every rank has the largest magnitudes (amax) that its quantizers have seen. The
scale is the largest of all ranks divided by 448, the largest number of FP8.
"""

import math
import pickletools
import re
import zipfile
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

from deepseek_triton_build.text import first_names, safe_name
from deepseek_triton_tools.checkpoints.number_formats import LARGEST_FP8
from deepseek_triton_tools.checkpoints.stored_tensors import Array, config_number, read_tensors
from deepseek_triton_tools.tool_errors import CheckpointError

_SCALE = re.compile(r"model\.layers\.\d+\.mlp\.experts\.\d+\.w[123]\.input_scale")
_AMAX = re.compile(
    r"(?:model\.)?layers\.(\d+)\.(?:ffn|mlp)\.experts\.(\d+)\.(w[123]|gate_proj|down_proj|up_proj)"
    r"\.input_quantizer\._amax"
)
_RANK_FILE = re.compile(r"amax_dict_rank(\d{1,6})-mp(\d{1,6})\.pt", re.ASCII)
# Experts of all layers, to keep from endless ones: DeepSeek-R1 has 14,848.
_MOST_EXPERTS = 1_000_000
_MATRICES = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


ActivationScales: TypeAlias = Mapping[str, np.float32]
"""The scale of each input, by its name in the checkpoint: model.layers.3.mlp.experts.7.w1.input_scale.

w1 is gate_proj, w2 is down_proj, w3 is up_proj.
"""


def missing_scales(scales: ActivationScales, config: Mapping[str, Any]) -> list[str]:
    """Return the scales that the experts of config.json need and that are not there.

    Those of the MTP layer are not needed: it is never calibrated.

    :raises CheckpointError: when config.json has no such numbers, or endless ones.
    """
    layers = range(config_number(config, "first_k_dense_replace", 0), config_number(config, "num_hidden_layers", 0))
    num_experts = config_number(config, "n_routed_experts", 0)
    if len(layers) * num_experts > _MOST_EXPERTS:
        raise CheckpointError(
            f"config.json: expected at most {_MOST_EXPERTS:,} experts in all layers, found "
            f"{len(layers) * num_experts:,}; download it again"
        )
    names = (
        f"model.layers.{layer}.mlp.experts.{expert}.{matrix}.input_scale"
        for layer in layers
        for expert in range(num_experts)
        for matrix in ("w1", "w2", "w3")
    )
    return [name for name in names if name not in scales]


def read_activation_scales(path: Path) -> ActivationScales:
    """Read a safetensors file, or the folder of amax_dict_rank{r}-mp{n}.pt files.

    :raises CheckpointError: with all that is wrong with it.
    """
    if path.is_dir():
        return _scales_of_export(path)
    if not path.exists():
        raise CheckpointError(
            f"{path}: expected a safetensors file or a folder of ModelOpt's amax files, found nothing; correct the path"
        )
    tensors = read_tensors(path)
    scales = {name: tensor.read() for name, tensor in tensors.items() if _SCALE.fullmatch(name)}
    if not scales:
        raise CheckpointError(
            f"{path}: expected tensors such as model.layers.3.mlp.experts.0.w1.input_scale, found "
            f"{first_names(tensors) or 'none'}"
        )
    return _checked(path, scales, "scale")


def _scales_of_export(folder: Path) -> ActivationScales:
    largest: dict[str, np.float32] = {}
    problems = []
    for path in _rank_files(folder):
        try:
            amaxes = _checked(path, read_torch_archive(path, lambda name: bool(_AMAX.fullmatch(name))), "amax")
        except CheckpointError as error:
            problems.append(str(error))
            continue
        for name, amax in amaxes.items():
            match = _AMAX.fullmatch(name)
            assert match is not None
            layer, expert, matrix = match.groups()
            key = f"model.layers.{layer}.mlp.experts.{expert}.{_MATRICES.get(matrix, matrix)}.input_scale"
            largest[key] = max(amax, largest.get(key, amax))
    if problems:
        raise CheckpointError("; ".join(problems))
    if not largest:
        raise CheckpointError(
            f"{folder}: expected names such as layers.3.ffn.experts.0.w1.input_quantizer._amax, found none; was it "
            "calibrated with FP8_DEFAULT_CFG?"
        )
    for name in [name for name in largest if ".w1." in name]:
        up = name.replace(".w1.", ".w3.")
        # Gate and up are one product, with one input.
        if up in largest:
            largest[name] = largest[up] = max(largest[name], largest[up])
    return {name: amax / np.float32(LARGEST_FP8) for name, amax in largest.items()}


def _rank_files(folder: Path) -> list[Path]:
    """The files of all ranks, in their order.

    :raises CheckpointError: when some are missing, or are of another run.
    """
    by_size: dict[int, dict[int, Path]] = defaultdict(dict)
    for path in folder.iterdir():
        if match := _RANK_FILE.fullmatch(path.name):
            by_size[int(match[2])][int(match[1])] = path
    if not by_size:
        raise CheckpointError(f"{folder}: expected amax_dict_rank0-mp8.pt and so on, as ptq.py writes them, found none")
    if len(by_size) > 1:
        sizes = ", ".join(f"mp{size}" for size in sorted(by_size))
        raise CheckpointError(f"{folder}: expected the files of one run, found those of {sizes}; remove the others")
    ((size, paths),) = by_size.items()
    others = [path.name for rank, path in paths.items() if rank >= size]
    if others or len(paths) < size:
        missing = (f"amax_dict_rank{rank}-mp{size}.pt" for rank in range(size) if rank not in paths)
        # There may be a million of them, by one name.
        first = ", ".join(islice(missing, 3))
        what = f"{len(paths) - len(others):,} of {size:,}, no {first}" if first else f"{first_names(others)} too"
        raise CheckpointError(f"{folder}: expected the files of ranks 0 to {size - 1}, found {what}; copy them all")
    return [paths[rank] for rank in sorted(paths)]


def _checked(path: Path, tensors: Mapping[str, Array], what: str) -> dict[str, np.float32]:
    """The one value of each tensor.

    :raises CheckpointError: naming those that are no finite number above 0, or have several.
    """
    several = [f"{safe_name(name)} has {values.size:,} values" for name, values in tensors.items() if values.size != 1]
    numbers = {name: values.astype(np.float32).item() for name, values in tensors.items() if values.size == 1}
    wrong = several + [f"{name} is {value:g}" for name, value in numbers.items() if not 0 < value < float("inf")]
    if wrong:
        more = f" and {len(wrong) - 3:,} more" if len(wrong) > 3 else ""
        raise CheckpointError(
            f"{path}: expected one number above 0 for each {what}, but {', '.join(wrong[:3])}{more}; calibrate again"
        )
    return {name: np.float32(value) for name, value in numbers.items()}


# --- Files of torch.save ---
#
# Such a file is a zip archive: `data.pkl` is a pickle that names the tensors and where their values are, `data/0` and
# so on are the values. A pickle may call any function, so the few operations that a dictionary of tensors needs are
# followed here, without PyTorch, and any other is refused.

_MOST_PICKLE_BYTES = 2**26
"""The pickle of a calibrated DeepSeek-V3 has a few MiB per rank."""
_MOST_VALUE_BYTES = 2**28
"""Bytes of one tensor's storage that are read."""
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
_NEW: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"), lambda argument: argument),
    "NONE": lambda _: None,
    "NEWTRUE": lambda _: True,
    "NEWFALSE": lambda _: False,
    "EMPTY_DICT": lambda _: {},
    "EMPTY_LIST": lambda _: [],
    "EMPTY_TUPLE": lambda _: (),
}
"""Operation that puts one object on the stack -> that object, by its argument."""


def read_torch_archive(path: Path, is_needed: Callable[[str], bool]) -> dict[str, Array]:
    """Return the tensors of a saved dictionary whose names are needed. The values of others are not read.

    :raises CheckpointError: when it can't be read, holds anything but tensors, numbers and names, or is damaged.
    """
    try:
        with path.open("rb") as file:
            start = file.read(4)
        if not start.startswith(b"PK"):
            raise CheckpointError(
                f"{path}: expected a zip archive, as torch.save of PyTorch 1.6 or newer writes it, found a file that "
                f"begins with {start!r}; write it again"
            )
        with zipfile.ZipFile(path) as archive:
            return _Archive(path, archive).tensors(is_needed)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    except (zipfile.BadZipFile, EOFError, RuntimeError, ValueError) as error:
        # zipfile raises all of these.
        raise CheckpointError(f"{path}: damaged: {error}; copy or calibrate it again") from error


@dataclass(frozen=True)
class _Function:
    """A function that a pickle may name. Nothing calls it here."""

    name: str


@dataclass(frozen=True)
class _Storage:
    """A piece of the archive."""

    entry: str
    dtype: np.dtype[Any]


@dataclass(frozen=True)
class _SavedTensor:
    """A tensor's place in a storage; the numbers count values."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


_REBUILD = _Function("torch._utils _rebuild_tensor_v2")
_ORDERED_DICT = _Function("collections OrderedDict")
_FUNCTIONS = {
    function.name: function
    for function in (_REBUILD, _ORDERED_DICT, *(_Function(f"torch {name}") for name in _STORAGES))
}
_MARK = object()


class _Pickle:
    """Follows the operations of a pickle. Whatever it holds, each makes one object at most."""

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._memo: dict[Any, Any] = {}

    def load(self, content: bytes) -> Any:
        """:raises Exception: nearly any, for a pickle that is damaged or hostile."""
        for opcode, argument, _ in pickletools.genops(content):
            if opcode.name in _NEW:
                self._stack.append(_NEW[opcode.name](argument))
            elif opcode.name != "PROTO":
                self._do(opcode.name, argument)
        return self._stack.pop()

    def _do(self, operation: str, argument: Any) -> None:
        stack = self._stack
        match operation:
            case "STOP":
                pass
            case "MARK":
                stack.append(_MARK)
            case "BINPUT" | "LONG_BINPUT":
                self._memo[argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(self._memo[argument])
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                number = int(operation[-1])
                stack[-number:] = [tuple(stack[-number:])]
            case "TUPLE":
                stack.append(tuple(self._after_mark()))
            case "APPEND" | "APPENDS":
                items = self._after_mark() if operation == "APPENDS" else [stack.pop()]
                stack[-1].extend(items)
            case "SETITEM" | "SETITEMS":
                items = self._after_mark() if operation == "SETITEMS" else [stack.pop(-2), stack.pop()]
                # The hash of a tuple of tuples may take years.
                if not all(isinstance(key, str) for key in items[::2]):
                    raise ValueError("it has a dictionary with a key that is no text")
                stack[-1].update(zip(items[::2], items[1::2], strict=True))
            case "GLOBAL" if argument in _FUNCTIONS:
                stack.append(_FUNCTIONS[argument])
            case "GLOBAL":
                raise ValueError(f"it asks for {safe_name(argument.replace(' ', '.'))}, which no tensor needs")
            case "BINPERSID":
                stack.append(_storage(stack.pop()))
            case "REDUCE":
                arguments = stack.pop()
                stack.append(_called(stack.pop(), arguments))
            case _:
                raise ValueError(f"it has the operation {operation}, which no tensor needs")

    def _after_mark(self) -> list[Any]:
        """Take all objects from the last mark on."""
        place = next(place for place in reversed(range(len(self._stack))) if self._stack[place] is _MARK)
        items = self._stack[place + 1 :]
        del self._stack[place:]
        return items


def _storage(description: Any) -> _Storage:
    kind, function, key, *_ = description
    dtype = _STORAGES.get(function.name.removeprefix("torch ")) if isinstance(function, _Function) else None
    if kind != "storage" or dtype is None or not isinstance(key, str):
        raise ValueError("it asks for something else in place of a storage")
    return _Storage(f"data/{key}", dtype)


def _called(function: Any, arguments: tuple[Any, ...]) -> Any:
    # torch.save makes empty ones only.
    if function is _ORDERED_DICT and not arguments:
        return {}
    if function is not _REBUILD:
        raise ValueError("it calls what no tensor needs")
    storage, offset, shape, strides, *_ = arguments
    # Tuples are kept as they are: a copy of a long list for each call would take any amount of memory.
    fit = isinstance(shape, tuple) and isinstance(strides, tuple) and len(shape) == len(strides) <= 32
    fit = fit and all(type(size) is int and 0 <= size < 2**62 for size in (offset, *shape, *strides))
    if not isinstance(storage, _Storage) or not fit:
        raise ValueError("a tensor has no storage, shape or strides")
    return _SavedTensor(storage, offset, shape, strides)


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
        content = self._bytes("data.pkl", _MOST_PICKLE_BYTES)
        try:
            saved = _Pickle().load(content)
        except Exception as error:
            # A hostile pickle may make nearly any come.
            raise CheckpointError(
                f"{self._path}: expected a dictionary of tensors in data.pkl, and nothing of it was run: {error}"
            ) from error
        if not isinstance(saved, dict):
            raise CheckpointError(f"{self._path}: expected a dictionary of tensors, found {type(saved).__name__}")
        names = [name for name in saved if isinstance(name, str) and is_needed(name)]
        if others := [name for name in names if not isinstance(saved[name], _SavedTensor)]:
            what = type(saved[others[0]]).__name__
            raise CheckpointError(f"{self._path}: {safe_name(others[0])}: expected a tensor, found {what}")
        return {name: self._values(name, saved[name]) for name in names}

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
