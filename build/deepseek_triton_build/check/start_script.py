"""start.sh as people edit it: does its supervisor find the server that it starts, with the ranks that the model has?

Nothing is said of a script that gives tritonserver's words in another way than in an array or a command.
"""

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from deepseek_triton_build.check import codes
from deepseek_triton_build.check.generated_origin import Stamp
from deepseek_triton_build.check.script_lines import Array, Place, arrays
from deepseek_triton_build.check.scripts import ShellScript
from deepseek_triton_build.data.finding import Code, Finding
from deepseek_triton_build.data.own_files import load_yaml
from deepseek_triton_build.render.stamp import unpacked_text
from deepseek_triton_build.text import nearest_name, short_repr

_SERVER, _LAUNCHER = "tritonserver", "trtllm-llmapi-launch"
# Option of both supervisor and server -> the default of both.
_SHARED: Mapping[str, str] = {
    "--http-port": "8000",
    "--grpc-port": "8001",
    "--metrics-port": "8002",
    "--http-address": "0.0.0.0",
}
_REPOSITORY = ("--model-repository", "--model-store")
_MODES = ("none", "poll", "explicit")
_LAUNCHERS = frozenset({"mpirun", "mpiexec", "srun"})
_RANKS = ("-n", "-np", "--np", "-c", "--ntasks")
# Options of the supervisor (deepseek_launcher/main.py): those with a number, and all.
_COUNTS = ("--ranks", "--ranks-per-node", "--max-restarts", "--ready-within", "--exit-timeout", "--health-every")
_OF_SUPERVISOR = ("--repository", "--hosts", "--restart", "--ready-file", "--with-parent", *_COUNTS, *_SHARED)
_KINDS = {
    "switches": (re.compile("true|false|on|off|[01]", re.IGNORECASE), "true or false"),
    "numbers": (re.compile(r"-?\d+"), "a whole number"),
}
_WITHOUT_VALUE = ("--help", "--disable-auto-complete-config")
_REFERENCE = re.compile(r"\$\{(\w+)\[[@*]\]\}")
_ASSIGNED = re.compile(r"""(?m)^[ \t]*(?:export[ \t]+)?(\w+)=("[^"\n]*"|'[^'\n]*'|[^\s"'();]*)""")
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?-([^}]*))?\})")
_STEP = re.compile(r"SLURM_STEP_NUM_TASKS:-\}\"? == (\d+)")
_NUMBER = re.compile(r"\d+(\.\d+)?")
_OVERLAY = "process/overlay"
_EXPORTS_PATH = re.compile(r"(?m)^[ \t]*export .*\bPYTHONPATH=(.*)")


class _Option(NamedTuple):
    name: str
    raw: str
    line: int


@dataclass(frozen=True)
class StartScript:
    script: ShellScript

    @cached_property
    def arrays(self) -> Sequence[Array]:
        return arrays(self.script.text)

    @cached_property
    def assigned(self) -> Mapping[str, Place]:
        """Variable -> the text that it gets first, and the line."""
        found: dict[str, Place] = {}
        for match in _ASSIGNED.finditer(self.script.text):
            line = self.script.text.count("\n", 0, match.start(1)) + 1
            found.setdefault(match[1], Place(match[2].strip("\"'"), line))
        return found

    def value(self, text: str) -> str:
        """Return what a word stands for, as far as the script alone decides it."""
        match = _VARIABLE.fullmatch(text)
        if match is None:
            return text
        name = match[1] or match[2]
        exported, assigned = self.script.known_values.get(name), self.assigned.get(name)
        if exported is not None:
            return exported
        if assigned is not None and f"${name}" not in assigned.word and f"{{{name}" not in assigned.word:
            return self.value(assigned.word)
        return text if match[3] is None else self.value(match[3])

    def expanded(self, words: Sequence[Place], depth: int = 3) -> list[Place]:
        """Return the words with those of the arrays that they name."""
        found: list[Place] = []
        for place in words:
            match = _REFERENCE.fullmatch(place.word)
            inner = [word for array in self.arrays if match and array.name == match[1] for word in array.words]
            found += self.expanded(inner, depth - 1) if inner and depth else [place]
        return found

    @cached_property
    def server(self) -> Sequence[Place]:
        """The words behind tritonserver; none where the script has them in no known way."""
        lists = [array.words for array in self.arrays]
        lists += [[Place(word.text, word.line) for word in command] for command in self.script.commands]
        for words in lists:
            for position, place in enumerate(words):
                if place.word.rpartition("/")[2] == _SERVER and len(words) > position + 1:
                    return self.expanded(words[position + 1 :])
        return ()

    @cached_property
    def supervisor(self) -> Mapping[str, _Option]:
        """The options of the supervisor by their names; none where the script has no array of them."""
        words = [place for array in self.arrays if array.name == "options" for place in array.words]
        return {option.name: option for option in _options(words)}

    @property
    def starts(self) -> Iterator[Sequence[str]]:
        """The words of each command that the script may end with."""
        for array in self.arrays:
            if array.name == "start":
                yield [place.word for place in self.expanded(array.words)]


