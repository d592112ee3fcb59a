"""The engine arguments that a script gives to `vllm serve` by flags."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from deepseek_triton_build.check.codes import MOVED_KEY, WRONG_FLAG, WRONG_TYPE
from deepseek_triton_build.check.finding import Finding
from deepseek_triton_build.check.scripts import CommandFlag, Program, ShellScript, typed
from deepseek_triton_build.check.vllm_arguments import absent_problem, value_problem
from deepseek_triton_build.data import type_strings
from deepseek_triton_build.data.vllm import VLLM_VERSIONS, Argument, VllmVersion, load_vllm
from deepseek_triton_build.render.vllm_commands import WITHOUT_FLAG
from deepseek_triton_build.text import nearest_name, short_repr

_HUMAN = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT])")
_POWERS = "kmgt"


@dataclass(kw_only=True)
class VllmFlags:
    """The settings that the flags of `vllm serve` give."""

    file: str
    settings: dict[str, Any] = field(default_factory=dict)
    """Argument, or key of one (`speculative_config.method`) -> value."""
    places: dict[str, tuple[int, str]] = field(default_factory=dict)
    """The same -> the line and the name of its flag."""
    unknown: set[str] = field(default_factory=set)
    """Arguments whose values depend on more than the script, or are wrong."""
    findings: list[Finding] = field(default_factory=list)

    def place(self, key: str | None) -> tuple[str, int | None, str]:
        """Return file, line and flag of an argument; without a flag, no line."""
        line, flag = self.places.get(key or "", (None, key or ""))
        return self.file, line, flag


def read_vllm_flags(script: ShellScript, program: Program, version: VllmVersion) -> VllmFlags:
    """Return what the flags of `program`, which `script` starts, set."""
    given = VllmFlags(file=script.file)
    for flag in program.flags:
        key, is_off = _argument(flag.name, version)
        if version.find(key) is not None and key not in WITHOUT_FLAG:
            _add(given, flag, key, is_off=is_off, version=version)
        elif _dashed(flag.name) not in version.serve_flags and not _OPTIMIZATION.fullmatch(flag.name):
            check, message, fix = _unknown(flag, key, version)
            given.findings.append(check.finding(message, fix, file=script.file, line=flag.line))
    return given


def as_flag(argument: str, value: Any) -> str:
    """Return what to write as a flag for an argument; its value may not be known."""
    name, dot, key = argument.partition(".")
    name = f"--{name.replace('_', '-')}{dot}{key}"
    if value is False:
        return f"write --no-{name[2:]}"
    if value is None or value is True:
        return f"write {name}"
    return f"write {name} {json.dumps(value) if isinstance(value, dict | list) else value}"


_OPTIMIZATION = re.compile(r"-O[0-3]?")
"""`-O3`: a level of optimization."""


def _argument(flag: str, version: VllmVersion) -> tuple[str, bool]:
    """Return the argument that a flag sets, as a dotted path, and whether the flag turns it off."""
    if flag in version.short_flags:
        return version.short_flags[flag], False
    name, dot, keys = flag.removeprefix("--").partition(".")
    name = version.short_flags.get(f"-{name.removeprefix('-')}", name) if dot and flag[1] != "-" else name
    name = name.replace("-", "_")
    if name not in version.arguments and name.startswith("no_") and name[3:] in version.arguments:
        return name[3:], True
    return name + dot + keys.replace("-", "_"), False


def _dashed(flag: str) -> str:
    """Return a flag as its program lists it: underscores count as dashes, and `--no-` turns a switch off."""
    name = flag.replace("_", "-")
    return name.replace("--no-", "--", 1)


def _unknown(flag: CommandFlag, key: str, version: VllmVersion) -> tuple[Any, str, str]:
    message = f"{flag.name} is not a flag of vllm serve {version.version}"
    value = typed(flag.values, "Any") if flag.values else True
    moved = version.moved_arguments.get(key)
    if moved is not None:
        if moved.by is None:
            return MOVED_KEY, f"{message}: {moved.why}", "remove it"
        why = f": {moved.why}" if moved.why else ""
        return (
            MOVED_KEY,
            f"{message}, which has {as_flag(moved.by, True)[6:]} instead{why}",
            as_flag(moved.by, moved.new_value(value)),
        )
    section, dot, _ = key.partition(".")
    if dot and section in version.sections:
        problem = absent_problem(key, value, version)
        return WRONG_FLAG, message, problem.fix
    known = [*(f"--{name.replace('_', '-')}" for name in version.arguments), *version.serve_flags]
    if key in WITHOUT_FLAG:
        return WRONG_FLAG, message, f"remove it; vLLM has the argument {key}, but no flag for it"
    elsewhere = next((other for other in VLLM_VERSIONS if key in load_vllm(other).arguments), None)
    if elsewhere is not None:
        return WRONG_FLAG, message, f"vLLM {elsewhere} has it; remove it here, or use that version"
    near = nearest_name(_dashed(flag.name), known)
    return WRONG_FLAG, message, f"did you mean {near}?" if near else "remove it"


def _add(given: VllmFlags, flag: CommandFlag, key: str, *, is_off: bool, version: VllmVersion) -> None:
    row = version.find(key)
    assert row is not None
    given.places[key] = flag.line, flag.name
    if is_off:
        given.settings[key] = False
        return
    keys = version.sections.get(key)
    if keys is not None:
        _add_section(given, flag, key, keys, version)
        return
    if not flag.values and not type_strings.fits(True, row.type):
        given.unknown.add(key)
        message, fix = f"{flag.name}: expected a value after it, found none", f"write {type_strings.in_words(row.type)}"
        given.findings.append(WRONG_TYPE.finding(message, fix, file=given.file, line=flag.line, key=key))
        return
    value = _human(flag, row) or typed(flag.values, "str" if row.type.split(" | ")[0] == "str" else row.type)
    is_json = isinstance(value, str) and value.startswith("{")
    if value is None or is_json or (value == "auto" and key in _AUTO):
        given.unknown.add(key)
    else:
        _set(given, flag, key, value, row, version)


def _set(given: VllmFlags, flag: CommandFlag, key: str, value: Any, row: Argument, version: VllmVersion) -> None:
    problem = value_problem(value, row, version)
    if problem is None:
        given.settings[key] = value
        return
    given.unknown.add(key)
    message = f"{flag.name}: {problem.message}"
    given.findings.append(problem.check.finding(message, problem.fix, file=given.file, line=flag.line, key=key))


_AUTO = ("max_model_len",)
"""Flags that take `auto`, which stands for the largest value that fits the memory."""


def _add_section(
    given: VllmFlags, flag: CommandFlag, key: str, keys: Mapping[str, Argument], version: VllmVersion
) -> None:
    """Add the keys of an argument that is given as one JSON object."""
    text = flag.values[0].value if flag.values else ""
    if text is None:
        given.unknown.add(key)
        return
    try:
        section = json.loads(text)
    except ValueError:
        section = None
    if not isinstance(section, dict):
        given.unknown.add(key)
        message = f"{flag.name}: expected a JSON object, found {short_repr(text)}"
        fix = f"write {flag.name} '{{\"{next(iter(keys))}\": ...}}'"
        given.findings.append(WRONG_TYPE.finding(message, fix, file=given.file, line=flag.line, key=key))
        return
    for name, value in section.items():
        path = f"{key}.{name}"
        given.places[path] = flag.line, flag.name
        row = keys.get(name)
        if row is not None:
            _set(given, flag, path, value, row, version)
            continue
        problem = absent_problem(path, value, version)
        message = f"{flag.name}: {problem.message}"
        given.findings.append(problem.check.finding(message, problem.fix, file=given.file, line=flag.line, key=path))


def _human(flag: CommandFlag, row: Argument) -> int | None:
    """Return a number with a unit, such as 32k (32,000) or 32K (32,768); None for anything else."""
    text = flag.values[0].value if len(flag.values) == 1 else None
    found = _HUMAN.fullmatch(text or "")
    if found is None or "int" not in type_strings.without_bounds(row.type).split(" | "):
        return None
    base = 1000 if found[2].islower() else 1024
    return int(float(found[1]) * base ** (_POWERS.index(found[2].lower()) + 1))
