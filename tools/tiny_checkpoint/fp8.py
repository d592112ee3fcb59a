"""FP8 as DeepSeek stores it: E4M3 values in blocks of 128 x 128 with one float32 scale each.

Training computes with weights and activations that have gone through FP8 and back, so that rounding them at the end
changes nothing.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

BLOCK = 128
LARGEST = 448.0
"""The largest number that E4M3 holds."""


def quantize_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return E4M3 values of the shape of `weight` [rows, columns], and weight_scale_inv [row blocks, column blocks].

    A value times the scale of its block is the weight. The last block of rows may be smaller, as in
    kv_a_proj_with_mqa, whose 576 rows end with half a block.
    """
    rows, columns = weight.shape
    blocks = _blocks(weight)
    scale = blocks.abs().amax(dim=(1, 3), keepdim=True).clamp(min=1e-12) / LARGEST
    values = (blocks / scale).to(torch.float8_e4m3fn).reshape(-1, blocks.shape[2] * BLOCK)[:rows, :columns]
    return values.contiguous(), scale[:, 0, :, 0].contiguous()


def rounded_weight(weight: torch.Tensor) -> torch.Tensor:
    """Return `weight` [rows, columns] as it comes back from FP8; gradients pass as if it were unchanged."""
    with torch.no_grad():
        rows, columns = weight.shape
        blocks = _blocks(weight)
        scale = blocks.abs().amax(dim=(1, 3), keepdim=True).clamp(min=1e-12) / LARGEST
        back = (blocks / scale).to(torch.float8_e4m3fn).to(weight.dtype) * scale
        difference = back.reshape(-1, blocks.shape[2] * BLOCK)[:rows, :columns] - weight
    return weight + difference


def rounded_activation(states: torch.Tensor) -> torch.Tensor:
    """Return `states` [..., width] as they come back from FP8 in groups of 128, the dynamic scheme of the engines."""
    with torch.no_grad():
        groups = states.float().unflatten(-1, (-1, BLOCK))
        scale = groups.abs().amax(dim=-1, keepdim=True).clamp(min=1e-6) / LARGEST
        back = (groups / scale).to(torch.float8_e4m3fn).float() * scale
        difference = back.flatten(-2).to(states.dtype) - states
    return states + difference


def _blocks(weight: torch.Tensor) -> torch.Tensor:
    """Return `weight` as [row blocks, 128, column blocks, 128], padded with zeros."""
    rows, columns = weight.shape
    padded = F.pad(weight, (0, -columns % BLOCK, 0, -rows % BLOCK))
    return padded.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
