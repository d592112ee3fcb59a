"""The arguments that a script gives by flags to a program of TensorRT-LLM, or to `vllm serve`."""

import json
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from deepseek_triton_build.check import codes
from deepseek_triton_build.check.documents import Document
from deepseek_triton_build.check.schema import Problem, value_problem
from deepseek_triton_build.check.scripts import CommandFlag, Program, ShellScript, typed
from deepseek_triton_build.check.shell_words import Word
from deepseek_triton_build.check.vllm_arguments import absent_problem, argument_problem, check_vllm_arguments
from deepseek_triton_build.data import spelling, type_strings
from deepseek_triton_build.data.finding import Code, Finding
from deepseek_triton_build.data.releases import load_release
from deepseek_triton_build.data.setting_types import bounded_type
from deepseek_triton_build.data.vllm import VLLM_VERSIONS, Argument, VllmVersion, load_vllm
from deepseek_triton_build.render.vllm_commands import WITHOUT_FLAG
from deepseek_triton_build.rules.rule import CANONICAL_RELEASE
from deepseek_triton_build.text import first_names, nearest_name, short_repr

YAML_FLAGS = ("--extra_llm_api_options", "--config")
"""Flags that name the YAML file; the second is the newer name (TensorRT-LLM trtllm_serve_cli.yaml@9e7f85f6)."""
# Flags that set no LLM argument that is recorded here.
_OTHER_FLAGS = (
    *YAML_FLAGS,
    *("--host", "--port", "--log_level", "--tool_parser", "--chat_template", "--model", "--model_path", "--model_dir"),
    *("--dataset", "--dataset_path", "--num_requests", "--concurrency", "--streaming", "--apply_chat_template"),
    *("--use_cuda_graph", "--use_one_model", "--prompt"),
)
_HUMAN = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT])")
_POWERS = "kmgt"
# `-O3`: a level of optimization.
_OPTIMIZATION = re.compile(r"-O[0-3]?")
# Flags that take `auto`, which stands for the largest value that fits the memory.
_AUTO = ("max_model_len",)


