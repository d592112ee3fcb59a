"""Shell scripts: the variables that they export, and the program that they start with its flags. Nothing is run."""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from deepseek_triton_build.check import codes
from deepseek_triton_build.check.documents import Document, read_text
from deepseek_triton_build.check.script_lines import TOKEN, mended_lines, unquoted
from deepseek_triton_build.check.shell import MOST_STATES, STARTING_NOTHING, Command, read_commands
from deepseek_triton_build.check.shell_words import State, Variable, Word, Written, base_name
from deepseek_triton_build.data import spelling
from deepseek_triton_build.data.finding import Finding
from deepseek_triton_build.data.known_variables import known_variables, nearest_variable
from deepseek_triton_build.data.vllm import VllmVersion
from deepseek_triton_build.render import trtllm_commands
from deepseek_triton_build.text import edit_instruction, nearest_name, parse_yaml, printable_line, short_repr

START_SCRIPT = "start.sh"
PROGRAM_SCRIPTS = ("serve.sh", "bench.sh", "eval.sh", "quickstart.sh")
"""The scripts of the other formats, each of which starts one program of TensorRT-LLM or of vLLM."""
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
SCRIPT_SUFFIXES = (".sh", ".bash", ".sbatch", ".slurm")
QUICKSTART = "quickstart_advanced.py"
_PROGRAMS = ("trtllm-serve", "trtllm-bench", "trtllm-eval")
VLLM, VLLM_BENCH = "vllm", "vllm bench"
# The module that `python3 -m` runs instead of `vllm serve`.
_VLLM_MODULE, _VLLM_CLI = "vllm.entrypoints.openai.api_server", "vllm.entrypoints.cli.main"
# Flags that name the checkpoint, the one that counts first.
_MODEL_FLAGS = ("--model_path", "--model_dir", "--model")
# Flags of trtllm-serve that not every release has, so that `build` writes none (commands/serve.py@00209af1).
_NEWER_FLAGS = {
    "--enable_chunked_prefill": "enable_chunked_prefill",
    **dict.fromkeys(("--cluster_size", "--moe_cluster_parallel_size"), "moe_cluster_parallel_size"),
    **dict.fromkeys(("--cp_size", "--context_parallel_size"), "context_parallel_size"),
}
# Arguments of programs of TensorRT-LLM that do not start an engine of their own.
_OTHER_VERBS = ("disaggregated", "disaggregated_mpi_worker", "mm_embedding_serve", "prepare-dataset", "prepare_dataset")
_MODULES = {f"tensorrt_llm.commands.{name.partition('-')[2]}": name for name in _PROGRAMS}
# Options whose value is a name, which may be that of a program.
_NAMING = ("--name", "--job-name", "-J", "--container-name", "--hostname", "--network", "-t", "--tag")
# An image whose entry point is `vllm serve`, and the options that give a container's variables.
_VLLM_IMAGE = re.compile(r"(?:[\w.:-]+[/#])*vllm-openai(?:[:@].*)?")
_CONTAINER_VARIABLE = ("-e", "--env", "-x")
_IMAGE = re.compile(r"(?:[\w.:-]+[/#])?[\w./-]*?(tensorrt-llm/release|tritonserver|vllm-openai):v?([\w.-]+)")
# What the script itself is started with, which is nothing unless the user says more.
_OWN_ARGUMENTS = ("$@", "${@}", "$*")
# The beginning of what is a flag's value and not another flag: `-1` is one.
_VALUE = re.compile(r"[^-]|$|-\d")
_SHORT_FLAG = re.compile(r"-[a-zA-Z]+(\.[\w.]+)?(=.*)?", re.DOTALL)
_ASSIGNMENT = re.compile(r"(\w+)=(.*)", re.DOTALL)
_BASH_LINE = re.compile(r"line (\d+): (.*)")
_BATCH_OPTION = re.compile(r"^#SBATCH[ \t]+(.*)$", re.MULTILINE)
_MOST_SECONDS = 10


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
    folder: Path | None = None
    """Where the files lie that it reads commands from, and the scripts that may start it."""
    started: tuple[str, ...] = ()
    """The scripts for which it was asked how they are started."""

    @cached_property
    def commands(self) -> Sequence[Sequence[Word]]:
        """The words of each command, which are not expanded."""
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
    def _started(self) -> tuple[Sequence[Command], Mapping[str, Variable]]:
        # start.sh is long, and only its variables are asked for.
        states = [state for caller, state in self.starts]
        return read_commands(self.text, self.folder, 1 if self.file == START_SCRIPT else MOST_STATES, states)

    @cached_property
    def starts(self) -> "Sequence[tuple[ShellScript, State]]":
        """The scripts beside it that start it, and in which states."""
        name = Path(self.file).name
        found: list[tuple[ShellScript, State]] = []
        for path in sorted(self.folder.glob("*")) if self.folder is not None and name != START_SCRIPT else ():
            is_other = path.suffix in SCRIPT_SUFFIXES and path.name not in (name, START_SCRIPT, *self.started)
            text = read_text(path, path.name) if is_other and os.path.isfile(path) else ""
            if isinstance(text, str) and name in text:
                caller = replace(self, file=path.name, text=text, started=(*self.started, name))
                found += [(caller, state) for one in caller.started_commands if (state := one.start_of(name))]
        return found

    @property
    def callers(self) -> set[str]:
        return {name for caller, _ in self.starts for name in (caller.file, *caller.callers)}

    @property
    def started_commands(self) -> Sequence[Command]:
        return self._started[0]

    @property
    def variables(self) -> Mapping[str, Variable]:
        """The variables that the script exports, or gives to a command."""
        return self._started[1]

    @property
    def known_values(self) -> dict[str, str]:
        """The exported variables whose values the script alone decides."""
        return {name: variable.value for name, variable in self.variables.items() if variable.value is not None}

    @property
    def batch_options(self) -> Sequence[str]:
        """The options that a batch script gives to Slurm: its own, and those of a script that starts it."""
        lines: list[Sequence[str]] = [line.partition(" #")[0].split() for line in _BATCH_OPTION.findall(self.text)]
        for caller, state in self.starts:
            is_submitted = [base_name(word.text) for word in state.before[:1]] == ["sbatch"]
            lines = [[word.text for word in state.before], *lines] if is_submitted else [*lines, caller.batch_options]
        return [option for options in lines for option in options]

    @cached_property
    def programs(self) -> "Sequence[Program]":
        """The programs of TensorRT-LLM and of vLLM that the script may start, in order.

        One that different branches start in other ways stands here once.
        """
        found: dict[object, Program] = {}
        for number, command in enumerate(self.started_commands):
            program = _program(command, number)
            if program is None:
                continue
            earlier = found.setdefault((program.name, tuple(program.words), program.visible_gpus), program)
            if earlier is not program:
                earlier.starts.extend(program.starts)
                earlier.numbers.extend(program.numbers)
        return list(found.values())

    @property
    def program(self) -> "Program | None":
        """The last of the programs; None when it starts none."""
        return self.programs[-1] if self.programs else None