def start_problems(
    script: ShellScript, repository: Path, generated: Container[str], *, num_ranks: int | None
) -> Iterator[Finding]:
    """Find what keeps start.sh from starting the model.

    :param repository: the folder that it is in.
    :param generated: the files that the folder was generated with, whose absence is another finding.
    :param num_ranks: the ranks of TensorRT-LLM that the model has; None where they are not to be counted.
    """
    start = StartScript(script)
    options = _options(start.server)
    problems = [*_server_problems(start, options), *_supervisor_problems(start, generated)]
    problems += [*_rank_problems(start, num_ranks), *_disagreements(start, options)]
    problems += _missing_files(start, options, repository, generated)
    for code, line, key, message, fix in problems:
        yield code.finding(message, fix, file=script.file, line=line, key=key)


def lost_exports(script: ShellScript, stamp: Stamp, path: str) -> Iterator[Finding]:
    """Find the variables that a script exported as it was generated, and no longer does.

    :param path: the script's path in the stamp.
    """
    original = (unpacked_text(stamp.values, path) or b"").decode()
    before, now = ShellScript(file=script.file, text=original), script.variables
    lost = {name: variable.line for name, variable in before.variables.items() if name not in now}
    if _has_overlay(original) and not _has_overlay(script.text):
        lost["PYTHONPATH"] = before.variables["PYTHONPATH"].line
    for name, line in lost.items():
        text = original.splitlines()[line - 1].strip()
        message = f"{name} is no longer exported as it was generated"
        yield codes.LOST_EXPORT.finding(message, f"write {text}", file=script.file, key=name)


def _has_overlay(text: str) -> bool:
    """Tell whether a script leaves the folder of the work-arounds in PYTHONPATH."""
    has_it = False
    for path in _EXPORTS_PATH.findall(text):
        has_it = _OVERLAY in path or (has_it and "PYTHONPATH" in path)
    return has_it


_Problem = tuple[Code, int | None, str, str, str]
"""Code, line, key, message and fix."""


def _options(words: Sequence[Place]) -> list[_Option]:
    """Return the options among `words`; a word that belongs to none is one without a name."""
    found: list[_Option] = []
    is_open = False
    for place in words:
        if place.word.startswith("--"):
            name, equals, value = place.word.partition("=")
            found.append(_Option(name, value, place.line))
            is_open = not equals and name not in _WITHOUT_VALUE
        elif is_open:
            found[-1] = found[-1]._replace(raw=place.word)
            is_open = False
        elif "$" not in place.word:
            found.append(_Option("", place.word, place.line))
    return found


@cache
def _kinds() -> Mapping[str, str]:
    """Option of tritonserver -> the list in tritonserver_flags.yaml that it is in."""
    return {f"--{name}": kind for kind, names in load_yaml("tritonserver_flags.yaml").items() for name in names.split()}


