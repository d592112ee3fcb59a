"""Check engine arguments of vLLM against the record of the version they are for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from deepseek_triton_build.check.documents import Document, key_name
from deepseek_triton_build.check.finding import (
    MOVED_KEY,
    NOT_A_SECTION,
    OUT_OF_RANGE,
    WRONG_CHOICE,
    WRONG_KEY,
    WRONG_NULL,
    WRONG_TYPE,
)
from deepseek_triton_build.check.schema import TRITON_SECTION, CheckedArguments, expected_but_found, fix_of_type
from deepseek_triton_build.data import type_strings
from deepseek_triton_build.data.setting_types import BACKEND_SETTINGS
from deepseek_triton_build.data.vllm import VLLM_VERSIONS, Argument, Replacement, VllmVersion, load_vllm
from deepseek_triton_build.rules.finding import Code
from deepseek_triton_build.rules.vllm_deployment import MTP_METHODS
from deepseek_triton_build.text import edit_instruction, first_names, nearest_name, short_repr

_MOST_CHOICES = 8


@dataclass(frozen=True, kw_only=True)
class ArgumentProblem:
    """One fault of an argument, wherever it is given."""

    check: Code
    message: str
    fix: str


def num_draft_tokens(settings: Mapping[str, Any]) -> int:
    """Return how many tokens the checkpoint's own MTP layer drafts."""
    is_mtp = settings.get("speculative_config.method") in MTP_METHODS
    return settings.get("speculative_config.num_speculative_tokens") or 1 if is_mtp else 0


def value_problem(value: Any, row: Argument, version: VllmVersion) -> ArgumentProblem | None:
    """Return what is wrong with the value of the argument `row`; None when it fits."""
    if type_strings.fits(value, row.type):
        return None
    message = expected_but_found(row.type, value)
    if value is None:
        return ArgumentProblem(check=WRONG_NULL, message=message, fix="write a value, or leave the key out")
    keys = version.sections.get(row.name)
    if keys is not None:
        message = f"expected a section with its keys below it, found {short_repr(value)}"
        return ArgumentProblem(
            check=NOT_A_SECTION, message=message, fix=f"write its keys below it: {first_names(keys, most=4)}"
        )
    if isinstance(value, str) and row.choices:
        near = nearest_name(value, row.choices)
        message = f"expected one of {first_names(row.choices, most=_MOST_CHOICES)}, found {short_repr(value)}"
        fix = f"did you mean {near}?" if near else f"write {type_strings.in_words(row.type)}"
        return ArgumentProblem(check=WRONG_CHOICE, message=message, fix=fix)
    is_bounded = type_strings.fits(value, type_strings.without_bounds(row.type))
    fix = f"write {type_strings.in_words(row.type)}" if is_bounded else fix_of_type(row.type, value)
    return ArgumentProblem(check=OUT_OF_RANGE if is_bounded else WRONG_TYPE, message=message, fix=fix)


def absent_problem(key: str, value: Any, version: VllmVersion) -> ArgumentProblem:
    """Return what is wrong with an argument, or a key of one, that the version does not have.

    :param key: its dotted path.
    """
    moved = version.moved_arguments.get(key)
    if moved is not None:
        return _moved(key, value, moved, version)
    section, _, name = key.rpartition(".")
    owner = f"a key of {section}" if section else "an argument"
    message = f"{name} is not {owner} of vLLM {version.version}; it would stop the load"
    if not section and name in BACKEND_SETTINGS:
        return ArgumentProblem(
            check=WRONG_KEY, message=message, fix=f"indent it, so that it stands under {TRITON_SECTION}"
        )
    known = version.sections[section] if section else version.arguments
    near = nearest_name(name, known)
    elsewhere = next((other for other in VLLM_VERSIONS if load_vllm(other).find(key) is not None), None)
    if elsewhere is not None:
        fix = f"vLLM {elsewhere} has it; remove it here, or use that version"
    elif near is not None:
        fix = f"did you mean {near}{f', under {section}' if section else ''}?"
    else:
        fix = "remove it"
    return ArgumentProblem(check=WRONG_KEY, message=message, fix=fix)


def _moved(key: str, value: Any, moved: Replacement, version: VllmVersion) -> ArgumentProblem:
    owner, why = f"vLLM {version.version}", f": {moved.why}" if moved.why else ""
    if moved.by is None:
        message = f"{key} is not an argument of {owner}{why}"
        return ArgumentProblem(check=MOVED_KEY, message=message, fix="remove it")
    new_value = moved.new_value(value)
    fix = f"write {moved.by}" if new_value is None else edit_instruction({moved.by: new_value})
    message = f"{key} is not an argument of {owner}, which has {moved.by} instead{why}"
    return ArgumentProblem(check=MOVED_KEY, message=message, fix=fix)


def check_vllm_arguments(
    document: Document, version: VllmVersion, *, other_sections: tuple[str, ...] = ()
) -> CheckedArguments:
    """Check the keys and values of `document`.

    :param other_sections: top-level keys that are not the engine's.
    """
    walk = _Walk(document, version)
    for key, value in document.values.items():
        if key_name(key) not in other_sections:
            walk.check(key_name(key), value)
    return walk.found


@dataclass
class _Walk:
    document: Document
    version: VllmVersion
    found: CheckedArguments = field(default_factory=CheckedArguments)

    def check(self, key: str, value: Any) -> None:
        row = self.version.find(key)
        if row is None:
            for path, below in self.parts(key, value):
                self.add(path, absent_problem(path, below, self.version))
        elif key in self.version.sections and isinstance(value, dict):
            self.found.settings |= {} if value else {key: {}}
            for name, below in value.items():
                self.check(f"{key}.{key_name(name)}", below)
        elif problem := value_problem(value, row, self.version):
            self.found.unknown.add(key)
            self.add(key, problem)
        else:
            self.found.settings[key] = value

    def parts(self, key: str, value: Any) -> Iterator[tuple[str, Any]]:
        """Yield `key` and its value; for a section of TensorRT-LLM that vLLM has no successor of, the keys below it."""
        below: Mapping[str, Any] = {}
        if isinstance(value, dict) and key not in self.version.moved_arguments:
            below = {f"{key}.{key_name(name)}": entry for name, entry in value.items()}
        moved = {path: entry for path, entry in below.items() if path in self.version.moved_arguments}
        yield from moved.items() if moved else [(key, value)]

    def add(self, key: str, problem: ArgumentProblem) -> None:
        self.found.findings.append(self.document.finding(problem.check, key, problem.message, problem.fix))
