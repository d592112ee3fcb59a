"""Values as YAML on one line."""

import math

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from deepseek_triton_build.text import yaml_flow

_SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=12)
_WORDS = st.sampled_from(["yes", "No", "ON", "off", "true", "Null", "y", "n", "a-b", "x/y.z", "1e5", "e1", "_", ".nan"])


@pytest.mark.slow
@given(st.recursive(_SCALARS | _WORDS, lambda inner: st.lists(inner, max_size=3), max_leaves=6))
def test_a_value_in_flow_style_is_read_as_it_was(value):
    text = yaml_flow(value)

    assert "\n" not in text
    assert yaml.safe_load(f"[{text}]") == [value]


@pytest.mark.parametrize("value", [1e5, 1e22, 1e-7, 0.6, -2.5, 3e300, math.inf])
def test_a_float_is_read_as_a_float(value):
    assert yaml.safe_load(yaml_flow(value)) == value
    assert isinstance(yaml.safe_load(yaml_flow(value)), float)
