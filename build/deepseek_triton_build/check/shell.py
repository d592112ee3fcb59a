"""What a shell script would start, as far as it says so: its commands with every word expanded. Nothing is run.

Each branch whose condition is not decided by the script alone is followed, in a state of its own.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path

from deepseek_triton_build.check.documents import read_text
from deepseek_triton_build.check.shell_syntax import END, UNKNOWN, Body, Node, Raw, Redirect, end_of, parse

# A default, as of ${NAME:-8}: known, but the environment may say something else.
_DEFAULT = "\ue002"
# In front of what may become any number of words.
_OPEN = "\ue003"
_MARKS = str.maketrans("", "", UNKNOWN + END + _DEFAULT + _OPEN)
_ONE_UNKNOWN = re.compile(f"{_OPEN}?{UNKNOWN}[^{END}]*{END}")
_FIELD = re.compile(rf"(?:{_OPEN}?{UNKNOWN}[^{END}]*{END}|\S)+")
_ASSIGNMENT = re.compile(r"(\w+)(\[[^]]*\])?(\+?)=(.*)", re.DOTALL)
_TABLE_ROW = re.compile(r"\[(.*?)\]=(.*)", re.DOTALL)
_PARAMETER = re.compile(r"(#?)(\w+|[@*#?$!-])(\[[^]]*\])?(.*)", re.DOTALL)
_NAME = re.compile(r"\$(\w+|[@*#?$!-])")
_SAME_VARIABLE = re.compile(r'"?\$\{?(\w+)(?::?-[^}]*)?\}?"?')
_RANGE = re.compile(r"(?<!\$)\{(?:(-?\d{1,6})\.\.(-?\d{1,6})|([^{}\s\"'$]*,[^{}\s\"'$]*))\}")
_COUNTING = re.compile(r"\s*(\w+)\s*(\+\+|--|[-+*]?=(?!=))(.*)", re.DOTALL)
_SUM = re.compile(r"[\d\s()+*/%<>=!-]{1,200}")
_ORDERS = {f"-{name}": getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
_HINT = re.compile(r"trtllm-|tensorrt_llm|vllm|tritonserver|quickstart_advanced")
_SHELLS = ("bash", "sh", "dash", "zsh", "ssh", "srun", "docker", "podman", "kubectl", "oc")
# Commands that name a program without starting it.
STARTING_NOTHING = (
    *("echo", "printf", "trap", "command", "which", "type", "hash", "alias", "cat", "tee", "logger", "log", "info"),
    *("pgrep", "pkill", "killall", "kill", "grep", "egrep", "sed", "awk", "pip", "pip3", "apt", "apt-get", "die"),
    "chmod",
    *("curl", "wget", "git", "mkdir", "ls", "rm", "cp"),
)
_DECLARING = ("export", "declare", "typeset", "local", "readonly")
MOST_STATES, _MOST_ROUNDS, _MOST_LEVELS, _MOST_NODES = 8, 64, 12, 20_000


@dataclass(frozen=True)
class Word:
    """One word of a command, without its quotes. What depends on more than the script stays as it is written."""

    text: str
    line: int
    is_known: bool = True
    is_open: bool = False
    """Whether it may stand for any number of words."""

    @property
    def value(self) -> str | None:
        """The text; None when it depends on more than the script."""
        return self.text if self.is_known else None


@dataclass(frozen=True, kw_only=True)
class Variable:
    """A variable that a script exports."""

    value: str | None
    """None when it depends on more than the script."""
    line: int


@dataclass(frozen=True)
class Written:
    """A file that the script writes. What depends on more than the script stands in it between UNKNOWN and END."""

    text: str
    line: int


@dataclass(frozen=True)
class Command:
    words: tuple[Word, ...]
    before: tuple[Word, ...]
    """The words of the commands that it is an argument of, such as `srun bash -c`."""
    environment: Mapping[str, Variable]
    files: Mapping[str, Written]
    """Those that the script has written, by their names without folders."""
    beside: frozenset[int] = frozenset()
    """The numbers, among the script's commands, of those in the background that were started before."""


_Text = tuple[str, int]