@dataclass(frozen=True, kw_only=True)
class Program:
    """A command that starts a program of TensorRT-LLM or of vLLM."""

    name: str
    line: int
    words: Sequence[Word]
    """The words after the program."""
    starts: list[tuple[Word, ...]]
    """The words before it, of the commands that start it too; one of each branch."""
    environment: Mapping[str, Variable]
    files: Mapping[str, Written]
    numbers: list[int]
    """The numbers of these commands among the script's."""
    beside: frozenset[int]
    """The numbers of commands that may still run when it is started."""

    @property
    def visible_gpus(self) -> Variable | None:
        return self.environment.get(VISIBLE_GPUS)

    @property
    def gpus_shown(self) -> tuple[str, Variable | None]:
        """The name of CUDA_VISIBLE_DEVICES, or of docker's option with a number or a list of GPUs, and its value."""
        for before, word in pairwise((Word("", 0), *self.starts[0])):
            option, _, text = (
                word.text.partition("=") if word.text.startswith("--gpus=") else (before.text, "", word.text)
            )
            numbers = text.strip("\"'").removeprefix("device=")
            if (
                option == "--gpus"
                and self.visible_gpus is None
                and re.fullmatch(r"\d[\d,]*", numbers)
                and word.is_known
            ):
                is_count = "device" not in text
                listed = (
                    ",".join(map(str, range(min(int(numbers), 64)))) if is_count and numbers.isdecimal() else numbers
                )
                return option, Variable(value=listed, line=word.line)
        return VISIBLE_GPUS, self.visible_gpus

    @property
    def is_engine(self) -> bool:
        """Whether it runs a model by itself."""
        return self.name != VLLM_BENCH and not any(word.text in _OTHER_VERBS for word in self.words)

    @property
    def image(self) -> tuple[str, str] | None:
        """The container that it is started in, and the tag of its image, where a script names one that is known."""
        return image_among([word.text for start in self.starts for word in start])

    @cached_property
    def flags(self) -> Sequence[CommandFlag]:
        return self._read[0]

    @property
    def open_words(self) -> Sequence[Word]:
        """The words that may stand for flags which nobody can see."""
        return self._read[1]

    @property
    def hides_flags(self) -> bool:
        """Whether the script gives it more flags than it says."""
        return any(word.text not in _OWN_ARGUMENTS for word in self.open_words)

    def flag(self, *names: str) -> Word | None:
        """Return the first value of a flag of one of these names."""
        return next((flag.values[0] for flag in self.flags if flag.name in names and flag.values), None)

    @cached_property
    def _read(self) -> tuple[list[CommandFlag], list[Word]]:
        found: list[CommandFlag] = []
        unseen: list[Word] = []
        for word in self.words:
            last = found[-1] if found else None
            is_flag = word.text.startswith("--") or (self.name == VLLM and _SHORT_FLAG.fullmatch(word.text))
            is_list = word.is_open and ("@" in word.text or "[*]" in word.text)
            if word.text.startswith("--$") or is_list or (word.is_open and (last is None or last.values)):
                unseen.append(word)
            elif is_flag:
                name, equals, value = word.text.partition("=")
                values = (replace(word, text=value),) if equals else ()
                found.append(CommandFlag(name=name, values=values, line=word.line))
            elif last is not None and _VALUE.match(word.text):
                found[-1] = replace(last, values=(*last.values, word))
        return found, unseen

    @cached_property
    def meanings(self) -> Mapping[str, tuple[str, Any]]:
        """Flag -> the key that it sets, and the value that it stands for; None where the value follows the flag."""
        if self.name == QUICKSTART:
            return trtllm_commands.flag_meanings()
        keys = spelling.keys_of_flags(self.name) | (_NEWER_FLAGS if self.name == _PROGRAMS[0] else {})
        return {flag: (key, None) for flag, key in keys.items()}

    @property
    def model(self) -> str | None:
        """The checkpoint that the program is started with."""
        given = {flag.name: flag.values[0].value for flag in self.flags if flag.values}
        named = next((given[name] for name in _MODEL_FLAGS if name in given), None)
        first = self.words[0] if self.words else None
        is_positional = self.name in ("trtllm-serve", VLLM)
        if named is None and is_positional and first is not None and not first.text.startswith("-"):
            return first.value
        return named


