"""The LLM arguments that a script gives to a program of TensorRT-LLM by flags."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from deepseek_triton_build.check.codes import OUT_OF_RANGE, UNUSED_FLAG, WRONG_CHOICE, WRONG_FLAG, WRONG_TYPE
from deepseek_triton_build.check.finding import Finding
from deepseek_triton_build.check.scripts import CommandFlag, Program, ShellScript, typed
from deepseek_triton_build.data import spelling, type_strings
from deepseek_triton_build.data.releases import load_release
from deepseek_triton_build.data.setting_types import bounded_type
from deepseek_triton_build.rules.rule import CANONICAL_RELEASE
from deepseek_triton_build.text import short_repr

YAML_FLAGS = ("--extra_llm_api_options", "--config")
"""Flags that name the YAML file; the second is the newer name (TensorRT-LLM trtllm_serve_cli.yaml@9e7f85f6)."""
_OTHER_FLAGS = (
    *YAML_FLAGS,
    *("--host", "--port", "--log_level", "--tool_parser", "--chat_template", "--model", "--model_path", "--model_dir"),
    *("--dataset", "--dataset_path", "--num_requests", "--concurrency", "--streaming", "--apply_chat_template"),
    *("--use_cuda_graph", "--use_one_model", "--prompt"),
)
"""Flags that set no LLM argument that is recorded here."""
_NEAR = 0.8
"""Likeness from which a flag that is not recorded counts as a misspelled one. Few flags of a program are recorded."""


@dataclass(kw_only=True)
class GivenFlags:
    """The settings that the flags of a program give."""

    program: str
    file: str
    settings: dict[str, Any] = field(default_factory=dict)
    """Canonical key -> value."""
    places: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Canonical key -> the line and the name of its flag."""
    unknown: set[str] = field(default_factory=set)
    """Canonical keys whose values depend on more than the script."""
    unread: list[str] = field(default_factory=list)
    """Flags that are not recorded here."""
    findings: list[Finding] = field(default_factory=list)


def read_flags(script: ShellScript, program: Program) -> GivenFlags:
    """Return what the flags of `program`, which `script` starts, set."""
    given = GivenFlags(program=program.name, file=script.file)
    for flag in program.flags:
        if flag.name in program.meanings:
            _add(given, flag, *program.meanings[flag.name])
        elif flag.name not in _OTHER_FLAGS:
            near = difflib.get_close_matches(flag.name, [*program.meanings, *_OTHER_FLAGS], n=1, cutoff=_NEAR)
            if near:
                message = f"{flag.name} is not a flag of {program.name}"
                found = WRONG_FLAG.finding(message, f"did you mean {near[0]}?", file=script.file, line=flag.line)
                given.findings.append(found)
            else:
                given.unread.append(flag.name)
    return given


def unused_flags(given: GivenFlags, document_keys: Mapping[Any, Any], settings: Mapping[str, Any], file: str) -> None:
    """Leave out the flags that the YAML file overrules, and add findings about those that say something else.

    :param document_keys: the content of the YAML file.
    :param settings: the LLM arguments in it, by canonical keys.
    :param file: its name.
    """
    for key in [*given.settings, *given.unknown]:
        section, dot, _ = key.partition(".")
        if key not in settings and not (dot and section in document_keys):
            continue
        value = given.settings.pop(key, None)
        given.unknown.discard(key)
        line, flag = given.places[key]
        if key in settings and settings[key] == value:
            continue
        says = f"{key}: {short_repr(settings[key])}" if key in settings else f"the section {section}"
        message = f"{flag} has no effect, because {file} gives {says}"
        fix = f"remove {flag}, or write {key} into {file} alone"
        given.findings.append(UNUSED_FLAG.finding(message, fix, file=given.file, line=line, key=key))


def _add(given: GivenFlags, flag: CommandFlag, key: str, stands_for: Any) -> None:
    found = load_release(CANONICAL_RELEASE).find_key(key)
    assert found is not None  # a test compares the flags' keys with the record
    value = stands_for if stands_for is not None else typed(flag.values, found.type)
    given.places[key] = flag.line, flag.name
    if value is None:
        given.unknown.add(key)
        return
    bounds = bounded_type(key, found.type)
    if not type_strings.fits(value, bounds):
        expected = type_strings.in_words(bounds)
        is_choice = bool(type_strings.choices(found.type))
        code = WRONG_CHOICE if is_choice else OUT_OF_RANGE if type_strings.fits(value, found.type) else WRONG_TYPE
        message = f"{flag.name}: expected {expected}, found {short_repr(value)}"
        given.findings.append(code.finding(message, f"write {expected}", file=given.file, line=flag.line, key=key))
        given.unknown.add(key)
        return
    given.settings[key] = value


def flag_keys() -> frozenset[str]:
    """Return the canonical keys that some program of TensorRT-LLM takes by flags."""
    programs = ("trtllm-serve", "trtllm-bench", "trtllm-eval")
    return frozenset(key for program in programs for key in spelling.keys_of_flags(program).values())