@dataclass(kw_only=True)
class ProgramFlags:
    """The arguments that the flags of a program give: of TensorRT-LLM under canonical keys, of vLLM as dotted paths."""

    file: str
    settings: dict[str, Any] = field(default_factory=dict)
    """Argument -> value."""
    places: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Argument -> the line and the name of its flag."""
    unknown: set[str] = field(default_factory=set)
    """Arguments whose values depend on more than the script, or are wrong."""
    unread: list[str] = field(default_factory=list)
    """Flags that are not recorded here."""
    unseen: list[str] = field(default_factory=list)
    """Flags that the script alone gives no value, and the lines where more flags may be, in words."""
    is_open: bool = False
    """Whether more flags may be given than can be seen."""
    findings: list[Finding] = field(default_factory=list)

    def place(self, key: str | None) -> tuple[str, int | None, str]:
        """Return file, line and flag of an argument; without a flag, no line."""
        line, flag = self.places.get(key or "", (None, key or ""))
        return self.file, line, flag

    def add(self, code: Code, message: str, fix: str, line: int, key: str | None = None) -> None:
        self.findings.append(code.finding(message, fix, file=self.file, line=line, key=key))

    def set(self, flag: CommandFlag, key: str, value: Any, problem: Problem | None = None) -> None:
        """Keep the value that a flag gives an argument, or report what is wrong with it. None: it can't be known. Of an
        argument that is given twice, the value is not judged: one of the two is meant."""
        if key in self.places:
            line, name = self.places[key]
            message = f"{flag.name} overrules {name} of line {line}, because the last one counts"
            self.add(codes.REPEATED_FLAG, message, "remove one of them", flag.line, key)
            if self.settings.get(key) != value:
                self.settings.pop(key, None)
                value = None
        self.places[key] = flag.line, flag.name
        if problem is not None:
            self.add(problem.code, f"{flag.name}: {problem.message}", problem.fix, flag.line, key)
        if any(not word.is_known for word in flag.values):
            self.unseen.append(f"{flag.name} (line {flag.line})")
        if problem is not None or value is None:
            self.unknown.add(key)
        else:
            self.settings[key] = value

    @classmethod
    def of(cls, script: ShellScript, program: Program) -> "ProgramFlags":
        """Return what can be said before any flag is read."""
        unseen = _more_flags(program.open_words) if program.hides_flags else []
        return cls(file=script.file, unseen=unseen, is_open=program.hides_flags)

    def settle(self, program: Program, keys: Iterable[str], sizes: Iterable[str], config: str = "") -> str:
        """Make `keys` unknown where the script does not say all that is given, and return what it leaves open.

        :param sizes: the arguments without which a script is meant to be started with more of them.
        :param config: the file that it passes, when nobody can look into it.
        """
        if program.open_words and not self.places.keys() & set(sizes) and not self.settings.keys() & set(sizes):
            self.is_open, self.unseen = True, _more_flags(program.open_words)
        if self.is_open or config:
            self.unknown |= set(keys) - self.settings.keys()
        return first_names({*self.unseen, *([config] if config else [])})

    def after_switch(self, flag: CommandFlag, spelled: str) -> CommandFlag:
        """Return a switch without the words behind it that may be other flags."""
        if spelled.startswith("bool") and any(word.is_open for word in flag.values):
            self.unseen += _more_flags(flag.values)
            self.is_open = True
            return replace(flag, values=())
        return flag


def _more_flags(words: Iterable[Word]) -> list[str]:
    return [f"more flags (line {word.line})" for word in words]


def read_flags(script: ShellScript, program: Program) -> ProgramFlags:
    """Return what the flags of `program`, one of TensorRT-LLM that `script` starts, set."""
    flags = ProgramFlags.of(script, program)
    for flag in program.flags:
        if flag.name in program.meanings:
            key, stands_for = program.meanings[flag.name]
            argument = load_release(CANONICAL_RELEASE).find_key(key)
            assert argument is not None  # a test compares the flags' keys with the record
            flag = flags.after_switch(flag, argument.type)
            value = stands_for if stands_for is not None else typed(flag.values, argument.type)
            problem = None if value is None else value_problem(value, bounded_type(key, argument.type))
            flags.set(flag, key, value, problem)
        elif flag.name not in _OTHER_FLAGS:
            if near := nearest_name(flag.name, [*program.meanings, *_OTHER_FLAGS], lacks_some=True):
                message = f"{flag.name} is not a flag of {program.name}"
                flags.add(codes.WRONG_FLAG, message, f"did you mean {near}?", flag.line)
                flags.unknown.add(program.meanings[near][0] if near in program.meanings else near)
            else:
                flags.unread.append(flag.name)
    return flags


def unused_flags(flags: ProgramFlags, document_keys: Mapping[Any, Any], settings: Mapping[str, Any], file: str) -> None:
    """Leave out the flags that the YAML file overrules, and add findings about those that say something else.

    :param document_keys: the content of the YAML file.
    :param settings: the LLM arguments in it, by canonical keys.
    :param file: its name.
    """
    for key in [*flags.settings, *flags.unknown]:
        section, dot, _ = key.partition(".")
        if key not in settings and not (dot and section in document_keys):
            continue
        value = flags.settings.pop(key, None)
        flags.unknown.discard(key)
        line, flag = flags.places[key]
        if key in settings and settings[key] == value:
            continue
        says = f"{key}: {short_repr(settings[key])}" if key in settings else f"the section {section}"
        message = f"{flag} has no effect, because {file} gives {says}"
        flags.add(codes.UNUSED_FLAG, message, f"remove {flag}, or write {key} into {file} alone", line, key)


def flag_keys() -> frozenset[str]:
    """Return the canonical keys that some program of TensorRT-LLM takes by flags."""
    programs = ("trtllm-serve", "trtllm-bench", "trtllm-eval")
    return frozenset(key for program in programs for key in spelling.keys_of_flags(program).values())


def read_vllm_flags(script: ShellScript, program: Program, version: VllmVersion) -> ProgramFlags:
    """Return what the flags of `program`, a `vllm serve` that `script` starts, set."""
    flags = ProgramFlags.of(script, program)
    for flag in program.flags:
        key, is_off = _argument(flag.name, version)
        row = version.find(key)
        if row is not None and key not in WITHOUT_FLAG:
            flag = flags.after_switch(flag, row.type)
            if is_off:
                flags.set(flag, key, False)
            elif key in version.sections:
                _set_section(flags, flag, key, version)
            else:
                _set_argument(flags, flag, key, row, version)
        elif _dashed(flag.name) not in version.serve_flags and not _OPTIMIZATION.fullmatch(flag.name):
            code, why, fix = _unknown(flag, key, version)
            flags.add(code, f"{flag.name} is not a flag of vllm serve {version.version}{why}", fix, flag.line)
    return flags


def add_config(flags: ProgramFlags, document: Document, version: VllmVersion) -> None:
    """Add the arguments in the YAML file of `--config`, which count where no flag gives them."""
    values = {str(key).replace("-", "_"): value for key, value in document.values.items()}
    lines = {key.replace("-", "_"): line for key, line in document.lines.items()}
    renamed = replace(document, values=values, lines=lines)
    others = tuple(key for key in values if f"--{key.replace('_', '-')}" in version.serve_flags)
    read = check_vllm_arguments(renamed, version, other_sections=others)
    flags.findings += read.findings
    flags.settings = read.settings | flags.settings
    flags.unknown |= read.unknown - flags.settings.keys()


def as_flag(argument: str, value: Any) -> str:
    """Return what to write as a flag for an argument; its value may not be known."""
    name, dot, key = argument.partition(".")
    name = f"--{name.replace('_', '-')}{dot}{key}"
    if value is False:
        return f"write --no-{name[2:]}"
    if value is None or value is True:
        return f"write {name}"
    return f"write {name} {shlex.quote(json.dumps(value)) if isinstance(value, dict | list) else value}"


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
    return flag.replace("_", "-").replace("--no-", "--", 1)


def _unknown(flag: CommandFlag, key: str, version: VllmVersion) -> tuple[Code, str, str]:
    """Return the code of a flag that vLLM doesn't have, why it has none, and the fix."""
    value = typed(flag.values, "Any") if flag.values else True
    moved = version.moved_arguments.get(key)
    if moved is not None:
        why = f": {moved.why}" if moved.why else ""
        if moved.by is None:
            return codes.MOVED_KEY, f": {moved.why}", "remove it"
        instead = as_flag(moved.by, True).removeprefix("write ")
        return codes.MOVED_KEY, f", which has {instead} instead{why}", as_flag(moved.by, moved.new_value(value))
    section, dot, _ = key.partition(".")
    if dot and section in version.sections:
        return codes.WRONG_FLAG, "", absent_problem(key, value, version).fix
    if key in WITHOUT_FLAG:
        return codes.WRONG_FLAG, "", f"remove it; vLLM has the argument {key}, but no flag for it"
    elsewhere = next((other for other in VLLM_VERSIONS if key in load_vllm(other).arguments), None)
    if elsewhere is not None:
        return codes.WRONG_FLAG, "", f"vLLM {elsewhere} has it; remove it here, or use that version"
    known = [*(f"--{name.replace('_', '-')}" for name in version.arguments), *version.serve_flags]
    near = nearest_name(_dashed(flag.name), known)
    return codes.WRONG_FLAG, "", f"did you mean {near}?" if near else "remove it"


