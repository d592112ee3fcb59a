"""Quantizing with torch makes the same bytes as with numpy. Here torch computes on a CPU."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from deepseek_triton_tools.checkpoints.number_formats import BLOCK, Floats, Fp8
from deepseek_triton_tools.checkpoints.tensor_jobs import NumpyKernels, TorchKernels


def stored(rows: int, columns: int) -> tuple[Fp8, Floats]:
    """Every FP8 number but NaN, groups of zeros, and scales of many sizes."""
    rng = np.random.default_rng(rows)
    values = rng.integers(0, 256, (rows, columns), np.uint8)
    values[values & 0x7F == 0x7F] = 0
    values[0, :BLOCK] = 0
    scales = 2.0 ** rng.uniform(-40, 4, (-(-rows // BLOCK), columns // BLOCK))
    return values.view(ml_dtypes.float8_e4m3fn), scales.astype(np.float32)


@pytest.mark.parametrize("rows", [1, BLOCK, 3 * BLOCK + 64])
@pytest.mark.parametrize("columns", [BLOCK, 5 * BLOCK])
def test_torch_makes_the_same_bytes(rows: int, columns: int) -> None:
    values, scales = stored(rows, columns)
    with_torch, with_numpy = TorchKernels("cpu"), NumpyKernels()

    ours, expected = with_torch.int4_of_fp8(values, scales), with_numpy.int4_of_fp8(values, scales)

    assert [one.tobytes() for one in ours] == [one.tobytes() for one in expected]
    assert [(one.dtype, one.shape) for one in ours] == [(one.dtype, one.shape) for one in expected]
    whole = with_torch.bf16_of_fp8(values, scales)
    assert whole.dtype == ml_dtypes.bfloat16
    assert whole.tobytes() == with_numpy.bf16_of_fp8(values, scales).tobytes()
