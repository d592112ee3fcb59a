"""The environment variables that a script exports: misspelled names, and values that nothing understands."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from functools import cache

from deepseek_triton_build.check.codes import MISSPELLED_VARIABLE, WRONG_VARIABLE
from deepseek_triton_build.check.finding import Finding
from deepseek_triton_build.check.scripts import Script
from deepseek_triton_build.data.yaml_files import load_yaml
from deepseek_triton_build.text import short_repr

_NEAR = 0.92
"""Likeness from which an unknown name counts as a misspelled one: NCCL_IB_TIMEOUT is no misspelled NCCL_TIMEOUT."""
_KINDS = {
    "switches": ("[01]", "0 or 1"),
    "numbers": (r"\d+", "a whole number"),
    "pairs": (r"\w+:[^,:]+(,\w+:[^,:]+)*", "name:value, separated by commas"),
    "others": (".*", "anything"),
}
"""List in environment_variables.yaml -> an expression that its values fit, and the same in words."""


def variable_problems(script: Script) -> Iterator[Finding]:
    """Find the exported variables that are misspelled, and those with a value that the engine does not understand."""
    known = _known()
    for name, variable in script.variables.items():
        if name not in known:
            near = difflib.get_close_matches(name.upper(), known, n=1, cutoff=_NEAR)
            if near:
                message = f"{name} is not a variable that the engine is known to read"
                fix = f"did you mean {near[0]}?"
                yield MISSPELLED_VARIABLE.finding(message, fix, file=script.file, line=variable.line, key=name)
            continue
        pattern, words = known[name]
        if variable.value and not re.fullmatch(pattern, variable.value, re.IGNORECASE | re.DOTALL):
            message = f"{name}: expected {words}, found {short_repr(variable.value)}"
            fix = f"write {words}, or remove the variable"
            yield WRONG_VARIABLE.finding(message, fix, file=script.file, line=variable.line, key=name)


@cache
def _known() -> Mapping[str, tuple[str, str]]:
    """Return each variable with an expression that its values fit, and the same in words."""
    table = load_yaml("deepseek_triton_build.data", "environment_variables.yaml")
    known = {name: kind for group, kind in _KINDS.items() for name in table[group]}
    choices = {name: ("|".join(values), f"one of {', '.join(values)}") for name, values in table["choices"].items()}
    return known | choices
