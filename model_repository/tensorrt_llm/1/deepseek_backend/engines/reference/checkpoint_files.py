"""Reads and checks a checkpoint's config.json, the shape of a DeepSeek-V3 model, and its tensors, as float32 arrays.

numpy has neither bfloat16 nor FP8, and the safetensors package gives such tensors to torch only. The format is simple:
eight bytes with the length of the header, the header (JSON: tensor -> dtype, shape, data_offsets), the bytes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np
import numpy.typing as npt

from deepseek_backend.errors import EngineError
from deepseek_backend.field_values import quoted

ARCHITECTURE = "DeepseekV3ForCausalLM"

_ONLY_VALUES: Mapping[str, Any] = {
    "attention_bias": False,
    "hidden_act": "silu",
    "moe_layer_freq": 1,
    "rope_interleave": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
"""Keys that change the computation, with the value that every published DeepSeek-V3 has. A key may be absent."""
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


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071): how a context of `original_max_position_embeddings` was made `factor` times as long."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32
    """Dimensions with more turns than this in the original context keep their frequency."""
    beta_slow: float = 1
    """Dimensions with fewer turns than this in the original context are slowed down by `factor`."""
    mscale: float = 0
    mscale_all_dim: float = 0


@dataclass(frozen=True, kw_only=True)
class DeepseekConfig:
    """The keys of config.json that the forward pass reads, by their published names."""

    hidden_size: int
    num_hidden_layers: int
    first_k_dense_replace: int
    """Number of first layers with a dense MLP; the others have experts."""
    num_attention_heads: int
    q_lora_rank: int | None
    """None: the query has one projection instead of two."""
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool
    routed_scaling_factor: float
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    yarn: YarnScaling | None
    tie_word_embeddings: bool = False
    weight_block_size: tuple[int, int] = (128, 128)
    """Rows and columns of an FP8 matrix that share a scale."""
    eos_token_ids: frozenset[int] = frozenset()
    """End tokens by config.json; those of generation_config.json count more."""


def read_config(folder: Path) -> DeepseekConfig:
    """Read the config.json in `folder`.

    :raises EngineError: when it describes a model that this engine can't compute.
    """
    document = read_json(folder / "config.json")
    problems = [
        f"{key}: expected {only!r}, got {quoted(document[key])}"
        for key, only in _ONLY_VALUES.items()
        if document.get(key, only) != only
    ]
    if (architectures := document.get("architectures")) != [ARCHITECTURE]:
        problems.insert(0, f"architectures: expected {[ARCHITECTURE]}, got {quoted(architectures)}")
    problems += [
        f"{key}: expected an object, got {quoted(document[key])}"
        for key in ("quantization_config", "rope_parameters", "rope_scaling")
        if not isinstance(document.get(key) or {}, dict)
    ]
    if problems:
        raise _cannot_compute(problems)
    quantization = document.get("quantization_config") or {}
    if (method := quantization.get("quant_method", "fp8")) != "fp8":
        raise _cannot_compute([f"quantization_config.quant_method: expected fp8, got {quoted(method)}"])
    # transformers 5 writes rope_parameters, with rope_theta inside; published checkpoints have the other two keys.
    rope = document.get("rope_parameters") or document.get("rope_scaling") or {}
    values = {
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "n_shared_experts": 1,
        "rms_norm_eps": 1e-6,
        **{name: value for name, value in document.items() if value is not None},
        "q_lora_rank": document.get("q_lora_rank"),
        "rope_theta": rope.get("rope_theta", document.get("rope_theta", 10000.0)),
        "yarn": _yarn(rope, document.get("max_position_embeddings")),
        "weight_block_size": _as_tuple(quantization.get("weight_block_size") or (128, 128)),
        "eos_token_ids": token_ids(document.get("eos_token_id")),
    }
    names = DeepseekConfig.__dataclass_fields__
    try:
        config = DeepseekConfig(**{name: value for name, value in values.items() if name in names})
    except TypeError as error:
        # Its message ends with the names of the missing keys.
        raise EngineError(f"config.json: keys are missing: {str(error).partition(': ')[2]}") from error
    if problems := _wrong_types(config):
        raise _cannot_compute(problems)
    if config.topk_group < config.n_group and (
        config.n_group < 1 or config.n_routed_experts % config.n_group or config.n_routed_experts < 2 * config.n_group
    ):
        raise EngineError(
            f"config.json: n_group: expected groups of two or more of the {config.n_routed_experts} experts, of equal "
            f"size, got {config.n_group} groups"
        )
    return config


_TYPES: Mapping[str, tuple[type, ...]] = {
    "int": (int,),
    "int | None": (int, NoneType),
    "float": (int, float),
    "bool": (bool,),
    "YarnScaling | None": (YarnScaling, NoneType),
}


def _wrong_types(values: DeepseekConfig | YarnScaling) -> list[str]:
    """Name the keys whose values are of another type than the field."""
    problems = []
    for field in dataclasses.fields(values):
        value, kinds = getattr(values, field.name), _TYPES.get(str(field.type))
        if kinds is not None and (not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds)):
            problems.append(f"{field.name}: expected {field.type}, got {quoted(value)}")
        elif isinstance(value, YarnScaling):
            problems += _wrong_types(value)
        elif field.name == "weight_block_size" and not (_are_counts(value) and len(value) == 2):
            problems.append(f"weight_block_size: expected two numbers, got {quoted(value)}")
    return problems


def _are_counts(values: Iterable[Any]) -> bool:
    return all(type(value) is int and 0 <= value < 1 << 31 for value in values)


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _cannot_compute(problems: Sequence[str]) -> EngineError:
    return EngineError(f"config.json: the reference engine can't compute this model: {'; '.join(problems)}")


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    :raises EngineError: when there is none.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise EngineError(f"{path.name}: can't be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise EngineError(f"{path.name}: not JSON: {error}") from error
    if not isinstance(document, dict):
        raise EngineError(f"{path.name}: expected a JSON object, got {type(document).__name__}")
    return document


def token_ids(value: Any) -> frozenset[int]:
    """Return the token ids of eos_token_id, which may give one, several or none.

    :raises EngineError: when it gives something else.
    """
    ids = () if value is None else _as_tuple(value)
    if not _are_counts(ids):
        raise EngineError(f"eos_token_id: expected a token id or several, got {quoted(value)}")
    return frozenset(ids)


def _yarn(rope: Mapping[str, Any], max_position_embeddings: Any) -> YarnScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "yarn":
        raise EngineError(f"config.json: rope_scaling.type: expected yarn, got {quoted(kind)}")
    keys = {"original_max_position_embeddings": max_position_embeddings, **rope}
    if keys.get("factor") is None:
        raise EngineError("config.json: rope_scaling.factor: expected a number, got none")
    return YarnScaling(**{name: keys[name] for name in YarnScaling.__dataclass_fields__ if keys.get(name) is not None})


# The number that each byte of FP8 means: 1 sign bit, 4 bits of exponent (bias 7), 3 of mantissa; no infinity.
_byte = np.arange(256)
_exponent, _mantissa = _byte >> 3 & 15, _byte & 7
_magnitude = np.where(_exponent == 0, _mantissa / 8 * 2.0**-6, (1 + _mantissa / 8) * 2.0 ** (_exponent - 7))
_magnitude[_byte & 127 == 127] = np.nan
_E4M3: Array = np.where(_byte & 128, -_magnitude, _magnitude).astype(np.float32)


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
            continue
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while piece := file.read(_HASHED_AT_ONCE):
                digest.update(piece)
        if digest.hexdigest() != expected:
            problems.append(f"{name} is not the file that it should be")
    if problems:
        raise EngineError(f"{'; '.join(problems)}, by {CHECKSUMS}: copy the checkpoint again")


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
            if not isinstance(weight_map, dict) or not all(
                isinstance(name, str) and name not in ("", ".", "..") and not {"/", "\0"} & set(name)
                for name in weight_map.values()
            ):
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
            rows, columns = shape
            block_rows, block_columns = self._block_size
            scales = self.get(f"{name}_scale_inv", -(-rows // block_rows), -(-columns // block_columns))
            tensor: Array = _E4M3[stored]
            tensor *= scales.repeat(block_rows, 0)[:rows].repeat(block_columns, 1)[:, :columns]
        elif entry.dtype == "BF16":
            tensor = (stored.astype(np.uint32) << 16).view(np.float32)
        else:
            tensor = stored.astype(np.float32, copy=False)
        if not np.isfinite(tensor).all():
            raise EngineError(f"tensor {name}: expected numbers, got an infinite one or NaN: copy the checkpoint again")
        return tensor


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