@dataclass
class _State:
    """Where a run of the script stands."""

    variables: dict[str, tuple[_Text, ...]] = field(default_factory=dict)
    exported: dict[str, int] = field(default_factory=dict)
    """Name -> line."""
    arguments: tuple[_Text, ...] | None = None
    """None: the script's own, which nobody knows."""
    files: dict[str, Written] = field(default_factory=dict)
    decisions: dict[tuple[str, ...], bool] = field(default_factory=dict)
    before: tuple[Word, ...] = ()
    in_background: bool = False
    started: frozenset[int] = frozenset()
    """The numbers of the commands that were started in the background."""
    ended: str = ""
    """`exit`, `return` or `break`, when what follows is not run."""
    status: bool | None = True
    """Whether the last command succeeded."""
    is_likely: bool = False
    """Whether the status holds for an empty environment alone."""
    is_test: bool = False
    """Whether the last command was a test, so that another status is as good."""
    tested: tuple[str, ...] = ()
    output: str = ""
    input: str = ""
    input_line: int = 0

    def copy(self, **changes: object) -> _State:
        own = {name: dict(getattr(self, name)) for name in ("variables", "exported", "files", "decisions")}
        return replace(self, **{**own, **changes})  # type: ignore[arg-type]

    def after(self, status: bool | None, *, is_test: bool = False, is_likely: bool = False) -> list[_State]:
        self.status, self.is_test, self.is_likely = status, is_test, is_likely
        return [self]


def read_commands(
    text: str, folder: Path | None = None, most_states: int = MOST_STATES
) -> tuple[Sequence[Command], Mapping[str, Variable]]:
    """Return the commands that a script would start, and the variables that it exports or gives to a command.

    :param folder: where the files lie that the script reads commands from, with `source`.
    :param most_states: how many ways through the script are told apart.
    """
    run = _Run(folder, most_states)
    body = parse(text.translate(_MARKS))
    states = run.body(body, [_State()])
    # A function that nobody calls is one for the user, who names it as an argument.
    for name in [name for name in run.functions if name not in run.called]:
        run.body(run.functions[name], [(states or [_State()])[0].copy(arguments=None, ended="")])
    return run.commands, run.variables


