"""Shell scripts: the variables that they export, and the program that they start with its flags. Nothing is run."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from deepseek_triton_build.check import codes
from deepseek_triton_build.check.documents import Document, read_text
from deepseek_triton_build.check.script_lines import TOKEN, mended_lines, unquoted
from deepseek_triton_build.data import spelling
from deepseek_triton_build.data.known_variables import NEAR, known_variables, nearest_variable
from deepseek_triton_build.data.vllm import VllmVersion
from deepseek_triton_build.render import trtllm_commands
from deepseek_triton_build.rules.finding import Finding
from deepseek_triton_build.text import edit_instruction, nearest_name, parse_yaml, printable_line, short_repr

START_SCRIPT = "start.sh"
PROGRAM_SCRIPTS = ("serve.sh", "bench.sh", "eval.sh", "quickstart.sh")
"""The scripts of the other formats, each of which starts one program of TensorRT-LLM or of vLLM."""
QUICKSTART = "quickstart_advanced.py"
_PROGRAMS = ("trtllm-serve", "trtllm-bench", "trtllm-eval")
VLLM, VLLM_BENCH = "vllm", "vllm bench"
# The module that `python3 -m` runs instead of `vllm serve`.
_VLLM_MODULE = "vllm.entrypoints.openai.api_server"
# Flags that name the checkpoint, the one that counts first.
_MODEL_FLAGS = ("--model_path", "--model_dir", "--model")
# The beginning of what is a flag's value and not another flag: `-1` is one.
_VALUE = re.compile(r"[^-]|$|-\d")
_SHORT_FLAG = re.compile(r"-[a-zA-Z]+(\.[\w.]+)?(=.*)?", re.DOTALL)
_ASSIGNMENT = re.compile(r"(\w+)=(.*)", re.DOTALL)
_DEFAULT = re.compile(r"\$\{\w+:?-(.*)\}", re.DOTALL)
_BASH_LINE = re.compile(r"line (\d+): (.*)")
_MOST_SECONDS = 10


@dataclass(frozen=True)
class Word:
    """One word of a command, without its quotes."""

    text: str
    line: int

    @property
    def value(self) -> str | None:
        """The text, or the default in "${NAME:-default}"; None when it depends on more than the script."""
        default = _DEFAULT.fullmatch(self.text)
        text = default[1] if default else self.text
        return None if "$" in text or "`" in text else text


@dataclass(frozen=True, kw_only=True)
class Variable:
    """A variable that a script exports."""

    value: str | None
    """None when it depends on more than the script."""
    line: int


@dataclass(frozen=True, kw_only=True)
class CommandFlag:
    """A flag of a command, as the script has it."""

    name: str
    values: tuple[Word, ...]
    line: int


@dataclass(frozen=True, kw_only=True)
class ShellScript:
    file: str
    text: str

    @cached_property
    def commands(self) -> Sequence[Sequence[Word]]:
        """The words of each command."""
        # Expansions with quotes inside quotes are not followed, which no script needs for its variables and flags.
        commands: list[list[Word]] = [[]]
        line, read = 1, 0
        for token in TOKEN.finditer(self.text):
            line += self.text.count("\n", read, token.start())
            read = token.start()
            if token["word"]:
                commands[-1].append(Word(unquoted(token[0]), line))
            elif token["end"]:
                commands.append([])
        return [command for command in commands if command]

    @cached_property
    def variables(self) -> Mapping[str, Variable]:
        """The variables that the script exports, or gives to a command."""
        found: dict[str, Variable] = {}
        for command in self.commands:
            assigned = [match for word in command if (match := _ASSIGNMENT.fullmatch(word.text)) is not None]
            # `NAME=value program` gives the variable to that program alone; `NAME=value` by itself to none.
            leading = len(assigned) < len(command) and _ASSIGNMENT.fullmatch(command[0].text) is not None
            if not leading and command[0].text not in ("export", "env"):
                continue  # an assignment alone, which no program sees, or none at all
            for word in command:
                if (match := _ASSIGNMENT.fullmatch(word.text)) is not None:
                    found.setdefault(match[1], Variable(value=Word(match[2], word.line).value, line=word.line))
        return found

    @property
    def known_values(self) -> dict[str, str]:
        """The exported variables whose values the script alone decides."""
        return {name: variable.value for name, variable in self.variables.items() if variable.value is not None}

    @cached_property
    def program(self) -> Program | None:
        """The program of TensorRT-LLM or of vLLM that the script starts; None when it starts none.

        It is the last one that is named: the lines above may look for it, or print a command for the user.
        """
        for command in reversed(self.commands):
            for position, word in enumerate(command):
                name = word.text.rpartition("/")[2]
                words = [Word(self._assigned.get(word.text, word.text), word.line) for word in command[position + 1 :]]
                if name in _PROGRAMS or name in (QUICKSTART, "$quickstart"):
                    return Program(name=name if name in _PROGRAMS else QUICKSTART, words=words)
                verb = words[0].text if name == VLLM and words else ""
                if name == _VLLM_MODULE or verb in ("serve", "bench"):
                    return Program(name=VLLM_BENCH if verb == "bench" else VLLM, words=words)
        return None

    @cached_property
    def _assigned(self) -> Mapping[str, str]:
        """$NAME -> the text that the script gives it first."""
        found: dict[str, str] = {}
        for command in self.commands:
            if len(command) == 1 and (match := _ASSIGNMENT.fullmatch(command[0].text)) is not None:
                found.setdefault(f"${match[1]}", match[2])
        return found


@dataclass(frozen=True, kw_only=True)
class Program:
    """A command that starts a program of TensorRT-LLM or of vLLM."""

    name: str
    words: Sequence[Word]
    """The words after the program."""

    @cached_property
    def flags(self) -> Sequence[CommandFlag]:
        found: list[CommandFlag] = []
        for word in self.words:
            if word.text.startswith("--") or (self.name == VLLM and _SHORT_FLAG.fullmatch(word.text)):
                name, equals, value = word.text.partition("=")
                found.append(CommandFlag(name=name, values=(Word(value, word.line),) if equals else (), line=word.line))
            elif found and _VALUE.match(word.text) and word.text != "$@" and "[@]" not in word.text:
                last = found[-1]
                found[-1] = CommandFlag(name=last.name, values=(*last.values, word), line=last.line)
        return found

    @cached_property
    def meanings(self) -> Mapping[str, tuple[str, Any]]:
        """Flag -> the key that it sets, and the value that it stands for; None where the value follows the flag."""
        if self.name == QUICKSTART:
            return trtllm_commands.flag_meanings()
        return {flag: (key, None) for flag, key in spelling.keys_of_flags(self.name).items()}

    @property
    def model(self) -> str | None:
        """The checkpoint that the program is started with."""
        given = {flag.name: flag.values[0].value for flag in self.flags if flag.values}
        named = next((given[name] for name in _MODEL_FLAGS if name in given), None)
        first = next((word for word in self.words if word.text != "serve"), None)
        is_positional = self.name in ("trtllm-serve", VLLM)
        if named is None and is_positional and first is not None and not first.text.startswith("-"):
            return first.value
        return named


def read_script(path: Path, file: str) -> tuple[ShellScript | None, list[Finding]]:
    """Return the script, and what is wrong with its file or its syntax."""
    text = read_text(path, file)
    if isinstance(text, Finding):
        return None, [text]
    text, findings = mended_lines(text, file)
    return ShellScript(file=file, text=text), findings + _syntax_problems(text, file)


def typed(words: Sequence[Word], spelled: str) -> Any:
    """Return the value that a flag's words stand for, as YAML would read it; None when it can't be known.

    :param spelled: the type of the key that the flag sets.
    """
    values = [word.value for word in words]
    if not values:
        return True
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    if spelled.startswith("str"):
        return known[0]
    read = [parse_yaml(value) if re.fullmatch(r"[\w.+-]+", value) else value for value in known]
    return read if spelled.startswith("list[") else read[0]


def _syntax_problems(text: str, file: str) -> list[Finding]:
    """Have bash read the script without running it. Where there is no bash, nothing is said."""
    import shutil  # these two take a twentieth of a whole check to import, and most folders have one script
    import subprocess

    bash = shutil.which("bash")
    if bash is None:
        return []
    try:
        read = subprocess.run(
            [bash, "-n"], input=text.encode(), capture_output=True, timeout=_MOST_SECONDS, env={"LC_ALL": "C"}
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    found = _BASH_LINE.search(read.stderr.decode(errors="replace"))
    if read.returncode == 0 or found is None:
        return []
    message = f"bash can't read it: {printable_line(found[2])}"
    fix = "correct it; the cause may be a quote that is not closed, some lines before"
    return [codes.BROKEN_SCRIPT.finding(message, fix, file=file, line=int(found[1]))]


_OVERRIDES = "env_overrides"
_OF_TENSORRT_LLM = ("TRTLLM_", "TLLM_")


def env_overrides(document: Document | None) -> Mapping[str, Variable]:
    """Return the variables that the engine sets itself, by its argument env_overrides, which makes each value text."""
    values = document.values.get(_OVERRIDES) if document is not None else None
    return {
        name: Variable(value=str(value), line=(document and document.line(f"{_OVERRIDES}.{name}")) or 1)
        for name, value in (values.items() if isinstance(values, dict) else ())
        if isinstance(name, str)
    }


def variable_problems(variables: Mapping[str, Variable], file: str) -> Iterator[Finding]:
    """Find the exported variables that are misspelled, and those with a value that the engine does not understand."""
    known = known_variables()
    for name, variable in variables.items():
        if name not in known:
            if near := nearest_variable(name):
                message = f"{name} is not a variable that the engine is known to read"
                fix = f"did you mean {near}?"
                yield codes.MISSPELLED_VARIABLE.finding(message, fix, file=file, line=variable.line, key=name)
            continue
        pattern, words = known[name]
        if variable.value and not re.fullmatch(pattern, variable.value, re.IGNORECASE | re.DOTALL):
            message = f"{name}: expected {words}, found {short_repr(variable.value)}"
            fix = f"write {words}, or remove the variable"
            yield codes.WRONG_VARIABLE.finding(message, fix, file=file, line=variable.line, key=name)


def vllm_variable_problems(
    script: ShellScript, version: VllmVersion, write: Callable[[str, Any], str]
) -> Iterator[Finding]:
    """Find the exported variables that vLLM would read if it were another version, and those of TensorRT-LLM.

    :param write: returns what to write for an argument and its value, where the script's engine takes its arguments.
    """
    for name, variable in script.variables.items():
        replaced = version.replaced_environment.get(name)
        code, message = codes.OBSOLETE_VARIABLE, f"vLLM {version.version} does not read it"
        if name.startswith(_OF_TENSORRT_LLM):
            message, fix = "vLLM does not read TensorRT-LLM's variables", "remove it"
        elif not name.startswith("VLLM_") or name in version.environment:
            continue
        elif replaced is not None and replaced.by is not None:
            message += f"; the argument {replaced.by} took its place"
            value = None if variable.value is None else replaced.new_value(variable.value)
            fix = f"{write(replaced.by, value)}, and remove the variable"
        elif replaced is not None:
            message, fix = f"{message}: {replaced.why}", "remove it"
        elif near := nearest_name(name, version.environment, likeness=NEAR):
            code, fix = codes.MISSPELLED_VARIABLE, f"did you mean {near}?"
        else:
            fix = "remove it, or use a version of vLLM that reads it"
        yield code.finding(f"{name}: {message}", fix, file=script.file, line=variable.line, key=name)


def as_setting(document: Document, argument: str, value: Any) -> str:
    """Return what to write into the document for an argument; its value may not be known."""
    written = f"write {argument}" if value is None else edit_instruction({argument: value})
    return f"in {document.file}: {written}"
