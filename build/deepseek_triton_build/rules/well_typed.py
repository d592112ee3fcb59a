"""The guard between hand-written files and the rules: it leaves out values of a wrong type.

The check reports such a value by itself, and a rule could fail on it.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Any

from deepseek_triton_build.data.releases import load_release
from deepseek_triton_build.data.type_strings import fits
from deepseek_triton_build.rules.rule import CANONICAL_RELEASE, Deployment

_LITERAL = re.compile(r"Literal\[[^]]*\](, in any case)?")


def well_typed(deployment: Deployment) -> Deployment:
    """Return `deployment` without the settings whose values are not of their keys' types."""
    kept = {key: value for key, value in deployment.settings.items() if _is_well_typed(key, value)}
    return deployment if len(kept) == len(deployment.settings) else replace(deployment, settings=kept)


def _is_well_typed(key: str, value: Any) -> bool:
    spelled = _type(key)
    return spelled is None or fits(value, spelled)


@cache
def _type(key: str) -> str | None:
    """Return the type of `key`; None for an unknown key. A Literal counts as str, as the rules judge its values."""
    found = load_release(CANONICAL_RELEASE).find_key(key)
    return None if found is None else _LITERAL.sub("str", found.type)