class _Run:
    """One walk over a script."""

    def __init__(self, folder: Path | None, most_states: int) -> None:
        self.folder, self.most_states, self.level = folder, most_states, 0
        self.commands: list[Command] = []
        self.variables: dict[str, Variable] = {}
        self.functions: dict[str, Body] = {}
        self.called: set[str] = set()
        self.numbers: dict[object, int] = {}
        self.num_nodes = 0

    def body(self, body: Body, states: list[_State]) -> list[_State]:
        self.level += 1
        for node in body if self.level <= _MOST_LEVELS * 4 else ():
            self.num_nodes += len(states)
            if self.num_nodes > _MOST_NODES:
                break
            states = [new for state in states for new in ([state] if state.ended else self.node(node, state))]
            states = _fewer([state for state in states if state.ended != "exit"], self.most_states)
        self.level -= 1
        return states

    def node(self, node: Node, state: _State) -> list[_State]:
        kinds: Mapping[str, Callable[[Node, _State], list[_State]]] = {
            "simple": self.simple,
            "[[": self.test,
            "((": self.arithmetic,
            "{": self.group,
            "(": self.subshell,
            "&": self.subshell,
            "|": self.pipe,
            "!": self.negated,
            "&&": self.chain,
            "||": self.chain,
            "if": lambda node, state: self.branches(node.bodies, state),
            "while": self.loop,
            "until": self.loop,
            "for": self.loop_over,
            "case": self.choice,
            "function": self.define,
        }
        return kinds[node.kind](node, state)

    # Compound commands

    def group(self, node: Node, state: _State) -> list[_State]:
        if not node.redirects:
            return self.body(node.bodies[0], [state])
        output, state.output = state.output, ""
        states = self.body(node.bodies[0], [state])
        for after in states:
            text, after.output = after.output, output
            self.redirect(node.redirects, after, text)
        return states

    def subshell(self, node: Node, state: _State) -> list[_State]:
        for after in self.body(node.bodies[0], [state.copy(in_background=state.in_background or node.kind == "&")]):
            state.output, state.files, state.started = after.output, after.files, after.started
        return state.after(None)

    def pipe(self, node: Node, state: _State) -> list[_State]:
        text = state.input
        for part in node.bodies:
            after = (self.body(part, [state.copy(input=text, output="")]) or [state])[0]
            text, state.files, state.started = after.output, after.files, after.started
        state.output += text
        return state.after(None)

    def negated(self, node: Node, state: _State) -> list[_State]:
        states = self.body(node.bodies[0], [state])
        for after in states:
            after.status = None if after.status is None else not after.status
        return states

    def define(self, node: Node, state: _State) -> list[_State]:
        self.functions[node.words[0].text] = node.bodies[0]
        return state.after(True)

    def branches(self, bodies: tuple[Body, ...], state: _State) -> list[_State]:
        if len(bodies) < 2:
            return self.body(bodies[0], [state]) if bodies else state.after(True)
        condition, body, *others = bodies
        result: list[_State] = []
        for after in self.body(condition, [state]):
            yes, no = _split(after, condition, has_else=bool(others))
            result += [] if yes is None else self.body(body, [yes])
            result += [] if no is None else self.branches(tuple(others), no)
        return result

    def chain(self, node: Node, state: _State) -> list[_State]:
        first, second = node.bodies
        result: list[_State] = []
        for after in self.body(first, [state]):
            if after.ended:
                result.append(after)
                continue
            if after.status is None and not after.is_test:  # a program counts as one that succeeds
                if node.kind == "||":
                    self.body(second, [after.copy()])
                    result.append(after)
                else:
                    result += self.body(second, [after])
                continue
            yes, no = _split(after, first, has_else=False, on_success=node.kind == "&&")
            runs, rests = (yes, no) if node.kind == "&&" else (no, yes)
            result += [] if runs is None else self.body(second, [runs])
            result += [] if rests is None else rests.after(node.kind == "||")
        return result

    def loop(self, node: Node, state: _State) -> list[_State]:
        condition, body = node.bodies
        states = [state]
        for _ in range(_MOST_ROUNDS):
            before = [dict(state.variables) for state in states]
            states = self.body(condition, states)
            if any(state.status is None or state.is_likely for state in states):
                # Words that the user may give, or a wait: by itself the script does not go through it.
                kept = [state.copy() for state in states if state.is_test or state.is_likely]
                states = self.body(body, states)
                states = kept or states
                break
            if all(state.status == (node.kind == "until") for state in states):
                break
            states = self.body(body, states)
            if [state.variables for state in states] == before:
                break
        return self.left(states, "break")

    def loop_over(self, node: Node, state: _State) -> list[_State]:
        name = node.words[0].text
        values = [(text, raw.line) for raw in node.words[1:] for text in self.fields(raw, state)]
        if any(_OPEN in text for text, _ in values):
            values = [(_unknown(f"${name}"), 0)]
        states = [state]
        for value in values[:_MOST_ROUNDS]:
            for after in states:
                after.variables[name] = (value,)
            states = self.left(self.body(node.bodies[0], states), "continue")
        return self.left(states, "break")

    @staticmethod
    def left(states: list[_State], *reasons: str) -> list[_State]:
        for state in states:
            state.ended = "" if state.ended in (*reasons, "continue") else state.ended
        return states

    def choice(self, node: Node, state: _State) -> list[_State]:
        text = self.text(node.words[0], state)
        is_sure = UNKNOWN not in text and _DEFAULT not in text
        name = _SAME_VARIABLE.fullmatch(node.words[0].text)
        result: list[_State] = []
        for (arm,), *_ in ((body,) for body in node.bodies):
            patterns = [self.text(pattern, state) for pattern in arm.words]
            if is_sure and not any(fnmatchcase(text, pattern) for pattern in patterns):
                continue
            start = state if is_sure else state.copy()
            if name and not is_sure and not re.search(r"[*?\[]", patterns[0]):
                start.variables[name[1]] = ((patterns[0], arm.words[0].line),)
            result += self.body(arm.bodies[0], [start])
            if is_sure:
                return result
        return result or state.after(True)

    def test(self, node: Node, state: _State) -> list[_State]:
        return self.decided([self.text(word, state) for word in node.words], state)

    def decided(self, tokens: Sequence[str], state: _State) -> list[_State]:
        state.tested = tuple(tokens)
        status, is_likely = _decide(list(tokens), state)
        return state.after(state.decisions.get(state.tested, status), is_test=True, is_likely=is_likely)

    def arithmetic(self, node: Node, state: _State) -> list[_State]:
        value = self.number(node.words[0].text, state)
        state.tested = (node.words[0].text,)
        is_known = value is not None and _DEFAULT not in value
        return state.after(value != "0" if is_known else None, is_test=True)

    # Simple commands

    def simple(self, node: Node, state: _State) -> list[_State]:
        given: dict[str, Variable] = {}
        raws = list(node.words)
        while raws and (match := _ASSIGNMENT.fullmatch(raws[0].text)) is not None:
            if all(_ASSIGNMENT.fullmatch(raw.text) for raw in raws):
                self.assign(match, raws[0].line, state)
            else:
                given[match[1]] = _variable(self.text(Raw(match[4], 0), state), raws[0].line)
            raws.pop(0)
        if not raws:
            self.redirect(node.redirects, state, "")
            return state.after(True)
        if raws[0].text in _DECLARING:
            return self.declare(raws, state)
        words = [(text, raw.line) for raw in raws for text in self.fields(raw, state)]
        if not words:
            return state.after(None)
        for redirect in node.redirects:
            if redirect.operator == "<<":
                text = (
                    redirect.target.text if redirect.is_literal else self.text(redirect.target, state, in_quotes=True)
                )
                given_input = (text, redirect.target.line)
            elif redirect.operator == "<<<":
                given_input = (self.text(redirect.target, state), redirect.target.line)
            else:
                continue
            state.input, state.input_line = given_input
        output = state.output
        state.output = ""
        states = self.command(words, given, state)
        for after in states:
            text, after.output = after.output, output
            self.redirect(node.redirects, after, text)
            after.input = state.input if after is not state else ""
        return states

    def command(self, words: list[_Text], given: dict[str, Variable], state: _State) -> list[_State]:
        """Run a command with all its words."""
        name = words[0][0].translate(_MARKS)
        values = [text for text, _ in words[1:]]
        if name in self.functions:
            self.called.add(name)
            return self.call(self.functions[name], tuple(words[1:]), state)
        if name in ("exit", "return", "break", "continue"):
            state.ended = name
        elif name in ("[", "test"):
            return self.decided(values[:-1] if name == "[" else values, state)
        elif name in ("true", ":", "false"):
            return state.after(name != "false")
        elif name == "wait":
            state.started = frozenset()
        elif name == "set" and "--" in values:
            state.arguments = tuple(words[values.index("--") + 2 :])
        elif name == "shift":
            state.arguments = (state.arguments or ())[1:] if state.arguments is not None else None
        elif name == "unset":
            for text in values:
                state.variables.pop(text, None)
                state.exported.pop(text, None)
        elif name in ("read", "mapfile", "readarray", "getopts") or (name == "printf" and values[:1] == ["-v"]):
            names = [text for text in (*values, "OPTARG") if re.fullmatch(r"[A-Za-z_]\w*", text)]
            state.variables |= {text: ((_unknown(f"${text}"), 0),) for text in names}
            return state.after(None, is_likely=name == "getopts")
        elif name == "eval":
            return self.nested(" ".join(values), words[0][1], state)
        elif name in ("source", ".") and values:
            script = self.script(values[0], state)
            return state.after(None) if script is None else self.nested(script, words[0][1], state, is_elsewhere=True)
        else:
            self.start(words, given, state)
            state.output += _output(name, values, state.input)
            if name == "tee":
                state.files |= {base_name(text): Written(state.input, state.input_line) for text in values}
            state.ended = "exit" if name == "exec" else ""
        return state.after(None)

    def call(self, body: Body, arguments: tuple[_Text, ...], state: _State) -> list[_State]:
        own, state.arguments = state.arguments, arguments
        states = self.body(body, [state]) if self.level < _MOST_LEVELS else [state]
        for after in states:
            after.arguments, after.ended = own, ""
        return states

    def nested(self, text: str, line: int, state: _State, *, is_elsewhere: bool = False) -> list[_State]:
        """Run a text that a command takes for a script."""
        self.level += 3
        body = parse(text, line, is_elsewhere=is_elsewhere) if self.level < _MOST_LEVELS else ()
        states = self.body(body, [state])
        self.level -= 3
        return states

    def script(self, name: str, state: _State) -> str | None:
        """Return the text of a script that is written before, or lies beside; None when there is none."""
        name = base_name(name)
        if name in state.files:
            return state.files[name].text
        path = self.folder / name if self.folder is not None and name else None
        text = read_text(path, name) if path is not None and path.is_file() else None
        return text if isinstance(text, str) else None

    def start(self, words: list[_Text], given: dict[str, Variable], state: _State) -> None:
        """Keep a command, and run the scripts among its words."""
        command = [_word(text, line) for text, line in words]
        exported = {name: line for name, line in state.exported.items() if name in state.variables}
        environment = {name: _variable(_joined(state.variables[name]), line) for name, line in exported.items()}
        for text, line in words[1:] if command[0].text == "env" else ():
            if (match := _ASSIGNMENT.fullmatch(text)) is not None:
                given[match[1]] = _variable(match[4], line)
        self.variables = {**given, **self.variables}
        environment |= given
        key = (tuple(command), state.before, state.in_background, tuple(environment.items()))
        number = self.numbers.setdefault(key, len(self.commands))
        started, state.started = state.started, state.started | ({number} if state.in_background else set())
        if number < len(self.commands):
            return
        files = dict(state.files)
        self.commands.append(Command(tuple(command), state.before, environment, files, beside=started))
        if base_name(command[0].text) not in STARTING_NOTHING:
            self.run_scripts(words, command, given, state)

    def run_scripts(self, words: list[_Text], command: list[Word], given: dict[str, Variable], state: _State) -> None:
        """Run the texts among a command's words, and its input, that are scripts by themselves."""
        for position, (text, line) in enumerate(words):
            file = state.files.get(base_name(text)) if text.endswith(".sh") else None
            if file is None and not (re.search(r"\s", text) and _HINT.search(text)):
                continue
            child = state.copy(before=(*state.before, *command[:position]), output="", ended="")
            child.arguments = tuple(words[position + (1 if file else 2) :])
            self.give(given, child)
            for after in self.nested(*((file.text, file.line) if file else (text, line)), child):
                state.started |= after.started
        if state.input and any(base_name(word.text) in _SHELLS for word in command) and _HINT.search(state.input):
            child = state.copy(before=(*state.before, *command), output="", input="", ended="")
            self.give(given, child)
            self.nested(state.input, state.input_line, child)

    @staticmethod
    def give(given: Mapping[str, Variable], state: _State) -> None:
        for name, variable in given.items():
            text = variable.value if variable.value is not None else _unknown(f"${name}")
            state.variables[name], state.exported[name] = ((text, variable.line),), variable.line

    def redirect(self, redirects: tuple[Redirect, ...], state: _State, output: str) -> None:
        """Put what a command has written where it goes."""
        files = [r for r in redirects if r.operator in (">", ">>", ">|", "&>")]
        for redirect in files:
            name = base_name(self.text(redirect.target, state))
            earlier = state.files.get(name) if redirect.operator == ">>" else None
            line = earlier.line if earlier else state.input_line or redirect.target.line
            state.files[name] = Written((earlier.text if earlier else "") + output, line)
        if not files:
            state.output += output
        state.input_line = 0

    def declare(self, raws: list[Raw], state: _State) -> list[_State]:
        exports = raws[0].text == "export" or any(raw.text == "-x" for raw in raws)
        for raw in raws[1:]:
            match = _ASSIGNMENT.fullmatch(raw.text)
            name = match[1] if match else raw.text
            if match is not None:
                self.assign(match, raw.line, state)
            if exports and name in state.variables:
                state.exported[name] = raw.line
                self.variables.setdefault(name, _variable(_joined(state.variables[name]), raw.line))
        return state.after(True)

    def assign(self, match: re.Match[str], line: int, state: _State) -> None:
        name, index, plus, text = match.groups()
        before = state.variables.get(name, ()) if plus else ()
        if text.startswith("(") and text.endswith(")"):
            raws = [raw for node in parse(text[1:-1].replace("\n", " \\\n"), line) for raw in node.words]
            values = [(value, raw.line) for raw in raws for value in self.fields(raw, state)]
            table = {row[1]: (row[2], at) for value, at in values if (row := _TABLE_ROW.fullmatch(value))}
            state.variables |= {f"{name}[{key}]": (value,) for key, value in table.items()}
            state.variables[name] = (*before, *(table.values() or values))
        elif index:
            key = self.text(Raw(index[1:-1], 0), state)
            state.variables[f"{name}[{key}]"] = ((self.text(Raw(text, line), state), line),)
        else:
            value = _joined(before[:1]) + self.text(Raw(text, line), state)
            state.variables[name] = ((value, line), *before[1:])
        if name in state.exported and name not in self.variables:
            self.variables[name] = _variable(_joined(state.variables[name]), line)

    # Words

    def text(self, raw: Raw, state: _State, *, in_quotes: bool = False) -> str:
        """Return a word that is not split, or a text as if it stood in double quotes."""
        return "".join(" ".join(values) for values, _ in self.pieces(raw, state, in_quotes)).replace(_OPEN, "")

    def fields(self, raw: Raw, state: _State) -> list[str]:
        """Return the words that a word becomes."""
        if (found := _RANGE.search(raw.text)) and not re.search(r"['\"]", raw.text):
            if found[3] is None:
                first, last = int(found[1]), int(found[2])
                step = 1 if last >= first else -1
                alternatives = [str(value) for value in range(first, last + step, step)][:_MOST_ROUNDS]
            else:
                alternatives = found[3].split(",")
            texts = [raw.text[: found.start()] + value + raw.text[found.end() :] for value in alternatives]
            return [value for text in texts for value in self.fields(Raw(text, raw.line), state)]
        result: list[str] = []
        is_joined = False
        for values, is_split in self.pieces(raw, state, False):
            parts = values
            if is_split:
                text = " ".join(values)
                parts = [part for part in _FIELD.findall(text) if part != _DEFAULT]
                is_joined = is_joined and not text[:1].isspace()
                parts = [f"{_OPEN}{part}" if _ONE_UNKNOWN.fullmatch(part) else part for part in parts]
            if is_joined and parts:
                result[-1] += parts[0]
                parts = parts[1:]
            result += parts
            is_joined = bool(result) and not (is_split and " ".join(values)[-1:].isspace())
        return result

    def pieces(self, raw: Raw, state: _State, in_quotes: bool) -> Iterator[tuple[list[str], bool]]:
        """Yield the parts of a word: what each becomes, and whether it is split at blanks."""
        text, position = raw.text, 0
        while position < len(text):
            start = position
            name = _NAME.match(text, start)
            special = "\\$`" + UNKNOWN if in_quotes else "\\$`'\"<>" + UNKNOWN
            if text[start] not in special:
                position = next((at for at in range(start, len(text)) if text[at] in special), len(text))
                yield [text[start:position]], False
                continue
            position = name.end() if name else end_of(text, start)
            chunk = text[start:position]
            if chunk[0] == UNKNOWN:
                yield [chunk], not in_quotes
            elif chunk[0] == "\\":
                keeps = in_quotes and chunk[1:] not in ("$", "`", '"', "\\", "\n")
                yield [chunk if keeps else chunk[1:].replace("\n", "")], False
            elif chunk[0] == "'" or (chunk[:2] == "$'" and not in_quotes):
                inside = chunk[chunk.index("'") + 1 : -1]
                yield [inside if chunk[0] == "'" else inside.replace("\\n", "\n").replace("\\'", "'")], False
            elif chunk[0] == '"':
                inner = list(self.pieces(Raw(chunk[1:-1], raw.line), state, True))
                whole = "".join(" ".join(values) for values, _ in inner).replace(_OPEN, "")
                yield inner[0][0] if len(inner) == 1 else [whole], False
            elif chunk[0] in "<>":
                yield [chunk if len(chunk) == 1 else _unknown(chunk)], False
            else:
                values, is_list = self.expansion(chunk, raw.line, state, in_quotes=in_quotes)
                if in_quotes and not is_list:
                    values = [" ".join(values).replace(_OPEN, "")]
                yield values, not in_quotes

    def expansion(self, chunk: str, line: int, state: _State, *, in_quotes: bool) -> tuple[list[str], bool]:
        """Return what an expansion becomes, and whether it stays several words between quotes."""
        if chunk.startswith("$((") and chunk.endswith("))"):
            value = self.number(chunk[3:-2], state)
            return [_unknown(chunk) if value is None else value], False
        if chunk.startswith(("$(", "`")):
            return [self.output_of(chunk.lstrip("$`(")[:-1], chunk, line, state)], False
        body = chunk[2:-1] if chunk.startswith("${") else chunk[1:]
        return self.parameter(body, chunk, state, in_quotes=in_quotes) if body else (["$"], False)

    def output_of(self, text: str, chunk: str, line: int, state: _State) -> str:
        if text.strip().startswith("<"):
            return _unknown(chunk)
        states = self.nested(text, line, state.copy(output="", ended=""))
        outputs = {after.output.rstrip("\n") for after in states}
        text = outputs.pop() if len(outputs) == 1 else _NO_OUTPUT
        return _unknown(chunk) if _NO_OUTPUT in text else text

    def values(self, name: str, state: _State) -> tuple[_Text, ...] | None:
        """Return the values of a parameter; None when the script does not give it."""
        if name in ("@", "*"):
            return state.arguments
        if name == "#":
            return None if state.arguments is None else ((str(len(state.arguments)), 0),)
        if name.isdigit():
            at = int(name) - 1
            if state.arguments is None or at < 0:
                return None
            return state.arguments[at : at + 1] or (("", 0),)
        return state.variables.get(name)

    def parameter(self, body: str, chunk: str, state: _State, *, in_quotes: bool) -> tuple[list[str], bool]:
        match = _PARAMETER.fullmatch(body)
        if body.endswith("[@]") and body.startswith("!"):
            return [str(index) for index, _ in enumerate(state.variables.get(body[1:-3], ()))], True
        if match is None:
            return [_unknown(chunk)], False
        counts, name, index, operation = match.groups()
        key = self.text(Raw(index[1:-1], 0), state) if index else ""
        found = state.variables.get(f"{name}[{key}]", self.values(name, state))
        is_list = name == "@" or index == "[@]" or (not in_quotes and (name == "*" or index == "[*]"))
        whole = is_list or name == "*" or index == "[*]"
        values = None if found is None else [text for text, _ in found]
        if values is not None and index and not whole and f"{name}[{key}]" not in state.variables:
            at = self.number(index[1:-1], state)
            values = values[int(at) :][:1] if at is not None and int(at) >= 0 else [_unknown(chunk)]
        elif values is not None and not whole:
            values = values[:1]
        if counts:
            is_known = values is not None and not any(UNKNOWN in value for value in values)
            counted: Sequence[object] = values or () if whole or name == "#" else (values or [""])[0].translate(_MARKS)
            return [str(len(counted)) if is_known else _unknown(chunk)], False
        if operation:
            return self.operation(operation, name, values, chunk, state, is_list=is_list)
        if values is None:
            return [(_OPEN if is_list else "") + _unknown(chunk)], is_list
        return values, is_list

    def operation(
        self, operation: str, name: str, values: list[str] | None, chunk: str, state: _State, *, is_list: bool
    ) -> tuple[list[str], bool]:
        kind = re.match(r":?[-=+?]|##?|%%?|//?|\^\^?|,,?|:", operation)
        argument = operation[kind.end() :] if kind else ""
        way = kind[0] if kind else ""
        text = " ".join(values or ())
        is_set = values is not None and not (way.startswith(":") and text == "")
        if way[-1:] in ("-", "=") and way != "-=":
            if is_set:
                return values or [], is_list
            default = _DEFAULT + self.text(Raw(argument, 0), state)
            if way[-1] == "=":
                state.variables[name] = ((default, 0),)
            return [default], False
        if way[-1:] == "+":
            alternative = list(self.fields(Raw(argument, 0), state))
            return (alternative if is_set else [] if is_list else [_DEFAULT]), is_list or len(alternative) > 1
        if way[-1:] == "?" and values is not None:
            return values, is_list
        if values is None or UNKNOWN in text or not way:
            return [(_OPEN if is_list else "") + _unknown(chunk)], is_list
        if way == ":":
            bounds = [self.number(part, state) for part in argument.split(":")]
            if any(bound is None or int(bound) < 0 for bound in bounds):
                return [_unknown(chunk)], False
            start, length = int(bounds[0] or 0), int(bounds[1] or 0) if len(bounds) > 1 else None
            if is_list:
                start -= name == "@"
                return values[start:][:length], True
            return [text[start:][:length]], False
        return [_edited(text, way, self.text(Raw(argument, 0), state)) for text in values], is_list

    def number(self, text: str, state: _State) -> str | None:
        """Return the value of an arithmetic expression; None when it can't be known."""
        counting = _COUNTING.fullmatch(text)
        if counting is not None:
            name, way, rest = counting.groups()
            way, rest = (way[0] + "=", "1") if way in ("++", "--") else (way, rest)
            old = "0" if way == "=" else self.number(name, state)
            value = self.number(rest, state)
            if old is not None and value is not None and way != "=":
                value = self.number(f"({old}){way[0]}({value})", state)
            state.variables[name] = ((_unknown(f"${name}") if value is None else value, 0),)
            return value
        expanded = self.text(Raw(text, 0), state, in_quotes=True)
        names = {name: _joined(state.variables.get(name, ())) for name in re.findall(r"[A-Za-z_]\w*", expanded)}
        expanded = re.sub(r"[A-Za-z_]\w*", lambda name: f"({names[name[0]]})", expanded)
        default = _DEFAULT if _DEFAULT in expanded else ""
        plain = expanded.replace(_DEFAULT, "")
        if not _SUM.fullmatch(plain) or "**" in plain or "<<" in plain:
            return None
        try:
            # Digits and signs alone, at most 200 of them.
            return f"{default}{int(eval(plain.strip().replace('/', '//')))}"
        except (SyntaxError, ArithmeticError, TypeError, ValueError):
            return None