def _set_argument(flags: ProgramFlags, flag: CommandFlag, key: str, row: Argument, version: VllmVersion) -> None:
    if not flag.values and not type_strings.fits(True, row.type):
        fix = f"write {type_strings.in_words(row.type)}"
        flags.set(flag, key, None, Problem(codes.WRONG_TYPE, "expected a value after it, found none", fix))
        return
    value = _human(flag, row) or typed(flag.values, "str" if row.type.split(" | ")[0] == "str" else row.type)
    # An argument with another kind of JSON is not looked into.
    is_json = isinstance(value, str) and value.startswith("{")
    if value is None or is_json or (value == "auto" and key in _AUTO):
        flags.set(flag, key, None)
    else:
        flags.set(flag, key, value, argument_problem(value, row, version))


def _set_section(flags: ProgramFlags, flag: CommandFlag, key: str, version: VllmVersion) -> None:
    """Set the keys of an argument that is given as one JSON object."""
    keys, text = version.sections[key], flag.values[0].value if flag.values else ""
    if text is None:
        flags.set(flag, key, None)
        return
    try:
        section = json.loads(text)
    except ValueError:
        section = None
    if not isinstance(section, dict):
        fix = f"write {flag.name} '{{\"{next(iter(keys))}\": ...}}'"
        message = f"expected a JSON object, found {short_repr(text)}"
        flags.set(flag, key, None, Problem(codes.WRONG_TYPE, message, fix))
        return
    flags.places[key] = flag.line, flag.name
    for name, value in section.items():
        path = f"{key}.{name}"
        if name in keys:
            flags.set(flag, path, value, argument_problem(value, keys[name], version))
        else:
            problem = absent_problem(path, value, version)
            flags.add(problem.code, f"{flag.name}: {problem.message}", problem.fix, flag.line, path)


def _human(flag: CommandFlag, row: Argument) -> int | None:
    """Return a number with a unit, such as 32k (32,000) or 32K (32,768); None for anything else."""
    text = flag.values[0].value if len(flag.values) == 1 else None
    found = _HUMAN.fullmatch(text or "")
    if found is None or "int" not in type_strings.without_bounds(row.type).split(" | "):
        return None
    base = 1000 if found[2].islower() else 1024
    return int(float(found[1]) * base ** (_POWERS.index(found[2].lower()) + 1))
