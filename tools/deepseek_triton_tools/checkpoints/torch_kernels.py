"""The computations of a conversion on a GPU, with torch. They make the same bytes as those with numpy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from deepseek_triton_tools.checkpoints.number_formats import BLOCK, GROUP, Bfloat16, Floats, Fp8, Packed
from deepseek_triton_tools.checkpoints.stored_tensors import DTYPES

if TYPE_CHECKING:
    import torch


class TorchKernels:
    """The computations on one device."""

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
