"""The environment variables that a script exports: misspelled names, and values that nothing understands."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

from deepseek_triton_build.check.codes import MISSPELLED_VARIABLE, OBSOLETE_VARIABLE, WRONG_VARIABLE
from deepseek_triton_build.check.documents import Document
from deepseek_triton_build.check.finding import CheckCode, Finding
from deepseek_triton_build.check.scripts import ShellScript, Variable
from deepseek_triton_build.data.vllm import VllmVersion
from deepseek_triton_build.data.yaml_files import load_yaml
from deepseek_triton_build.text import edit_instruction, short_repr

_NEAR = 0.92
"""Likeness from which an unknown name counts as a misspelled one: NCCL_IB_TIMEOUT is no misspelled NCCL_TIMEOUT."""
_OF_TENSORRT_LLM = ("TRTLLM_", "TLLM_")
_KINDS = {
    "switches": ("[01]", "0 or 1"),
    "numbers": (r"\d+", "a whole number"),
    "pairs": (r"\w+:[^,:]+(,\w+:[^,:]+)*", "name:value, separated by commas"),
    "others": (".*", "anything"),
}
"""List in environment_variables.yaml -> an expression that its values fit, and the same in words."""


def variable_problems(script: ShellScript) -> Iterator[Finding]:
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


def vllm_variable_problems(
    script: ShellScript, version: VllmVersion, write: Callable[[str, Any], str]
) -> Iterator[Finding]:
    """Find the exported variables that vLLM would read if it were another version, and those of TensorRT-LLM.

    :param write: returns what to write for an argument and its value, where the script's engine takes its arguments.
    """
    for name, variable in script.variables.items():
        problem = _vllm_problem(name, variable, version, write)
        if problem is not None:
            check, message, fix = problem
            yield check.finding(f"{name}: {message}", fix, file=script.file, line=variable.line, key=name)


def as_setting(document: Document, argument: str, value: Any) -> str:
    """Return what to write into the document for an argument; its value may not be known."""
    written = f"write {argument}" if value is None else edit_instruction({argument: value})
    return f"in {document.file}: {written}"


def _vllm_problem(
    name: str, variable: Variable, version: VllmVersion, write: Callable[[str, Any], str]
) -> tuple[CheckCode, str, str] | None:
    if name.startswith(_OF_TENSORRT_LLM):
        return OBSOLETE_VARIABLE, "vLLM does not read TensorRT-LLM's variables", "remove it"
    if not name.startswith("VLLM_") or name in version.environment:
        return None
    replaced = version.replaced_environment.get(name)
    if replaced is not None and replaced.by is not None:
        message = f"vLLM {version.version} does not read it; the argument {replaced.by} took its place"
        value = None if variable.value is None else replaced.new_value(variable.value)
        return OBSOLETE_VARIABLE, message, f"{write(replaced.by, value)}, and remove the variable"
    if replaced is not None:
        return OBSOLETE_VARIABLE, f"vLLM {version.version} does not read it: {replaced.why}", "remove it"
    message = f"vLLM {version.version} does not read it"
    near = difflib.get_close_matches(name, version.environment, n=1, cutoff=_NEAR)
    if near:
        return MISSPELLED_VARIABLE, message, f"did you mean {near[0]}?"
    return OBSOLETE_VARIABLE, message, "remove it, or use a version of vLLM that reads it"


@cache
def _known() -> Mapping[str, tuple[str, str]]:
    """Return each variable with an expression that its values fit, and the same in words."""
    table = load_yaml("environment_variables.yaml")
    known = {name: kind for group, kind in _KINDS.items() for name in table[group]}
    choices = {name: ("|".join(values), f"one of {', '.join(values)}") for name, values in table["choices"].items()}
    return known | choices
