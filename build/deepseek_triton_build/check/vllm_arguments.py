"""Check engine arguments of vLLM against the record of the version they are for."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from deepseek_triton_build.check import codes
from deepseek_triton_build.check.documents import Document, key_name
from deepseek_triton_build.check.schema import TRITON_SECTION, CheckedArguments, Problem, value_problem
from deepseek_triton_build.data.setting_types import BACKEND_SETTINGS
from deepseek_triton_build.data.spelling import flattened
from deepseek_triton_build.data.vllm import VLLM_VERSIONS, Argument, VllmVersion, load_vllm
from deepseek_triton_build.text import edit_instruction, nearest_name


def argument_problem(value: Any, row: Argument, version: VllmVersion) -> Problem | None:
    """Return what is wrong with the value of the argument `row`; None when it fits."""
    return value_problem(value, row.type, version.sections.get(row.name, ()))


def absent_problem(key: str, value: Any, version: VllmVersion) -> Problem:
    """Return what is wrong with an argument, or a key of one, that the version does not have.

    :param key: its dotted path.
    """
    if moved := version.moved_arguments.get(key):
        message = f"{key} is not an argument of vLLM {version.version}"
        why = f": {moved.why}" if moved.why else ""
        if moved.by is None:
            return Problem(codes.MOVED_KEY, message + why, "remove it")
        new_value = moved.new_value(value)
        fix = f"write {moved.by}" if new_value is None else edit_instruction({moved.by: new_value})
        return Problem(codes.MOVED_KEY, f"{message}, which has {moved.by} instead{why}", fix)
    section, _, name = key.rpartition(".")
    owner = f"a key of {section}" if section else "an argument"
    message = f"{name} is not {owner} of vLLM {version.version}; it would stop the load"
    near = nearest_name(name, version.sections[section] if section else version.arguments)
    elsewhere = next((other for other in VLLM_VERSIONS if load_vllm(other).find(key) is not None), None)
    fix = "remove it"
    if not section and name in BACKEND_SETTINGS:
        fix = f"indent it, so that it stands under {TRITON_SECTION}"
    elif elsewhere is not None:
        fix = f"vLLM {elsewhere} has it; remove it here, or use that version"
    elif near is not None:
        fix = f"did you mean {near}{f', under {section}' if section else ''}?"
    return Problem(codes.WRONG_KEY, message, fix)


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
    return walk.checked


@dataclass
class _Walk:
    document: Document
    version: VllmVersion
    checked: CheckedArguments = field(default_factory=CheckedArguments)

    def check(self, key: str, value: Any) -> None:
        row = self.version.find(key)
        if row is None:
            for path, below in self.parts(key, value):
                self.add(path, absent_problem(path, below, self.version))
                self.keep_meant(path, below)
        elif key in self.version.sections and isinstance(value, dict):
            self.checked.settings |= {} if value else {key: {}}
            for name, below in value.items():
                self.check(f"{key}.{key_name(name)}", below)
        elif problem := argument_problem(value, row, self.version):
            self.checked.unknown.add(key)
            self.add(key, problem)
        else:
            self.checked.settings[key] = value

    def keep_meant(self, key: str, value: Any) -> None:
        """Let an argument that was moved or is misspelled count as the one that is meant, so that nothing is told of
        that one's default."""
        section, _, name = key.rpartition(".")
        moved = self.version.moved_arguments.get(key)
        near = nearest_name(name, self.version.sections.get(section, ()) if section else self.version.arguments)
        meant = moved.by if moved is not None else near and f"{section}.{near}".lstrip(".")
        given = value if moved is None else moved.new_value(value)
        row = self.version.find(meant) if meant else None
        if meant and row is not None and given is not None and argument_problem(given, row, self.version) is None:
            for path, below in flattened({meant: given}).items():
                self.checked.settings.setdefault(path, below)

    def parts(self, key: str, value: Any) -> Iterator[tuple[str, Any]]:
        """Yield `key` and its value; for a section of TensorRT-LLM that vLLM has no successor of, the keys below it."""
        below: Mapping[str, Any] = {}
        if isinstance(value, dict) and key not in self.version.moved_arguments:
            below = {f"{key}.{key_name(name)}": entry for name, entry in value.items()}
        moved = {path: entry for path, entry in below.items() if path in self.version.moved_arguments}
        yield from moved.items() if moved else [(key, value)]

    def add(self, key: str, problem: Problem) -> None:
        self.checked.findings.append(self.document.finding(problem.code, key, problem.message, problem.fix))
