"""One weight as numbers, whatever precision its checkpoint has it in."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from deepseek_triton_build.text import safe_name
from deepseek_triton_tools.checkpoints.error_figures import ErrorSums
from deepseek_triton_tools.checkpoints.number_formats import (
    BLOCK,
    GROUP,
    LARGEST_FP8,
    Floats,
    dequantize_blocks,
    dequantize_groups,
    float32_of,
)
from deepseek_triton_tools.checkpoints.stored_tensors import StoredTensor, StoredTensors
from deepseek_triton_tools.tool_errors import CheckpointError

SCALES = "_scale_inv"
_ROWS = 2 * BLOCK
"""Rows that are compared at once: few enough for a processor's cache."""
_LAST_STEPS = {"F8_E4M3": (LARGEST_FP8, 32.0), "I8": (7.0, 1.0)}
"""The largest number of a format, and the distance to the next that it would have."""


@dataclass(frozen=True)
class ComparedWeight:
    """A weight, and its scales where it is stored as FP8 in blocks or as INT4 in groups."""

    stored: StoredTensor
    scales: StoredTensor | None

    @property
    def precision(self) -> str:
        """The format has this name for people: BF16, FP8, INT4."""
        return {"F8_E4M3": "FP8", "I8": "INT4"}.get(self.stored.dtype, self.stored.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the numbers: INT4 has two in a byte."""
        if self.stored.dtype == "I8":
            return (*self.stored.shape[:-1], self.stored.shape[-1] * 2)
        return self.stored.shape

    def read(self, begin: int = 0, end: int | None = None) -> Floats:
        """Return all numbers, or those of some rows; `begin` is a multiple of 128.

        :raises CheckpointError: when they can't be read.
        """
        stored = self.stored.read(begin, end)
        if self.scales is None:
            return float32_of(stored)
        if self.stored.dtype == "I8":
            return dequantize_groups(stored, self.scales.read(begin, end))
        return dequantize_blocks(stored, self.scales.read(begin // BLOCK, None if end is None else -(-end // BLOCK)))

    def steps(self, begin: int, end: int) -> Floats | None:
        """Return the scales of some rows, one for each 128 values of a row; None where there are none."""
        if self.scales is None:
            return None
        if self.stored.dtype == "I8":
            return self.scales.read(begin, end)
        return self.scales.read(begin // BLOCK, -(-end // BLOCK)).repeat(BLOCK, axis=0)[: end - begin]


def weight_of(tensors: StoredTensors, name: str) -> ComparedWeight:
    """Return a weight of a checkpoint.

    :raises CheckpointError: when it has no scales and needs them, or they have another shape than it needs.
    """
    stored, scales = tensors[name], tensors.get(name + SCALES)
    if stored.dtype not in _LAST_STEPS:
        return ComparedWeight(stored, None)
    rows, columns = (*stored.shape, 0, 0)[:2]
    expected = (rows, columns * 2 // GROUP) if stored.dtype == "I8" else (-(-rows // BLOCK), -(-columns // BLOCK))
    if len(stored.shape) != 2 or scales is None or (scales.dtype, scales.shape) != ("F32", expected):
        found = "none" if scales is None else f"{scales.dtype} {list(scales.shape)}"
        raise CheckpointError(
            f"{tensors.folder}: {safe_name(name)}, {stored.dtype} {list(stored.shape)}: expected its scales as F32 "
            f"{list(expected)}, found {found}"
        )
    return ComparedWeight(stored, scales)


@np.errstate(over="ignore", invalid="ignore")  # what is not finite is counted
def compare_weights(a: ComparedWeight, b: ComparedWeight) -> ErrorSums:
    """Sum up how `b` differs from `a`, a few rows at a time. Both have the same shape.

    :raises CheckpointError: when one can't be read.
    """
    sums = ErrorSums()
    if 0 in a.shape:  # it may have any number of rows
        return sums
    if len(a.shape) != 2:
        sums.add(a.read().ravel(), b.read().ravel())
        return sums
    for begin in range(0, a.shape[0], _ROWS):
        end = min(begin + _ROWS, a.shape[0])
        before, after = a.read(begin, end), b.read(begin, end)
        sums.add(before, after)
        steps = b.steps(begin, end)
        if steps is not None:
            sums.num_clipped += _num_clipped(before, after, steps, *_LAST_STEPS[b.stored.dtype])
    return sums


def _num_clipped(before: Floats, after: Floats, scales: Floats, largest: float, step: float) -> int:
    """Count the values that lie beyond the largest number of their group by more than rounding can explain."""
    starts = np.arange(0, before.shape[1], GROUP)
    limits = scales * np.float32(largest + step / 2)
    if (np.maximum.reduceat(np.abs(before), starts, axis=1) <= limits).all():
        return 0
    columns = before.shape[1]
    is_beyond = np.abs(before) > limits.repeat(GROUP, axis=1)[:, :columns]
    is_far = np.abs(after - before) > (scales * np.float32(step / 2)).repeat(GROUP, axis=1)[:, :columns]
    return int(np.count_nonzero(is_beyond & is_far))