_NO_OUTPUT = f"{UNKNOWN}?{END}"


def _unknown(source: str) -> str:
    return f"{UNKNOWN}{source.translate(_MARKS)}{END}"


def _word(text: str, line: int) -> Word:
    is_open = text.startswith(_OPEN) and _ONE_UNKNOWN.fullmatch(text) is not None
    return Word(text.translate(_MARKS), line, is_known=UNKNOWN not in text, is_open=is_open)


def _joined(values: Sequence[_Text]) -> str:
    return " ".join(text for text, _ in values)


def _variable(text: str, line: int) -> Variable:
    return Variable(value=_word(text, line).value, line=line)


def base_name(path: str) -> str:
    """Return a path without its folders."""
    return path.translate(_MARKS).rpartition("/")[2]


def _output(name: str, values: list[str], text: str) -> str:
    """Return what a command prints."""
    if name == "echo":
        values = values[1:] if values[:1] and re.fullmatch(r"-[neE]+", values[0]) else values
        return f"{' '.join(values)}\n"
    if name == "printf" and values:
        pattern = values[0].replace("\\n", "\n")
        if pattern.count("%s") != pattern.count("%") or pattern.count("%") not in (0, 1, len(values) - 1):
            return _NO_OUTPUT
        if pattern.count("%") == 1:
            return "".join(pattern.replace("%s", value) for value in values[1:])
        for value in values[1:]:
            pattern = pattern.replace("%s", value, 1)
        return pattern
    if name in ("cat", "tee") and text:
        return text
    if name == "seq" and all(re.fullmatch(r"-?\d{1,6}", value) for value in values) and 0 < len(values) < 4:
        first, step = int(values[0]) if values[1:] else 1, int(values[1]) if values[2:] else 1
        numbers = range(first, int(values[-1]) + 1, max(1, step))
        return "".join(f"{number}\n" for number in numbers[:_MOST_ROUNDS])
    return _NO_OUTPUT


