"""The one guard between hand-written files and the rules: a value of a wrong type is not there.

The schema's own findings report it; a rule would only trip over it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from deepseek_triton_build.releases import load_release
from deepseek_triton_build.rules.rule import CANONICAL_RELEASE, Deployment

_Check = Callable[[Any], bool]


def well_typed(deployment: Deployment) -> Deployment:
    """`deployment` without the settings whose values have not the type that their keys have."""
    wrong = [key for key, value in deployment.settings.items() if not _check(key)(value)]
    if not wrong:
        return deployment
    return replace(deployment, settings={k: v for k, v in deployment.settings.items() if k not in wrong})


@cache
def _check(key: str) -> _Check:
    """What holds for every value of `key`'s type; anything for a key that nobody knows."""
    found = load_release(CANONICAL_RELEASE).find_key(key)
    if found is None:
        return lambda value: True
    checks = [_check_of(name.strip()) for name in found.type.split(" | ")]
    return lambda value: any(check(value) for check in checks)


def _check_of(type_name: str) -> _Check:
    if type_name.startswith("Literal["):
        return _is_str
    if type_name.startswith("list[int]"):
        return lambda value: isinstance(value, (list, tuple)) and all(map(_is_int, value))
    return _CHECKS.get(type_name, lambda value: True)


def _is_str(value: Any) -> bool:
    return isinstance(value, str)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_CHECKS: Mapping[str, _Check] = {
    "None": lambda value: value is None,
    "bool": lambda value: isinstance(value, bool),
    "int": _is_int,
    "float": lambda value: _is_int(value) or isinstance(value, float),
    "str": _is_str,
}
"""Type, as a record spells it -> what holds for its values. Others are sections, which no rule reads whole."""
