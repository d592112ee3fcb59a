"""Values of sampling fields: checked against contract.SAMPLING_FIELDS, wherever they come from."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable
from typing import Any

from deepseek_backend.contract import Dtype, SamplingField

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80


def shown(value: object) -> str:
    """`value` as an error message quotes it: never longer than a line."""
    return _SHORT.repr(value)


def check_value(field: SamplingField, value: object) -> Any:
    """`value` as `field` holds it: bool, int, float, str, or a tuple of those.

    :raises ValueError: saying what was expected and what came.
    """
    if not field.many:
        return _CHECKS[field.dtype](field, value)
    values = value if isinstance(value, (list, tuple)) else [value]
    if len(values) > field.max_items:
        raise ValueError(f"{field.name}: expected at most {field.max_items} values, got {len(values)}")
    return tuple(_CHECKS[field.dtype](field, item) for item in values)


def _check_bool(field: SamplingField, value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{field.name}: expected true or false, got {shown(value)}")
    return value


def _check_text(field: SamplingField, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{field.name}: expected a string that is not empty, got {shown(value)}")
    if len(value) > field.max_length:
        raise ValueError(f"{field.name}: expected at most {field.max_length} characters, got {len(value)}")
    return value


def _check_int(field: SamplingField, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{field.name}: expected a whole number, got {shown(value)}")
    _check_range(field, value)
    return value


def _check_float(field: SamplingField, value: object) -> float:
    if isinstance(value, int) and not isinstance(value, bool):
        _check_range(field, value)  # first: a whole number may be too large for a float
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{field.name}: expected a number, got {shown(value)}")
    # An FP32 tensor holds 0.800000012 where JSON holds 0.8; seven digits make both the same request.
    rounded = float(f"{value:.7g}")
    _check_range(field, rounded)
    return rounded


def _check_range(field: SamplingField, value: float) -> None:
    too_low = field.low is not None and (value <= field.low if field.low_excluded else value < field.low)
    if too_low or (field.high is not None and value > field.high):
        raise ValueError(f"{field.name}: expected a number {field.range_text()}, got {shown(value)}")


_CHECKS: dict[Dtype, Callable[[SamplingField, object], Any]] = {
    Dtype.BOOL: _check_bool,
    Dtype.STRING: _check_text,
    Dtype.INT32: _check_int,
    Dtype.UINT64: _check_int,
    Dtype.FP32: _check_float,
}