def _edited(text: str, way: str, pattern: str) -> str:
    """Return a value without what a pattern fits at one end, or with another text in its place."""
    if way in ("^^", ",,"):
        return text.upper() if way == "^^" else text.lower()
    if way in ("/", "//"):
        old, _, new = pattern.partition("/")
        return text.replace(old, new, -1 if way == "//" else 1)
    sizes = range(len(text) + 1) if way in ("#", "%%") else range(len(text), -1, -1)
    for size in sizes:
        if way[0] == "#" and fnmatchcase(text[:size], pattern):
            return text[size:]
        if way[0] == "%" and fnmatchcase(text[size:], pattern):
            return text[:size]
    return text


def _fewer(states: list[_State], most: int) -> list[_State]:
    """Return the states without doubles, and at most `most`: what differs becomes unknown, exported variables first."""
    states = _different(states)
    if len(states) <= most:
        return states
    names = {name for state in states for name in state.variables}
    for name in sorted(names, key=lambda name: (name not in states[0].exported, name)):
        if len({state.variables.get(name) for state in states}) > 1:
            for state in states:
                state.variables[name] = ((_OPEN + _unknown(f"${name}"), 0),)
            states = _different(states)
        if len(states) <= most:
            break
    return states[:most]


def _different(states: list[_State]) -> list[_State]:
    if len(states) < 2:
        return states
    return list({(frozenset(one.variables.items()), one.arguments, one.ended): one for one in states}.values())


