"""FP8 in blocks, bfloat16, and INT4 against vectors that PyTorch computed: the formulas of TensorRT-LLM's
quantize_mixed_precision_moe.py.

The vectors were recorded once, with PyTorch 2.13 on a CPU, by a script that was written from those formulas: FP8 times
its scale in float32, rounded to bfloat16; the largest magnitude of 128 values of a row divided by 7; quotients rounded
half to even, and cut to -8 to 7; the first of two values in the low four bits. Where all values or the scale are zero,
the formulas divide by zero; the vectors have zeros there.
"""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from deepseek_triton_tools.checkpoints.number_formats import (
    BLOCK,
    GROUP,
    dequantize_blocks,
    dequantize_groups,
    float32_of,
    int4_of_fp8,
    quantize_blocks,
    quantize_int4,
    unpack_int4,
)


def weights(rows, columns):
    """Weights of very different sizes, with zeros among them."""
    numbers = st.floats(-1, 1, width=16) | st.sampled_from([0.0, -0.0, 2.0**-66, -3e4])
    shapes = st.tuples(rows, columns)
    return shapes.flatmap(lambda shape: arrays(np.float32, shape, elements=numbers, fill=st.just(0.25)))


@pytest.mark.slow
@settings(max_examples=50)
@given(weights(st.sampled_from([1, BLOCK, BLOCK + 64]), st.sampled_from([5, BLOCK, 2 * BLOCK + 1])))
def test_fp8_is_within_half_a_step_of_the_weight(weight):
    values, scales = quantize_blocks(weight)
    back = dequantize_blocks(values, scales)

    rows, columns = weight.shape
    assert scales.shape == (-(-rows // BLOCK), -(-columns // BLOCK))
    assert np.isfinite(back).all()
    whole = scales.repeat(BLOCK, 0)[:rows].repeat(BLOCK, 1)[:, :columns]
    # Three bits of fraction: an eighth of the value between two steps; below 2^-6 the steps are 2^-9 of the scale.
    assert (np.abs(back - weight) <= np.maximum(np.abs(weight) / 16, whole * 2.0**-10) * 1.0001).all()


def test_a_weight_that_came_from_fp8_goes_back_to_the_same_values():
    weight = np.random.default_rng(0).standard_normal((BLOCK, BLOCK)).astype(np.float32)
    values, scales = quantize_blocks(weight)

    again, same_scales = quantize_blocks(dequantize_blocks(values, scales))

    assert np.array_equal(again.view(np.uint8), values.view(np.uint8))
    assert np.allclose(same_scales, scales, rtol=1e-6)


def test_every_fp8_value_is_the_number_that_ml_dtypes_says():
    every = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)

    assert np.array_equal(float32_of(every), every.astype(np.float32), equal_nan=True)


@pytest.fixture(scope="module")
def vectors():
    with np.load(Path(__file__).parent / "vectors/int4_of_fp8.npz") as file:
        return dict(file)


def fp8(vectors, case):
    return vectors[f"{case}_fp8"].view(ml_dtypes.float8_e4m3fn), vectors[f"{case}_fp8_scales"]


@pytest.mark.parametrize("case", ["odd", "blocks"])
def test_the_conversion_makes_the_same_bytes(vectors, case):
    packed, group_scales = int4_of_fp8(*fp8(vectors, case))

    assert packed.tobytes() == vectors[f"{case}_int4"].tobytes()
    assert group_scales.tobytes() == vectors[f"{case}_int4_scales"].tobytes()


def test_quotients_beyond_int4_are_cut(vectors):
    """The scale of a weight near 2^-149 can't be a seventh of it, because float32 has no numbers between."""
    weight = np.zeros((len(vectors["tiny_float32"]), GROUP), np.float32)
    weight[:, :3] = vectors["tiny_float32"]
    packed, scales = quantize_int4(weight)

    assert np.array_equal(scales, vectors["tiny_scales"])
    assert np.array_equal(unpack_int4(packed)[:, :3], vectors["tiny_values"])


def test_int4_is_read_back_as_the_formulas_say(vectors):
    packed, scales = vectors["blocks_int4"], vectors["blocks_int4_scales"]
    low, high = packed.view(np.uint8) & 15, packed.view(np.uint8) >> 4
    values = np.stack([low, high], axis=-1).reshape(len(packed), -1).astype(np.int16)
    values -= 16 * (values > 7)

    assert np.array_equal(unpack_int4(packed), values)
    assert np.array_equal(dequantize_groups(packed, scales), values * scales.repeat(GROUP, axis=1))
