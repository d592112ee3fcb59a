"""INT4 against vectors that PyTorch computed: the formulas of TensorRT-LLM's quantize_mixed_precision_moe.py.

The vectors were recorded once, with PyTorch 2.13 on a CPU, by a script that was written from those formulas: FP8 times
its scale in float32, rounded to bfloat16; the largest magnitude of 128 values of a row divided by 7; quotients rounded
half to even, and cut to -8 to 7; the first of two values in the low four bits. Where all values or the scale are zero,
the formulas divide by zero; the vectors have zeros there.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from deepseek_triton_tools.checkpoints.number_formats import (
    GROUP,
    bfloat16_of,
    dequantize_blocks,
    dequantize_groups,
    float32_of,
    quantize_int4,
    unpack_int4,
)
from deepseek_triton_tools.checkpoints.tensor_jobs import NumpyKernels

Vectors = Mapping[str, npt.NDArray[Any]]


@pytest.fixture(scope="module")
def vectors():
    with np.load(Path(__file__).parent / "vectors/int4_of_fp8.npz") as file:
        return dict(file)


def fp8(vectors, case):
    return vectors[f"{case}_fp8"].view(ml_dtypes.float8_e4m3fn), vectors[f"{case}_fp8_scales"]


def names_of_differing(vectors, differs):
    """The kinds of values in which something differs. Each kind has 128 columns."""
    per_kind = differs.reshape(differs.shape[0], len(vectors["odd_names"]), -1).any(axis=(0, 2))
    return set(vectors["odd_names"][per_kind].tolist())


def test_odd_values_are_those_of_the_formulas(vectors):
    values, scales = fp8(vectors, "odd")
    bfloat16 = bfloat16_of(dequantize_blocks(values, scales))
    packed, group_scales = quantize_int4(float32_of(bfloat16))

    assert not names_of_differing(vectors, bfloat16.view(np.uint16) != vectors["odd_bfloat16"])
    assert not names_of_differing(vectors, group_scales.view(np.uint32) != vectors["odd_int4_scales"].view(np.uint32))
    assert not names_of_differing(vectors, packed != vectors["odd_int4"])


@pytest.mark.parametrize("case", ["odd", "blocks"])
def test_the_conversion_makes_the_same_bytes(vectors, case):
    packed, group_scales = NumpyKernels().int4_of_fp8(*fp8(vectors, case))

    assert packed.tobytes() == vectors[f"{case}_int4"].tobytes()
    assert group_scales.tobytes() == vectors[f"{case}_int4_scales"].tobytes()


def test_quotients_beyond_int4_are_cut(vectors):
    """The scale of a weight near 2^-149 can't be a seventh of it, because float32 has no numbers between."""
    weight = np.zeros((len(vectors["tiny_float32"]), GROUP), np.float32)
    weight[:, :3] = vectors["tiny_float32"]
    packed, scales = quantize_int4(weight)

    assert np.array_equal(scales, vectors["tiny_scales"])
    assert np.array_equal(unpack_int4(packed)[:, :3], vectors["tiny_values"])


def test_the_odd_values_are_odd(vectors):
    """The vectors have what they are named for, so that the tests above say something about it."""
    groups = dict(
        zip(vectors["odd_names"].tolist(), np.split(vectors["odd_bfloat16"], len(vectors["odd_names"]), 1), strict=True)
    )
    group_scales = dict(zip(vectors["odd_names"].tolist(), vectors["odd_int4_scales"].T, strict=True))
    assert not group_scales["zeros"].any()
    assert (groups["negative zeros"] == 0x8000).any()
    smallest_normal = np.finfo(np.float32).smallest_normal
    for name in ("subnormal bfloat16", "subnormal scale of INT4"):
        assert ((group_scales[name] > 0) & (group_scales[name] < smallest_normal)).all(), name
    for name in ("ties", "ties, small", "ties, scale 3"):
        weight = groups[name].view(ml_dtypes.bfloat16).astype(np.float32)
        assert (np.abs(weight / group_scales[name][:, None]) % 1 == 0.5).sum() > 100, name


def test_int4_is_read_back_as_the_formulas_say(vectors):
    packed, scales = vectors["blocks_int4"], vectors["blocks_int4_scales"]
    low, high = packed.view(np.uint8) & 15, packed.view(np.uint8) >> 4
    values = np.stack([low, high], axis=-1).reshape(len(packed), -1).astype(np.int16)
    values -= 16 * (values > 7)

    assert np.array_equal(unpack_int4(packed), values)
    assert np.array_equal(dequantize_groups(packed, scales), values * scales.repeat(GROUP, axis=1))