def _server_problems(start: StartScript, options: Sequence[_Option]) -> Iterator[_Problem]:
    """Find the options that tritonserver refuses or that do not do what they say."""
    kinds, seen = _kinds(), dict[str, _Option]()
    for option in options:
        name, value = option.name, start.value(option.raw)
        kind = kinds.get(name) or next((kinds[known] for known in kinds if name and known.startswith(name)), None)
        if kind is None:
            near = nearest_name(name, kinds) if name else None
            fix = f"did you mean {near}?" if near else "remove it"
            yield codes.WRONG_FLAG, option.line, name, f"{name or option.raw} is not an option of {_SERVER}", fix
            continue
        pattern, words = _KINDS.get(kind, (None, ""))
        if pattern is not None and "$" not in value and not pattern.fullmatch(value):
            message = f"{name}: expected {words}, found {short_repr(value)}"
            yield codes.BROKEN_START, option.line, name, message, f"write {words}"
        if name in seen and kind != "repeated" and name not in _SHARED:
            message = f"{name} overrules {name} of line {seen[name].line}, because the last one counts"
            yield codes.REPEATED_FLAG, option.line, name, message, "remove one of them"
        seen[name] = option
    yield from _mode_problems(start, seen)
    off = seen.get("--allow-http")
    if off is not None and start.value(off.raw).lower() in ("false", "off", "0"):
        message = "--allow-http is off, and the supervisor asks over HTTP whether the server is ready"
        yield codes.BROKEN_START, off.line, off.name, message, "remove it; HTTP_ADDRESS=127.0.0.1 hides it from others"


def _mode_problems(start: StartScript, seen: Mapping[str, _Option]) -> Iterator[_Problem]:
    mode, load = seen.get("--model-control-mode"), seen.get("--load-model")
    if mode is not None and "$" not in mode.raw and mode.raw not in _MODES:
        message = f"{mode.name}: expected {', '.join(_MODES)}, found {short_repr(mode.raw)}"
        yield codes.BROKEN_START, mode.line, mode.name, message, "write one of them, or leave it out"
    elif mode is not None and mode.raw == "explicit" and load is None:
        message = f"{mode.name} explicit loads no model, so that the server never becomes ready"
        yield codes.BROKEN_START, mode.line, mode.name, message, "add --load-model=NAME with the model's folder"
    elif load is not None and (mode is None or mode.raw in _MODES[:2]):
        message = "--load-model is refused without --model-control-mode=explicit"
        yield codes.BROKEN_START, load.line, load.name, message, "add --model-control-mode=explicit, or remove it"


def _supervisor_problems(start: StartScript, generated: Container[str]) -> Iterator[_Problem]:
    """Find what the supervisor refuses, and a script that runs nothing in the end."""
    for name, option in start.supervisor.items():
        value = start.value(option.raw)
        if name in _COUNTS and "$" not in value and not _NUMBER.fullmatch(value):
            message = f"{name}: expected a number, found {short_repr(value)}"
            yield codes.BROKEN_START, option.line, name, message, "write a number"
        if name and not any(known.startswith(name) for known in _OF_SUPERVISOR):
            near = nearest_name(name, _OF_SUPERVISOR)
            fix = f"did you mean {near}?" if near else "remove it; tritonserver's options stand under server"
            yield codes.WRONG_FLAG, option.line, name, f"{name} is not an option of supervise.py", fix
    first = [command[0].text for command in start.script.commands]
    is_ours = start.script.file in generated or any(array.name == "start" for array in start.arrays)
    if is_ours and not {"exec", "${start[@]}"}.intersection(first) and (start.arrays or not start.server):
        yield codes.BROKEN_START, None, "start", "the script runs nothing", 'end it with exec "${start[@]}"'


