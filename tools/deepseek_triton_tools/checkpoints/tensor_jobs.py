"""Computes one tensor of a conversion, a few rows at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from deepseek_triton_tools.checkpoints.conversion_plan import TensorJob
from deepseek_triton_tools.checkpoints.number_formats import (
    BLOCK,
    GROUP,
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
from deepseek_triton_tools.checkpoints.stored_tensors import DTYPES, Array
from deepseek_triton_tools.tool_errors import CheckpointError

if TYPE_CHECKING:
    import torch


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


class TorchKernels:
    """The computations on a GPU, with torch. They make the same bytes as those with numpy."""

    rows = 64 * BLOCK
    """An expert's weight in one piece."""

    def __init__(self, device: str) -> None:
        import torch

        self._torch = torch
        self._device = torch.device(device)

    def bf16_of_fp8(self, values: Fp8, scales: Floats) -> Bfloat16:
        bits = self._dequantized(values, scales).view(self._torch.int16).cpu().numpy()
        weight: Bfloat16 = bits.view(DTYPES["BF16"])
        return weight

    def int4_of_fp8(self, values: Fp8, scales: Floats) -> tuple[Packed, Floats]:
        torch = self._torch
        rows, columns = values.shape
        groups = self._dequantized(values, scales).float().view(rows, columns // GROUP, GROUP)
        # A divisor that is no tensor would be multiplied by as its reciprocal on a GPU, which rounds otherwise.
        group_scales = groups.abs().amax(dim=2) / torch.tensor(7.0, device=self._device)
        divisors = torch.where(group_scales > 0, group_scales, 1.0)
        quotients = torch.round(groups / divisors.unsqueeze(2)).clamp(-8, 7).to(torch.int8).view(rows, columns)
        packed = (quotients[:, ::2] & 0xF) | (quotients[:, 1::2] << 4)
        return packed.cpu().numpy(), group_scales.cpu().numpy()

    def _dequantized(self, values: Fp8, scales: Floats) -> torch.Tensor:
        """Return the weight [rows, columns] as bfloat16."""
        torch = self._torch
        rows, columns = values.shape
        on_device = self._to_device(values.view(np.uint8)).view(torch.float8_e4m3fn).float()
        expanded = self._to_device(scales).repeat_interleave(BLOCK, 1)[:, :columns].repeat_interleave(BLOCK, 0)[:rows]
        return (on_device * expanded).bfloat16()

    def _to_device(self, values: Any) -> torch.Tensor:
        return self._torch.from_numpy(np.ascontiguousarray(values)).to(self._device)


def gpus() -> list[str]:
    """Return the GPUs that torch can use, as its names; empty without torch or without a GPU."""
    try:
        import torch
    except ImportError:
        return []
    return [f"cuda:{number}" for number in range(torch.cuda.device_count())] if torch.cuda.is_available() else []


def run_job(job: TensorJob, kernels: Kernels) -> Iterator[tuple[Array, int]]:
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
    for begin in range(0, stored_tensor.shape[0], kernels.rows):
        end = min(begin + kernels.rows, stored_tensor.shape[0])
        stored, scales = stored_tensor.read(begin, end), weight.read_scales(begin, end)
        values, new_scales = _converted(job, stored, scales, kernels)
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


def _converted(job: TensorJob, stored: Array, scales: Floats | None, kernels: Kernels) -> tuple[Array, Floats | None]:
    """Return rows of the new tensor, and their scales where it has such."""
    if job.weight.format == "fp8" and scales is not None:
        if job.written_as == "int4":
            return kernels.int4_of_fp8(stored, scales)
        return kernels.bf16_of_fp8(stored, scales), None
    weight = float32_of(stored) if scales is None else dequantize_groups(stored, scales)
    if job.written_as == "int4":
        return quantize_int4(weight)
    if job.written_as == "fp8":
        return quantize_blocks(weight)
    return bfloat16_of(weight), None
