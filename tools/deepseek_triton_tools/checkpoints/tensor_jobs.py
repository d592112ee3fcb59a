"""Computes one tensor of a conversion, a few rows at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np

from deepseek_triton_tools.checkpoints.conversion_plan import TensorJob
from deepseek_triton_tools.checkpoints.number_formats import (
    BLOCK,
    Bfloat16,
    Floats,
    Fp8,
    Packed,
    bfloat16_of,
    dequantize_blocks,
    dequantize_groups,
    float32_of,
    quantize_blocks,
    quantize_int4,
)
from deepseek_triton_tools.checkpoints.stored_tensors import Array, StoredTensor
from deepseek_triton_tools.tool_errors import CheckpointError

_COPIED_BYTES = 2**24
"""Bytes that are read at once where nothing is computed."""


class Kernels(Protocol):
    """The computations, on a CPU or a GPU. All take and return arrays in this process's memory."""

    rows: int
    """Rows that are computed at once: a multiple of 128."""

    def bf16_of_fp8(self, values: Fp8, scales: Floats) -> Bfloat16: ...

    def int4_of_fp8(self, values: Fp8, scales: Floats) -> tuple[Packed, Floats]: ...


class NumpyKernels:
    """The computations with numpy, in one thread."""

    rows = 2 * BLOCK
    """Larger pieces do not stay in a processor's cache."""

    def bf16_of_fp8(self, values: Fp8, scales: Floats) -> Bfloat16:
        return bfloat16_of(dequantize_blocks(values, scales))

    def int4_of_fp8(self, values: Fp8, scales: Floats) -> tuple[Packed, Floats]:
        # Rounded to bfloat16 between, as TensorRT-LLM's script does, so that both make the same values.
        return quantize_int4(float32_of(bfloat16_of(dequantize_blocks(values, scales))))


def run_job(job: TensorJob, kernels: Kernels) -> Iterator[tuple[Array, int]]:
    """Yield the values of the job's outputs in their order, and the bytes of the checkpoint that were read for them.

    :raises CheckpointError: when the checkpoint can't be read, or holds what is no number.
    """
    if not job.source.num_bytes:
        return
    if job.stored_as == job.written_as:
        yield from _copied(job.source)
        if job.scales:
            yield from _copied(job.scales)
        return
    scales_of_rows = []
    for begin in range(0, job.source.shape[0], kernels.rows):
        end = min(begin + kernels.rows, job.source.shape[0])
        stored = job.source.read(begin, end)
        scales = _scales_of(job, begin, end)
        values, new_scales = _converted(job, stored, scales, kernels)
        if not _are_numbers(job, stored, scales, new_scales):
            raise CheckpointError(
                f"{job.source.file}: {job.source.name}: expected numbers, found an infinite one or NaN; verify the "
                "checkpoint, and download the file again"
            )
        yield values, stored.nbytes + (0 if scales is None else scales.nbytes)
        if new_scales is not None:
            scales_of_rows.append(new_scales)
    if scales_of_rows:
        yield np.concatenate(scales_of_rows), 0


def _are_numbers(job: TensorJob, stored: Array, scales: Floats | None, new_scales: Floats | None) -> bool:
    """Tell whether nothing infinite and no NaN was read. What becomes of a whole group shows in its new scale."""
    if job.stored_as == "fp8" and (stored.view(np.uint8) & 0x7F == 0x7F).any():
        return False
    return all(np.isfinite(each).all() for each in (scales, new_scales) if each is not None)


def _scales_of(job: TensorJob, begin: int, end: int) -> Floats | None:
    if job.scales is None:
        return None
    return job.scales.read(begin, end) if job.stored_as == "int4" else job.scales.read(begin // BLOCK, -(-end // BLOCK))


def _converted(job: TensorJob, stored: Array, scales: Floats | None, kernels: Kernels) -> tuple[Array, Floats | None]:
    """Return rows of the new tensor, and their scales where it has such."""
    if job.stored_as == "fp8" and scales is not None:
        if job.written_as == "int4":
            return kernels.int4_of_fp8(stored, scales)
        return kernels.bf16_of_fp8(stored, scales), None
    weight = float32_of(stored) if scales is None else dequantize_groups(stored, scales)
    if job.written_as == "int4":
        return quantize_int4(weight)
    if job.written_as == "fp8":
        return quantize_blocks(weight)
    return bfloat16_of(weight), None


def _copied(tensor: StoredTensor) -> Iterator[tuple[Array, int]]:
    if not tensor.shape:
        yield tensor.read(), tensor.num_bytes
        return
    rows = max(1, _COPIED_BYTES // max(1, tensor.row_bytes))
    for begin in range(0, tensor.shape[0], rows):
        stored = tensor.read(begin, begin + rows)
        yield stored, stored.nbytes
