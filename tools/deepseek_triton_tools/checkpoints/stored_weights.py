"""The weights of a checkpoint as numbers, whatever precision it has them in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from deepseek_triton_build.text import safe_name
from deepseek_triton_tools.checkpoints.number_formats import BLOCK, GROUP, Floats
from deepseek_triton_tools.checkpoints.stored_tensors import StoredTensor, StoredTensors
from deepseek_triton_tools.tool_errors import CheckpointError

SCALES = "_scale_inv"
"""End of the name of a weight's scales."""
INPUT_SCALE = ".input_scale"
"""End of the name of an activation's scale, which is no weight."""
Format: TypeAlias = Literal["plain", "fp8", "int4"]
"""How a weight is stored: as numbers of its data type, as FP8 in blocks, as INT4 in groups."""
_FORMATS: dict[str, Format] = {"F8_E4M3": "fp8", "I8": "int4"}


@dataclass(frozen=True)
class StoredWeight:
    """A weight, and its scales where it is stored as FP8 or as INT4."""

    stored: StoredTensor
    scales: StoredTensor | None

    @property
    def format(self) -> Format:
        return _FORMATS.get(self.stored.dtype, "plain")

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the numbers: INT4 has two in a byte."""
        if self.format == "int4" and self.stored.shape:
            return (*self.stored.shape[:-1], self.stored.shape[-1] * 2)
        return self.stored.shape

    @property
    def tensors(self) -> list[StoredTensor]:
        return [tensor for tensor in (self.stored, self.scales) if tensor is not None]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors)

    def read_scales(self, begin: int = 0, end: int | None = None) -> Floats | None:
        """Return the scales of some rows as they are stored; None without any. `begin` is a multiple of 128."""
        if self.scales is None:
            return None
        if self.format == "int4":
            return self.scales.read(begin, end)
        return self.scales.read(begin // BLOCK, None if end is None else -(-end // BLOCK))


def scales_shape(shape: tuple[int, ...], stored_as: Format) -> tuple[int, int]:
    """Return the shape that the scales of a matrix of this shape have; its numbers are counted, not its bytes."""
    rows, columns = (*shape, 0, 0)[:2]
    return (rows, columns // GROUP) if stored_as == "int4" else (-(-rows // BLOCK), -(-columns // BLOCK))


def is_weight(tensors: StoredTensors, name: str) -> bool:
    """Tell whether a tensor stands for numbers of the model: scales don't."""
    belongs_to_another = name.endswith(SCALES) and name.removesuffix(SCALES) in tensors
    return not belongs_to_another and not name.endswith(INPUT_SCALE)


def weight_of(tensors: StoredTensors, name: str) -> StoredWeight:
    """Return a weight of a checkpoint.

    :raises CheckpointError: when it has no scales and needs them, or they have another shape than it needs.
    """
    stored, scales = tensors[name], tensors.get(name + SCALES)
    weight = StoredWeight(stored, scales)
    if weight.format == "plain":
        return StoredWeight(stored, None)
    expected = scales_shape(weight.shape, weight.format)
    if len(stored.shape) != 2 or scales is None or (scales.dtype, scales.shape) != ("F32", expected):
        what = "none" if scales is None else f"{scales.dtype} {list(scales.shape)}"
        raise CheckpointError(
            f"{tensors.folder}: {safe_name(name)}, {stored.dtype} {list(stored.shape)}: expected its scales as F32 "
            f"{list(expected)}, found {what}"
        )
    return weight