def _disagreements(start: StartScript, options: Sequence[_Option]) -> Iterator[_Problem]:
    """Find what the server gets and the supervisor doesn't, and ports that are one and the same."""
    server = {option.name: option for option in options}
    if not server or not start.supervisor:
        return
    uses: dict[str, str] = {}
    shared: dict[str, _Option] = {}
    for name, default in _SHARED.items():
        ours, theirs = server.get(name), start.supervisor.get(name)
        value = default if ours is None else start.value(ours.raw)
        asked = default if theirs is None else start.value(theirs.raw)
        line = next((option.line for option in (ours, theirs) if option is not None), None)
        alone = ours or theirs if ours is None or theirs is None else None
        if value == asked and alone is not None and "$" in alone.raw:
            shared[name] = alone
        elif value != asked:
            message = f"{_SERVER} gets {name} {value}, and the supervisor asks at {asked}"
            fix = f"give both the same; {name[2:].replace('-', '_').upper()} sets it for both"
            yield codes.BROKEN_START, line, name, message, fix
        elif name.endswith("-port") and value in uses:
            message = f"{name} and {uses[value]} are both {value}"
            origin = start.assigned.get(ours.raw.strip("${}")) if ours is not None else None
            place = line if origin is None else origin.line
            yield codes.BROKEN_START, place, name, message, "give each a port of its own"
        uses.setdefault(value, name)
    if shared:
        message = f"only one of {_SERVER} and the supervisor gets {', '.join(shared)}"
        line, fix = next(iter(shared.values())).line, "give them to both, or set no other port"
        yield codes.BROKEN_START, line, next(iter(shared)), message, fix
    served = [option for option in options if option.name in _REPOSITORY]
    watched = start.supervisor.get("--repository")
    if watched is None or any(start.value(option.raw) == start.value(watched.raw) for option in served):
        return
    where, line = (served[-1].raw, served[-1].line) if served else ("no model repository", start.server[0].line)
    message = f"{_SERVER} serves {where}, and the supervisor watches {watched.raw}"
    yield codes.BROKEN_START, line, _REPOSITORY[0], message, f'write {_REPOSITORY[0]} "{watched.raw}"'


def _missing_files(
    start: StartScript, options: Sequence[_Option], repository: Path, generated: Container[str]
) -> Iterator[_Problem]:
    """Find a supervisor, and models to be loaded, that are not in the repository."""
    for option in options:
        if option.name == "--load-model" and option.raw.isidentifier() and not (repository / option.raw).is_dir():
            message = f"{option.name} names {short_repr(option.raw)}, which is no folder of the repository"
            yield codes.BROKEN_START, option.line, option.name, message, "name the model's folder"
    supervise = start.assigned.get("supervise")
    below, is_below, path = ("", "", "") if supervise is None else supervise.word.partition("$repository/")
    is_known = is_below and not below and "$" not in path and path not in generated
    if supervise is not None and is_known and not (repository / path).is_file():
        message = f"the supervisor is not at {path}"
        yield codes.BROKEN_START, supervise.line, "supervise", message, "write where supervise.py lies"


def _rank_problems(start: StartScript, num_ranks: int | None) -> Iterator[_Problem]:
    """Compare the ranks that are started, and those that the supervisor counts, with the model's."""
    if num_ranks is None:
        return
    launchers = {array.name for array in start.arrays if any(place.word in _LAUNCHERS for place in array.words)}
    places = [pair for array in start.arrays if array.name in launchers for pair in pairwise(array.words)]
    given = {f"{one.word} {other.word}": (other.word, one.line) for one, other in places if one.word in _RANKS}
    if launchers and not given:
        message = f"mpirun gets no number of ranks, and the model has {num_ranks}"
        yield codes.BROKEN_START, None, "ranks", message, f"add -n {num_ranks} to ranks"
    counted = start.supervisor.get("--ranks")
    given |= {} if counted is None else {f"{counted.name} {counted.raw}": (counted.raw, counted.line)}
    for step in _STEP.finditer(start.script.text):
        line = start.script.text.count("\n", 0, step.start()) + 1
        given.setdefault(f"SLURM_STEP_NUM_TASKS == {step[1]}", (step[1], line))
    wrong = {text: line for text, (count, line) in given.items() if count.isdecimal() and int(count) != num_ranks}
    if wrong:
        message = f"{', '.join(wrong)}: the model has {num_ranks} ranks (tensor x pipeline parallelism)"
        yield codes.BROKEN_START, min(wrong.values()), "ranks", message, f"write {num_ranks} everywhere in the script"
    starts = list(start.starts)
    if not starts or num_ranks == 1:
        return
    if not any(_LAUNCHERS.intersection(words) for words in starts):
        message = f"no mpirun starts the {num_ranks} ranks of the model"
        yield codes.BROKEN_START, None, "start", message, 'write "${ranks[@]}" behind the supervisor\'s --'
    if not all(_LAUNCHER in words for words in starts):
        message = f"tritonserver is started without {_LAUNCHER}, so that the ranks never meet"
        yield codes.BROKEN_START, None, "start", message, f"write {_LAUNCHER} before " + '"${server[@]}"'
