"""Types as the release records spell them (`int | None`, `Literal[a, b]`, `list[int]`): checked, and put into words.

Two forms of our own: `int 1..64` is an int in that range, bounds included and each optional; `true` is only true.
"""

import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

_IN_ANY_CASE = ", in any case"


def fits(value: Any, spelled: str) -> bool:
    """Tell whether a value read from YAML is of the type. An int is a float, a bool no int; unknown types take all."""
    if spelled.endswith(_IN_ANY_CASE):
        value = value.upper() if isinstance(value, str) else value
        spelled = spelled.removesuffix(_IN_ANY_CASE)
    return any(_fits_one(value, part) for part in _split(spelled, "|"))


def has_none(spelled: str) -> bool:
    """Tell whether the type takes null."""
    return "None" in _split(spelled.removesuffix(_IN_ANY_CASE), "|")


def choices(spelled: str) -> list[str]:
    """Return the values of the type's Literal; none for a type without one."""
    parts = _split(spelled.removesuffix(_IN_ANY_CASE), "|")
    return [choice for part in parts if part.startswith("Literal[") for choice in _literals(part)]


def without_bounds(spelled: str) -> str:
    """Return the type without the bounds of its numbers."""
    parts = _split(spelled.removesuffix(_IN_ANY_CASE), "|")
    return " | ".join(_bounded(part)[0] for part in parts)


def in_words(spelled: str) -> str:
    """Return the type in words, for "expected ..."."""
    parts = _split(spelled.removesuffix(_IN_ANY_CASE), "|")
    return " or ".join(_words(part) for part in parts)


def _fits_one(value: Any, part: str) -> bool:
    name, bounds = _bounded(part)
    if bounds:
        low, _, high = bounds.partition("..")
        is_within = _SIMPLE[name](value) and (not low or value >= _number(low))
        return is_within and (not high or value <= _number(high))
    if part in _SIMPLE:
        return _SIMPLE[part](value)
    if part.startswith("Literal["):
        return (isinstance(value, str) or _is_int(value)) and str(value) in _literals(part)
    if part.startswith("list["):
        return isinstance(value, list) and all(fits(item, part[5:-1]) for item in value)
    if part.startswith("dict["):
        key_type, value_type = _split(part[5:-1], ",")
        return isinstance(value, dict) and all(fits(k, key_type) and fits(v, value_type) for k, v in value.items())
    # A class that is not recorded takes any mapping, and an unknown type takes everything.
    return isinstance(value, dict) if part.endswith("Config") else True


def _bounded(part: str) -> tuple[str, str]:
    """Split a part into its type and its bounds; the bounds are empty for most types."""
    name, _, bounds = part.partition(" ")
    return (name, bounds) if ".." in bounds else (part, "")


def _number(text: str) -> float:
    return int(text) if text.lstrip("-").isdecimal() else float(text)  # a float can't hold 2^64 - 1 exactly


def _literals(part: str) -> list[str]:
    return [choice.strip("\"'") for choice in _split(part[len("Literal[") : -1], ",")]


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_SIMPLE: Mapping[str, Callable[[Any], bool]] = {
    "None": lambda value: value is None,
    "bool": lambda value: isinstance(value, bool),
    "true": lambda value: value is True,
    "int": _is_int,
    "float": lambda value: _is_int(value) or (isinstance(value, float) and math.isfinite(value)),
    "str": lambda value: isinstance(value, str),
    "dict": lambda value: isinstance(value, dict),
}
_WORDS = {
    "None": "null",
    "bool": "true or false",
    "true": "true",
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "dict": "a mapping",
}
_PLURALS = {"int": "whole numbers", "float": "numbers", "str": "texts", "bool": "true or false"}


def _words(part: str) -> str:
    name, bounds = _bounded(part)
    if bounds:
        low, _, high = bounds.partition("..")
        span = f" from {low}" if low else ""
        return _WORDS[name] + span + (f" to {high}" if high else "")
    if part.startswith("Literal["):
        return "one of " + ", ".join(_literals(part))
    if part.startswith("list["):
        inner = part[5:-1]
        return f"a list of {_PLURALS.get(inner, in_words(inner))}"
    if part.startswith("dict["):
        return "a mapping"
    return _WORDS.get(part, f"a mapping ({part})")


@cache
def _split(text: str, at: str) -> tuple[str, ...]:
    """Split `text` at each character `at` that stands outside of brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character == "[") - (character == "]")
        if character == at and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return tuple(part.strip() for part in parts)
