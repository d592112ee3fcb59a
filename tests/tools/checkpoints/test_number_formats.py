"""FP8 in blocks, INT4 in groups, bfloat16."""

import ml_dtypes
import numpy as np
import numpy.typing as npt
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
    pack_int4,
    quantize_blocks,
    quantize_int4,
    unpack_int4,
)

Floats = npt.NDArray[np.float32]


def weights(rows, columns):
    """Weights of very different sizes, with zeros among them."""
    numbers = st.floats(-1, 1, width=16) | st.sampled_from([0.0, -0.0, 2.0**-66, -3e4])
    shapes = st.tuples(rows, columns)
    return shapes.flatmap(lambda shape: arrays(np.float32, shape, elements=numbers, fill=st.just(0.25)))


@pytest.mark.slow
@given(weights(st.integers(1, 4), st.sampled_from([GROUP, 2 * GROUP])))
def test_int4_is_within_half_a_step_of_the_weight(weight):
    packed, scales = quantize_int4(weight)

    assert (packed.dtype, packed.shape) == (np.int8, (weight.shape[0], weight.shape[1] // 2))
    steps = scales.repeat(GROUP, axis=1)
    assert (np.abs(dequantize_groups(packed, scales) - weight) <= steps * 0.5001).all()
    largest = np.abs(weight).reshape(-1, GROUP).max(axis=1)
    assert np.array_equal(scales.ravel(), largest / np.float32(7))


def test_a_group_of_zeros_has_no_scale():
    packed, scales = quantize_int4(np.zeros((1, GROUP), np.float32))

    assert not packed.any()
    assert not scales.any()


def test_half_a_step_goes_to_the_even_value():
    weight = np.zeros((1, GROUP), np.float32)
    weight[0, :5] = 7, 0.5, 1.5, 2.5, -0.5

    packed, _ = quantize_int4(weight)

    assert unpack_int4(packed)[0, :5].tolist() == [7, 0, 2, 2, 0]


def test_the_first_value_of_a_byte_is_in_its_low_half():
    assert pack_int4(np.array([[1, 2, -1, -8]], np.int8)).view(np.uint8).tolist() == [[0x21, 0x8F]]


@pytest.mark.slow
@given(arrays(np.int8, st.tuples(st.integers(1, 3), st.sampled_from([2, 10, GROUP])), elements=st.integers(-8, 7)))
def test_packing_loses_nothing(values):
    assert np.array_equal(unpack_int4(pack_int4(values)), values)


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