def _split(
    state: _State, condition: Body, *, has_else: bool, on_success: bool = True
) -> tuple[_State | None, _State | None]:
    """Return the state where a condition holds and the one where it does not; None where there is none.

    :param has_else: whether something is run where it does not hold.
    :param on_success: whether something is run where it holds, and not where it does not.
    """
    if state.status is not None and (not state.is_likely or (has_else is False and state.status == on_success)):
        return (state, None) if state.status else (None, state)
    other = state.copy()
    if state.tested:
        state.decisions[state.tested], other.decisions[state.tested] = True, False
    words = condition[-1].words if condition else ()
    equal = [index for index, word in enumerate(words) if word.text in ("=", "==")]
    if len(equal) == 1 and len(words) < 6 and equal[0] + 1 < len(words):
        name = _SAME_VARIABLE.fullmatch(words[equal[0] - 1].text)
        literal = words[equal[0] + 1].text.strip("'\"")
        if name is not None and not re.search(r"[$*?\[`]", literal):
            state.variables[name[1]] = ((literal, words[0].line),)
    return state, other


def _decide(tokens: list[str], state: _State) -> tuple[bool | None, bool]:
    """Return whether a test holds, None where the script does not decide it, and whether that is so for an empty
    environment alone."""
    for operators, needed in ((("||", "-o"), True), (("&&", "-a"), False)):
        at = next((index for index, token in enumerate(tokens) if token in operators), None)
        if at is not None:
            sides = [_decide(tokens[:at], state), _decide(tokens[at + 1 :], state)]
            if (needed, False) in sides or ((needed, True) in sides and (None, False) not in sides):
                return needed, (needed, False) not in sides
            return (None, False) if (None, False) in sides else (not needed, any(likely for _, likely in sides))
    if tokens[:1] == ["!"]:
        status, is_likely = _decide(tokens[1:], state)
        return None if status is None else not status, is_likely
    if len(tokens) == 1 or (len(tokens) == 2 and tokens[0] in ("-n", "-z")):
        text, wanted = tokens[-1], tokens[0] == "-z"
        name = re.fullmatch(rf"{UNKNOWN}\$\{{?(\w+)\}}?{END}", text)
        is_absent = name is not None and name[1] not in state.variables
        if UNKNOWN in text and not is_absent:
            return None, False
        is_empty = is_absent or text.translate(_MARKS) == ""
        return is_empty == wanted, is_absent or _DEFAULT in text
    if len(tokens) != 3 or any(UNKNOWN in token or _DEFAULT in token for token in tokens):
        return None, False
    left, way, right = tokens
    if way == "=~" and not re.search(r"\)[*+{]", right):  # whose time could have no end
        with suppress(re.error):
            return re.search(right, left[:200]) is not None, False
    if way in ("=", "==", "!="):
        return fnmatchcase(left, right) == (way != "!="), False
    if way in _ORDERS and all(re.fullmatch(r"-?\d{1,9}", side) for side in (left, right)):
        return _ORDERS[way](int(left), int(right)), False
    return None, False