def image_among(words: Sequence[str]) -> tuple[str, str] | None:
    """Return the container and the tag of the first image among the words, where it is one that is known."""
    found = (_IMAGE.fullmatch(word.rpartition("=")[2]) for word in words)
    return next(((match[1], match[2]) for match in found if match is not None), None)


def _program(command: Command, number: int) -> Program | None:
    """Return the program of TensorRT-LLM or of vLLM that a command starts."""
    words = command.words
    if base_name(words[0].text) in STARTING_NOTHING:
        return None
    for position, word in enumerate(words):
        rest = words[position + 1 :]
        name = _program_name(word.text, rest, words[position - 1].text if position else "")
        if name is None:
            continue
        start = (*command.before, *words[: position + 1])
        given = [match for before, word in pairwise(start) if (match := _container_variable(before.text, word))]
        environment = {**command.environment, **dict(given)}
        if any(base_name(one.text) in ("xargs", "parallel") for one in start):
            rest = (*rest, Word("what xargs adds", word.line, is_known=False, is_open=True))
        is_verb = bool(rest) and rest[0].text == "serve" and name in (VLLM, "trtllm-serve")
        return Program(
            name=name,
            line=word.line,
            words=rest[1:] if is_verb else rest,
            starts=[start],
            environment=environment,
            files=command.files,
            numbers=[number],
            beside=command.beside,
        )
    return None


def _program_name(text: str, rest: Sequence[Word], before: str) -> str | None:
    """Return the program that a word of a command names; None when it names none."""
    name, verb = base_name(text), rest[0].text if rest else ""
    if before in _NAMING or base_name(verb) in ("bash", "sh", *_PROGRAMS, VLLM, "python3", "python"):
        return None
    if name in _PROGRAMS or name in _MODULES:
        return _MODULES.get(name, name)
    if name in (QUICKSTART, "$quickstart"):
        return QUICKSTART
    if name in (VLLM, _VLLM_CLI) and verb in ("serve", "bench"):
        return VLLM_BENCH if verb == "bench" else VLLM
    return VLLM if name == _VLLM_MODULE or (_VLLM_IMAGE.fullmatch(text) and rest) else None


def _container_variable(option: str, word: Word) -> tuple[str, Variable] | None:
    """Return the variable that an option of docker or mpirun gives to what is started."""
    text = word.text if option in _CONTAINER_VARIABLE else ""
    if word.text.startswith("--env="):
        text = word.text.removeprefix("--env=")
    match = _ASSIGNMENT.fullmatch(text)
    if match is None:
        return None
    return match[1], Variable(value=match[2] if word.is_known else None, line=word.line)


def read_script(path: Path, file: str) -> tuple[ShellScript | None, list[Finding]]:
    """Return the script, and what is wrong with its file or its syntax."""
    text = read_text(path, file)
    if isinstance(text, Finding):
        return None, [text]
    text, findings = mended_lines(text, file)
    return ShellScript(file=file, text=text, folder=path.parent), findings + _syntax_problems(text, file)


def served_model(path: Path) -> str | None:
    """Return the checkpoint that a script serves; None where it names none, or one that only a run of it knows."""
    script, _ = read_script(path, path.name)
    programs = script.programs if script is not None else ()
    return next((program.model for program in programs if program.is_engine), None)


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
        elif near := nearest_name(name, version.environment, lacks_some=True):
            code, fix = codes.MISSPELLED_VARIABLE, f"did you mean {near}?"
        else:
            fix = "remove it, or use a version of vLLM that reads it"
        yield code.finding(f"{name}: {message}", fix, file=script.file, line=variable.line, key=name)


def as_setting(document: Document, argument: str, value: Any) -> str:
    """Return what to write into the document for an argument; its value may not be known."""
    written = f"write {argument}" if value is None else edit_instruction({argument: value})
    return f"in {document.file}: {written}"
