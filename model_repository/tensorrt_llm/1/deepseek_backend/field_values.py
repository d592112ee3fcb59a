"""Checks values of sampling fields against contract.SAMPLING_FIELDS, wherever they come from."""

import json
import math
import re
import reprlib
from collections.abc import Callable, Sequence
from typing import Any

from deepseek_backend.contract import MAX_JSON_DEPTH, Dtype, SamplingFieldSpec

_MOST_LISTED = 8
# A token id in the only way of writing it, so that no two keys mean the same token.
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80
_SHORT.maxlevel, _SHORT.maxlist, _SHORT.maxdict = 2, 4, 2


def quoted(value: object) -> str:
    """Return `value` as an error message quotes it, never longer than a line."""
    return _SHORT.repr(value)


def listed(values: Sequence[object]) -> str:
    """Return values as an error message lists them: a few, and how many more there are."""
    more = f" and {len(values) - _MOST_LISTED:,} more" if len(values) > _MOST_LISTED else ""
    return ", ".join(map(quoted, values[:_MOST_LISTED])) + more


def read_json(text: str | bytes) -> Any:
    """Return the value that JSON text stands for.

    :raises ValueError: when it is not JSON, or is nested more than MAX_JSON_DEPTH deep.
    """
    too_deep = f"it is nested more than {MAX_JSON_DEPTH} deep"
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(too_deep) from None
    brackets = text.count("[") + text.count("{") if isinstance(text, str) else text.count(b"[") + text.count(b"{")
    if brackets > MAX_JSON_DEPTH:  # which few have, and counting is fast
        level = [value] if isinstance(value, (dict, list)) else []
        for _ in range(MAX_JSON_DEPTH):
            inside = (each.values() if isinstance(each, dict) else each for each in level)
            level = [each for values in inside for each in values if isinstance(each, (dict, list))]
        if level:
            raise ValueError(too_deep)
    return value


def read_object(text: str) -> dict[str, Any] | None:
    """Return the object that JSON text stands for; None for anything else."""
    try:
        value = read_json(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def check_value(field: SamplingFieldSpec, value: object) -> Any:
    """Return `value` as `field` holds it: bool, int, float, str, a tuple of those, or a number for each token id.

    :raises ValueError: with what was expected and what came.
    """
    if field.json:
        text, document = _check_json(field, value)
        if not field.by_token:
            return text
        if len(document) > field.max_items:
            raise ValueError(f"{field.name}: expected at most {field.max_items:,} tokens, got {len(document):,}")
        for token_id in document:
            if not _TOKEN_ID.fullmatch(token_id):
                raise ValueError(f"{field.name}: expected token ids from 0 as keys, got {quoted(token_id)}")
        return {int(token_id): _check_float(field, number) for token_id, number in document.items()}
    if not field.many:
        return _CHECKS[field.dtype](field, value)
    values = value if isinstance(value, (list, tuple)) else [value]
    if len(values) > field.max_items:
        raise ValueError(f"{field.name}: expected at most {field.max_items} values, got {len(values)}")
    return tuple(_CHECKS[field.dtype](field, item) for item in values)


def check_characters(where: str, value: object) -> None:
    r"""Refuse half a character, such as \ud83d alone: JSON can hold it, but no tokenizer and no response can.

    :raises ValueError: for a value from JSON that holds one, or that is nested too deep to check.
    """
    try:
        (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise ValueError(f"{where}: expected whole characters, got {half!r}, half of a surrogate pair") from None
    except RecursionError:
        # Writing JSON allows a little less depth than reading it.
        raise ValueError(f"{where}: expected less nesting, got a value that is nested too deep") from None


def _check_json(field: SamplingFieldSpec, value: object) -> tuple[str, dict[str, Any]]:
    """Return the JSON text of `value`, which is such text or an object, and the object."""
    if isinstance(value, str):
        _check_text(field, value)
    elif not isinstance(value, dict):
        raise ValueError(f"{field.name}: expected a JSON object, got {quoted(value)}")
    try:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        document = read_json(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{field.name}: expected a JSON object, got text that is not JSON ({error})") from None
    if not isinstance(document, dict):
        raise ValueError(f"{field.name}: expected a JSON object, got {quoted(document)}")
    return _check_text(field, text), document


def _check_bool(field: SamplingFieldSpec, value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{field.name}: expected true or false, got {quoted(value)}")
    return value


def _check_text(field: SamplingFieldSpec, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{field.name}: expected a string that is not empty, got {quoted(value)}")
    check_characters(field.name, value)
    if field.choices and value not in field.choices:
        raise ValueError(f"{field.name}: expected {' or '.join(map(repr, field.choices))}, got {quoted(value)}")
    if len(value) > field.max_length:
        raise ValueError(f"{field.name}: expected at most {field.max_length} characters, got {len(value)}")
    return value


def _check_int(field: SamplingFieldSpec, value: object) -> int:
    # JavaScript has one kind of number, so some of its clients write 7.0.
    if isinstance(value, float) and value.is_integer():
        if field.dtype is Dtype.UINT64 and abs(value) >= 2**53:  # Triton makes a float of a parameter from 2^63 on
            hint = f"may have been rounded: send it as {field.tensor.name!r}"
            raise ValueError(f"{field.name}: expected a whole number, got {quoted(value)}, which {hint}")
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{field.name}: expected a whole number, got {quoted(value)}")
    _check_range(field, value)
    return value


def _check_float(field: SamplingFieldSpec, value: object) -> float:
    if isinstance(value, int) and not isinstance(value, bool):
        _check_range(field, value)  # before isfinite: a whole number may be too large for a float
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{field.name}: expected a number, got {quoted(value)}")
    # An FP32 tensor holds 0.800000012 where JSON holds 0.8; seven digits make both the same request.
    rounded = float(f"{value:.7g}")
    _check_range(field, rounded)
    return rounded


def _check_range(field: SamplingFieldSpec, value: float) -> None:
    if (field.low is not None and value < field.low) or (field.high is not None and value > field.high):
        raise ValueError(f"{field.name}: expected a number {field.range_text()}, got {quoted(value)}")


_CHECKS: dict[Dtype, Callable[[SamplingFieldSpec, object], Any]] = {
    Dtype.BOOL: _check_bool,
    Dtype.STRING: _check_text,
    Dtype.INT32: _check_int,
    Dtype.UINT64: _check_int,
    Dtype.FP32: _check_float,
}
