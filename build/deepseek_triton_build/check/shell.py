"""The walk over a shell script finds what it would start, as far as it says so. Nothing is run.

Each branch whose condition is not decided by the script alone is followed, in a state of its own.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

from deepseek_triton_build.check.documents import read_text
from deepseek_triton_build.check.shell_syntax import UNKNOWN, UNSEEN, Body, Node, Raw, Redirect, parse
from deepseek_triton_build.check.shell_words import (
    DEFAULT,
    MARKS,
    MOST_ROUNDS,
    OPEN,
    Expansion,
    State,
    Text,
    Variable,
    Word,
    Written,
    base_name,
    decide,
    joined,
    printed,
    text_of,
    unknown,
    variable_of,
    word_of,
)

_ASSIGNMENT = re.compile(r"(\w+)(\[[^]]*\])?(\+?)=(.*)", re.DOTALL)
_TABLE_ROW = re.compile(r"\[(.*?)\]=(.*)", re.DOTALL)
_SAME_VARIABLE = re.compile(r'"?\$\{?(\w+)(?::?-[^}]*)?\}?"?')
_HINT = re.compile(r"trtllm-|tensorrt_llm|vllm|tritonserver|quickstart_advanced|\.sh\b")
_RUNNING = (
    *("bash", "sh", "dash", "zsh", "env", "exec", "nohup", "setsid", "time", "timeout", "numactl", "sudo", "ssh"),
    *("srun", "sbatch", "mpirun", "mpiexec", "trtllm-llmapi-launch", "docker", "podman", "kubectl"),
)
"""Commands that run the script among their words."""
_SHELLS = ("bash", "sh", "dash", "zsh", "ssh", "srun", "docker", "podman", "kubectl", "oc")
# Commands that name a program without starting it.
STARTING_NOTHING = (
    *("echo", "printf", "trap", "command", "which", "type", "hash", "alias", "cat", "tee", "logger", "log", "info"),
    *("pgrep", "pkill", "killall", "kill", "grep", "egrep", "sed", "awk", "pip", "pip3", "apt", "apt-get", "die"),
    "chmod",
    *("curl", "wget", "git", "mkdir", "ls", "rm", "cp"),
)
_DECLARING = ("export", "declare", "typeset", "local", "readonly")
MOST_STATES, _MOST_LEVELS, _MOST_NODES = 8, 12, 20_000


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

    def start_of(self, name: str) -> State | None:
        """Return the state in which it starts the script of that name; None when it starts another program. What comes
        from here has the line 0 there."""
        at = next((place for place, word in enumerate(self.words) if base_name(word.text) == name), None)
        if at is None or (at and base_name(self.words[0].text) not in _RUNNING):
            return None
        before = tuple(replace(word, line=0) for word in (*self.before, *self.words[:at]))
        state = State(arguments=tuple((text_of(word), 0) for word in self.words[at + 1 :]), before=before)
        _Run.give({name: replace(variable, line=0) for name, variable in self.environment.items()}, state)
        return state


def read_commands(
    text: str, folder: Path | None = None, most_states: int = MOST_STATES, starts: Sequence[State] = ()
) -> tuple[Sequence[Command], Mapping[str, Variable]]:
    """Return the commands that a script would start, and the variables that it exports or gives to a command.

    :param folder: where the files lie that the script reads commands from, with `source`.
    :param most_states: how many ways through the script are told apart.
    :param starts: how other scripts start it.
    """
    run = _Run(folder, most_states)
    body = parse(text.translate(MARKS))
    states = run.body(body, [start.copy() for start in starts or [State()]])
    # A function that nobody calls is one for the user, who names it as an argument.
    for name in [name for name in run.functions if name not in run.called]:
        run.body(run.functions[name], [(states or [State()])[0].copy(arguments=None, ended="")])
    return run.commands, run.variables


class _Run(Expansion):
    """One walk over a script."""

    def __init__(self, folder: Path | None, most_states: int) -> None:
        self.folder, self.most_states, self.level = folder, most_states, 0
        self.commands: list[Command] = []
        self.variables: dict[str, Variable] = {}
        self.functions: dict[str, Body] = {}
        self.called: set[str] = set()
        self.numbers: dict[object, int] = {}
        self.num_nodes = 0

    def body(self, body: Body, states: list[State]) -> list[State]:
        self.level += 1
        for node in body if self.level <= _MOST_LEVELS * 4 else ():
            self.num_nodes += len(states)
            if self.num_nodes > _MOST_NODES:
                break
            states = [new for state in states for new in ([state] if state.ended else self.node(node, state))]
            states = _fewer([state for state in states if state.ended != "exit"], self.most_states)
        self.level -= 1
        return states

    def node(self, node: Node, state: State) -> list[State]:
        kinds: Mapping[str, Callable[[Node, State], list[State]]] = {
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

    def group(self, node: Node, state: State) -> list[State]:
        if not node.redirects:
            return self.body(node.bodies[0], [state])
        output, state.output = state.output, ""
        states = self.body(node.bodies[0], [state])
        for after in states:
            text, after.output = after.output, output
            self.redirect(node.redirects, after, text)
        return states

    def subshell(self, node: Node, state: State) -> list[State]:
        for after in self.body(node.bodies[0], [state.copy(in_background=state.in_background or node.kind == "&")]):
            state.output, state.files, state.started = after.output, after.files, after.started
        return state.after(None)

    def pipe(self, node: Node, state: State) -> list[State]:
        text = state.input
        for part in node.bodies:
            after = (self.body(part, [state.copy(input=text, output="")]) or [state])[0]
            text, state.files, state.started = after.output, after.files, after.started
        state.output += text
        return state.after(None)

    def negated(self, node: Node, state: State) -> list[State]:
        states = self.body(node.bodies[0], [state])
        for after in states:
            after.status = None if after.status is None else not after.status
        return states

    def define(self, node: Node, state: State) -> list[State]:
        self.functions[node.words[0].text] = node.bodies[0]
        return state.after(True)

    def branches(self, bodies: tuple[Body, ...], state: State) -> list[State]:
        if len(bodies) < 2:
            return self.body(bodies[0], [state]) if bodies else state.after(True)
        condition, body, *others = bodies
        result: list[State] = []
        for after in self.body(condition, [state]):
            yes, no = _split(after, condition, has_else=bool(others))
            result += [] if yes is None else self.body(body, [yes])
            result += [] if no is None else self.branches(tuple(others), no)
        return result

    def chain(self, node: Node, state: State) -> list[State]:
        first, second = node.bodies
        result: list[State] = []
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

    def loop(self, node: Node, state: State) -> list[State]:
        condition, body = node.bodies
        states = [state]
        for _ in range(MOST_ROUNDS):
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

    def loop_over(self, node: Node, state: State) -> list[State]:
        name = node.words[0].text
        values = [(text, raw.line) for raw in node.words[1:] for text in self.fields(raw, state)]
        if any(OPEN in text for text, _ in values):
            values = [(unknown(f"${name}"), 0)]
        states = [state]
        for value in values[:MOST_ROUNDS]:
            for after in states:
                after.variables[name] = (value,)
            states = self.left(self.body(node.bodies[0], states), "continue")
        return self.left(states, "break")

    @staticmethod
    def left(states: list[State], *reasons: str) -> list[State]:
        for state in states:
            state.ended = "" if state.ended in (*reasons, "continue") else state.ended
        return states

    def choice(self, node: Node, state: State) -> list[State]:
        text = self.text(node.words[0], state)
        is_sure = UNKNOWN not in text and DEFAULT not in text
        name = _SAME_VARIABLE.fullmatch(node.words[0].text)
        result: list[State] = []
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

    def test(self, node: Node, state: State) -> list[State]:
        return self.decided([self.text(word, state) for word in node.words], state)

    def decided(self, tokens: Sequence[str], state: State) -> list[State]:
        state.tested = tuple(tokens)
        status, is_likely = decide(list(tokens), state)
        return state.after(state.decisions.get(state.tested, status), is_test=True, is_likely=is_likely)

    def arithmetic(self, node: Node, state: State) -> list[State]:
        value = self.number(node.words[0].text, state)
        state.tested = (node.words[0].text,)
        is_known = value is not None and DEFAULT not in value
        return state.after(value != "0" if is_known else None, is_test=True)

    # Simple commands

    def simple(self, node: Node, state: State) -> list[State]:
        given: dict[str, Variable] = {}
        raws = list(node.words)
        while raws and (match := _ASSIGNMENT.fullmatch(raws[0].text)) is not None:
            if all(_ASSIGNMENT.fullmatch(raw.text) for raw in raws):
                self.assign(match, raws[0].line, state)
            else:
                given[match[1]] = variable_of(self.text(Raw(match[4], 0), state), raws[0].line)
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

    def command(self, words: list[Text], given: dict[str, Variable], state: State) -> list[State]:
        """Run a command with all its words."""
        name = words[0][0].translate(MARKS)
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
            state.variables |= {text: ((unknown(f"${text}"), 0),) for text in names}
            return state.after(None, is_likely=name == "getopts")
        elif name == "eval":
            return self.nested(" ".join(values), words[0][1], state)
        elif name in ("source", ".") and values:
            script = self.script(values[0], state)
            return state.after(None) if script is None else self.nested(script, words[0][1], state, is_elsewhere=True)
        else:
            self.start(words, given, state)
            state.output += printed(name, values, state.input)
            if name == "tee":
                state.files |= {base_name(text): Written(state.input, state.input_line) for text in values}
            state.ended = "exit" if name == "exec" else ""
        return state.after(None)

    def call(self, body: Body, arguments: tuple[Text, ...], state: State) -> list[State]:
        own, state.arguments = state.arguments, arguments
        states = self.body(body, [state]) if self.level < _MOST_LEVELS else [state]
        for after in states:
            after.arguments, after.ended = own, ""
        return states

    def nested(self, text: str, line: int, state: State, *, is_elsewhere: bool = False) -> list[State]:
        """Run a text that a command takes for a script."""
        self.level += 3
        body = parse(text, line, is_elsewhere=is_elsewhere) if self.level < _MOST_LEVELS else ()
        states = self.body(body, [state])
        self.level -= 3
        return states

    def script(self, name: str, state: State) -> str | None:
        """Return the text of a script that is written before, or lies beside; None when there is none."""
        name = base_name(name)
        if name in state.files:
            return state.files[name].text
        path = self.folder / name if self.folder is not None and name else None
        text = read_text(path, name) if path is not None and path.is_file() else None
        return text if isinstance(text, str) else None

    def start(self, words: list[Text], given: dict[str, Variable], state: State) -> None:
        """Keep a command, and run the scripts among its words."""
        command = [word_of(text, line) for text, line in words]
        exported = {name: line for name, line in state.exported.items() if name in state.variables}
        environment = {name: variable_of(joined(state.variables[name]), line) for name, line in exported.items()}
        for text, line in words[1:] if command[0].text == "env" else ():
            if (match := _ASSIGNMENT.fullmatch(text)) is not None:
                given[match[1]] = variable_of(match[4], line)
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

    def run_scripts(self, words: list[Text], command: list[Word], given: dict[str, Variable], state: State) -> None:
        """Run the texts among a command's words, and its input, that are scripts by themselves."""
        for position, (text, line) in enumerate(words):
            file = state.files.get(base_name(text)) if text.endswith(".sh") else None
            if file is None and not (re.search(r"\s", UNSEEN.sub("", text)) and _HINT.search(text)):
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
    def give(given: Mapping[str, Variable], state: State) -> None:
        for name, variable in given.items():
            text = variable.value if variable.value is not None else unknown(f"${name}")
            state.variables[name], state.exported[name] = ((text, variable.line),), variable.line

    def redirect(self, redirects: tuple[Redirect, ...], state: State, output: str) -> None:
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

    def declare(self, raws: list[Raw], state: State) -> list[State]:
        exports = raws[0].text == "export" or any(raw.text == "-x" for raw in raws)
        for raw in raws[1:]:
            match = _ASSIGNMENT.fullmatch(raw.text)
            name = match[1] if match else raw.text
            if match is not None:
                self.assign(match, raw.line, state)
            if exports and name in state.variables:
                state.exported[name] = raw.line
                self.variables.setdefault(name, variable_of(joined(state.variables[name]), raw.line))
        return state.after(True)

    def assign(self, match: re.Match[str], line: int, state: State) -> None:
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
            value = joined(before[:1]) + self.text(Raw(text, line), state)
            state.variables[name] = ((value, line), *before[1:])
        if name in state.exported and name not in self.variables:
            self.variables[name] = variable_of(joined(state.variables[name]), line)


def _fewer(states: list[State], most: int) -> list[State]:
    """Return the states without doubles, and at most `most`: what differs becomes unknown, exported variables first."""
    states = _different(states)
    if len(states) <= most:
        return states
    names = {name for state in states for name in state.variables}
    for name in sorted(names, key=lambda name: (name not in states[0].exported, name)):
        if len({state.variables.get(name) for state in states}) > 1:
            for state in states:
                state.variables[name] = ((OPEN + unknown(f"${name}"), 0),)
            states = _different(states)
        if len(states) <= most:
            break
    return states[:most]


def _different(states: list[State]) -> list[State]:
    if len(states) < 2:
        return states
    return list({(frozenset(one.variables.items()), one.arguments, one.ended): one for one in states}.values())


def _split(
    state: State, condition: Body, *, has_else: bool, on_success: bool = True
) -> tuple[State | None, State | None]:
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
