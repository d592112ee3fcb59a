"""Computes one tensor of a conversion, a few rows at a time."""

from __future__ import annotations

from collections.abc import Iterator

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
from deepseek_triton_tools.checkpoints.stored_tensors import Array
from deepseek_triton_tools.tool_errors import CheckpointError

_ROWS = 2 * BLOCK
"""Rows that are computed at once. Larger pieces do not stay in a processor's cache."""


def bf16_of_fp8(values: Fp8, scales: Floats) -> Bfloat16:
    return bfloat16_of(dequantize_blocks(values, scales))


def int4_of_fp8(values: Fp8, scales: Floats) -> tuple[Packed, Floats]:
    # Rounded to bfloat16 between, as TensorRT-LLM's script does, so that both make the same values.
    return quantize_int4(float32_of(bf16_of_fp8(values, scales)))


def run_job(job: TensorJob) -> Iterator[tuple[Array, int]]:
    """Yield the values of the job's outputs in their order, and the bytes of the checkpoint that were read for them.

    :raises CheckpointError: when the checkpoint can't be read, or holds what is no number.
    """
    weight, stored_tensor = job.weight, job.weight.stored
    if not stored_tensor.num_bytes:
        return
    if weight.format == job.written_as:
        for tensor in weight.tensors:
            yield from ((rows, rows.nbytes) for rows in tensor.pieces())
        return
    scales_of_rows = []
    for begin in range(0, stored_tensor.shape[0], _ROWS):
        end = min(begin + _ROWS, stored_tensor.shape[0])
        stored, scales = stored_tensor.read(begin, end), weight.read_scales(begin, end)
        values, new_scales = _converted(job, stored, scales)
        # What becomes of a whole group of INT4 shows in its new scale.
        are_finite = all(np.isfinite(each).all() for each in (scales, new_scales) if each is not None)
        if not are_finite or (weight.format == "fp8" and (stored.view(np.uint8) & 0x7F == 0x7F).any()):
            raise CheckpointError(
                f"{stored_tensor.file}: {job.name}: expected numbers, found an infinite one or NaN; verify the "
                "checkpoint, and download the file again"
            )
        yield values, stored.nbytes + (0 if scales is None else scales.nbytes)
        if new_scales is not None:
            scales_of_rows.append(new_scales)
    if scales_of_rows:
        yield np.concatenate(scales_of_rows), 0


def _converted(job: TensorJob, stored: Array, scales: Floats | None) -> tuple[Array, Floats | None]:
    """Return rows of the new tensor, and their scales where it has such."""
    if job.weight.format == "fp8" and scales is not None:
        if job.written_as == "int4":
            return int4_of_fp8(stored, scales)
        return bf16_of_fp8(stored, scales), None
    weight = float32_of(stored) if scales is None else dequantize_groups(stored, scales)
    if job.written_as == "int4":
        return quantize_int4(weight)
    if job.written_as == "fp8":
        return quantize_blocks(weight)
    return bfloat16_of(weight), None
