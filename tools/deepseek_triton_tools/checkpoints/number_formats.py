"""The number formats of weights (FP8 in blocks, INT4 in groups, bfloat16), and how a checkpoint stores a weight.

FP8 as DeepSeek publishes it: E4M3 values with one float32 scale for each block of 128 x 128; a value times the scale of
its block is the weight. INT4 as TensorRT-LLM's loader reads it (MoEWeightLoadingMode.W4A8_CUSTOM): two values in a
byte, the first in the low four bits, along the input dimension, with one float32 scale for each 128 of a row.
"""

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt

from deepseek_triton_build.text import safe_name
from deepseek_triton_tools.checkpoints.stored_tensors import StoredTensor, StoredTensors
from deepseek_triton_tools.tool_errors import CheckpointError

Floats: TypeAlias = npt.NDArray[np.float32]
Fp8: TypeAlias = npt.NDArray[Any]
"""An array of ml_dtypes.float8_e4m3fn."""
Bfloat16: TypeAlias = npt.NDArray[Any]
"""An array of ml_dtypes.bfloat16."""
Packed: TypeAlias = npt.NDArray[np.int8]
"""INT4 values, two in a byte."""

BLOCK = 128
"""Rows and columns of an FP8 matrix that share a scale."""
GROUP = 128
"""Values of a row that share a scale in INT4."""
LARGEST_FP8 = 448.0
"""The largest number that E4M3 holds."""
_LARGEST_INT4 = 7.0
"""The largest number that INT4 holds. The smallest, -8, is never used, because the scales are symmetric."""


_FP8_NUMBERS: Floats = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


def float32_of(values: npt.NDArray[Any]) -> Floats:
    """Return the same numbers as float32."""
    if values.dtype == ml_dtypes.float8_e4m3fn:
        # 2.6 times faster than ml_dtypes' own conversion.
        return _FP8_NUMBERS[values.view(np.uint8)]
    return values.astype(np.float32, copy=False)


def bfloat16_of(values: Floats) -> Bfloat16:
    """Return the nearest bfloat16 to each value; half-way goes to the even one."""
    return values.astype(ml_dtypes.bfloat16)


def dequantize_blocks(values: Fp8, scales: Floats) -> Floats:
    """Return the weight [rows, columns] of FP8 values and their scales [row blocks, column blocks].

    The last block of a row or column may be smaller than the others.
    """
    weight = float32_of(values)
    rows, columns = weight.shape
    for number, first in enumerate(range(0, rows, BLOCK)):
        weight[first : first + BLOCK] *= scales[number].repeat(BLOCK)[:columns]
    return weight


def quantize_blocks(weight: Floats) -> tuple[Fp8, Floats]:
    """Return FP8 values [rows, columns] and their scales [row blocks, column blocks].

    A block of zeros has the scale 1.
    """
    rows, columns = weight.shape
    row_starts, column_starts = np.arange(0, rows, BLOCK), np.arange(0, columns, BLOCK)
    largest = np.maximum.reduceat(np.maximum.reduceat(np.abs(weight), row_starts, 0), column_starts, 1)
    scales = largest / np.float32(LARGEST_FP8)
    scales[scales == 0] = 1
    values = np.empty(weight.shape, ml_dtypes.float8_e4m3fn)
    for number, first in enumerate(row_starts):
        scaled = weight[first : first + BLOCK] / scales[number].repeat(BLOCK)[:columns]
        # A quotient may be rounded to just above the largest number, which E4M3 would take for NaN.
        values[first : first + BLOCK] = np.clip(scaled, -LARGEST_FP8, LARGEST_FP8)
    return values, scales


def quantize_int4(weight: Floats) -> tuple[Packed, Floats]:
    """Return INT4 values [rows, columns / 2], two in a byte, and their scales [rows, columns / 128].

    The scale is the largest magnitude of the group divided by 7; values are rounded to the nearest, half-way to the
    even one. A group of zeros has the scale 0. `columns` is a multiple of 128.
    """
    rows, columns = weight.shape
    groups = weight.reshape(rows, columns // GROUP, GROUP)
    scales = np.abs(groups).max(axis=2) / np.float32(_LARGEST_INT4)
    divisors = np.where(scales > 0, scales, np.float32(1))
    quotients = groups / divisors[:, :, None]
    np.rint(quotients, out=quotients)
    # Only where a scale is so small that float32 has no seventh of the largest magnitude.
    np.clip(quotients, -8, 7, out=quotients)
    return pack_int4(quotients.astype(np.int8).reshape(rows, columns)), scales


def int4_of_fp8(values: Fp8, scales: Floats) -> tuple[Packed, Floats]:
    """Return INT4 values and their scales of FP8 values and theirs."""
    # Rounded to bfloat16 between, as TensorRT-LLM's script does, so that both make the same values.
    return quantize_int4(float32_of(bfloat16_of(dequantize_blocks(values, scales))))


def pack_int4(values: npt.NDArray[np.int8]) -> Packed:
    """Return the bytes [rows, columns / 2] of values from -8 to 7 [rows, columns]."""
    # Little-endian: the first value is the low byte.
    pairs = values.view(np.uint16)
    packed: Packed = ((pairs & 0xF) | (pairs >> 4 & 0xF0)).astype(np.uint8).view(np.int8)
    return packed


def unpack_int4(packed: Packed) -> npt.NDArray[np.int8]:
    """Return the values [rows, columns] of bytes [rows, columns / 2]."""
    values = np.empty((*packed.shape, 2), np.int8)
    np.right_shift(packed << 4, 4, out=values[..., 0])
    np.right_shift(packed, 4, out=values[..., 1])
    return values.reshape(*packed.shape[:-1], -1)


def dequantize_groups(packed: Packed, scales: Floats) -> Floats:
    """Return the weight [rows, columns] of INT4 bytes [rows, columns / 2] and scales [rows, columns / 128]."""
    rows, num_groups = scales.shape
    groups = unpack_int4(packed).reshape(rows, num_groups, GROUP).astype(np.float32)
    groups *= scales[:, :, None]
    return groups.reshape(rows, -1)


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
