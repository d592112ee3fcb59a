"""The expansion of a shell script's words: parameters, arithmetic, quotes. What it does not say stays marked."""

import operator
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from deepseek_triton_build.check.shell_syntax import END, UNKNOWN, Raw, end_of

# A default, as of ${NAME:-8}: known, but the environment may say something else.
DEFAULT = "\ue002"
# In front of what may become any number of words.
OPEN = "\ue003"
MARKS = str.maketrans("", "", UNKNOWN + END + DEFAULT + OPEN)
_ONE_UNKNOWN = re.compile(f"{OPEN}?{UNKNOWN}[^{END}]*{END}")
_FIELD = re.compile(rf"(?:{OPEN}?{UNKNOWN}[^{END}]*{END}|\S)+")
_PARAMETER = re.compile(r"(#?)(\w+|[@*#?$!-])(\[[^]]*\])?(.*)", re.DOTALL)
_NAME = re.compile(r"\$(\w+|[@*#?$!-])")
_RANGE = re.compile(r"(?<!\$)\{(?:(-?\d{1,6})\.\.(-?\d{1,6})|([^{}\s\"'$]*,[^{}\s\"'$]*))\}")
_COUNTING = re.compile(r"\s*(\w+)\s*(\+\+|--|[-+*]?=(?!=))(.*)", re.DOTALL)
_SUM = re.compile(r"[\d\s()+*/%<>=!-]{1,200}")
_ORDERS = {f"-{name}": getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
MOST_ROUNDS = 64


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


Text = tuple[str, int]


@dataclass
class State:
    """Where a run of the script stands."""

    variables: dict[str, tuple[Text, ...]] = field(default_factory=dict)
    exported: dict[str, int] = field(default_factory=dict)
    """Name -> line."""
    arguments: tuple[Text, ...] | None = None
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

    def copy(self, **changes: object) -> "State":
        own = {name: dict(getattr(self, name)) for name in ("variables", "exported", "files", "decisions")}
        return replace(self, **{**own, **changes})  # type: ignore[arg-type]

    def after(self, status: bool | None, *, is_test: bool = False, is_likely: bool = False) -> "list[State]":
        self.status, self.is_test, self.is_likely = status, is_test, is_likely
        return [self]


class Expansion(ABC):
    """The expansion of words in a state of the script, which `:=` and `++` change."""

    @abstractmethod
    def nested(self, text: str, line: int, state: State) -> list[State]:
        """Run the script in `$(...)`, and return the states after it."""

    def text(self, raw: Raw, state: State, *, in_quotes: bool = False) -> str:
        """Return a word that is not split, or a text as if it stood in double quotes."""
        return "".join(" ".join(values) for values, _ in self.pieces(raw, state, in_quotes)).replace(OPEN, "")

    def fields(self, raw: Raw, state: State) -> list[str]:
        """Return the words that a word becomes."""
        if (found := _RANGE.search(raw.text)) and not re.search(r"['\"]", raw.text):
            if found[3] is None:
                first, last = int(found[1]), int(found[2])
                step = 1 if last >= first else -1
                alternatives = [str(value) for value in range(first, last + step, step)][:MOST_ROUNDS]
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
                parts = [part for part in _FIELD.findall(text) if part != DEFAULT]
                is_joined = is_joined and not text[:1].isspace()
                parts = [f"{OPEN}{part}" if _ONE_UNKNOWN.fullmatch(part) else part for part in parts]
            if is_joined and parts:
                result[-1] += parts[0]
                parts = parts[1:]
            result += parts
            is_joined = bool(result) and not (is_split and " ".join(values)[-1:].isspace())
        return result

    def pieces(self, raw: Raw, state: State, in_quotes: bool) -> Iterator[tuple[list[str], bool]]:
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
                whole = "".join(" ".join(values) for values, _ in inner).replace(OPEN, "")
                yield inner[0][0] if len(inner) == 1 else [whole], False
            elif chunk[0] in "<>":
                yield [chunk if len(chunk) == 1 else unknown(chunk)], False
            else:
                values, is_list = self.expansion(chunk, raw.line, state, in_quotes=in_quotes)
                if in_quotes and not is_list:
                    values = [" ".join(values).replace(OPEN, "")]
                yield values, not in_quotes

    def expansion(self, chunk: str, line: int, state: State, *, in_quotes: bool) -> tuple[list[str], bool]:
        """Return what an expansion becomes, and whether it stays several words between quotes."""
        if chunk.startswith("$((") and chunk.endswith("))"):
            value = self.number(chunk[3:-2], state)
            return [unknown(chunk) if value is None else value], False
        if chunk.startswith(("$(", "`")):
            return [self.output_of(chunk.lstrip("$`(")[:-1], chunk, line, state)], False
        body = chunk[2:-1] if chunk.startswith("${") else chunk[1:]
        return self.parameter(body, chunk, state, in_quotes=in_quotes) if body else (["$"], False)

    def output_of(self, text: str, chunk: str, line: int, state: State) -> str:
        if text.strip().startswith("<"):
            return unknown(chunk)
        states = self.nested(text, line, state.copy(output="", ended=""))
        outputs = {after.output.rstrip("\n") for after in states}
        text = outputs.pop() if len(outputs) == 1 else NO_OUTPUT
        return unknown(chunk) if NO_OUTPUT in text else text

    def values(self, name: str, state: State) -> tuple[Text, ...] | None:
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

    def parameter(self, body: str, chunk: str, state: State, *, in_quotes: bool) -> tuple[list[str], bool]:
        match = _PARAMETER.fullmatch(body)
        if body.endswith("[@]") and body.startswith("!"):
            return [str(index) for index, _ in enumerate(state.variables.get(body[1:-3], ()))], True
        if match is None:
            return [unknown(chunk)], False
        counts, name, index, operation = match.groups()
        key = self.text(Raw(index[1:-1], 0), state) if index else ""
        found = state.variables.get(f"{name}[{key}]", self.values(name, state))
        is_list = name == "@" or index == "[@]" or (not in_quotes and (name == "*" or index == "[*]"))
        whole = is_list or name == "*" or index == "[*]"
        values = None if found is None else [text for text, _ in found]
        if values is not None and index and not whole and f"{name}[{key}]" not in state.variables:
            at = self.number(index[1:-1], state)
            values = values[int(at) :][:1] if at is not None and int(at) >= 0 else [unknown(chunk)]
        elif values is not None and not whole:
            values = values[:1]
        if counts:
            is_known = values is not None and not any(UNKNOWN in value for value in values)
            counted: Sequence[object] = values or () if whole or name == "#" else (values or [""])[0].translate(MARKS)
            return [str(len(counted)) if is_known else unknown(chunk)], False
        if operation:
            return self.operation(operation, name, values, chunk, state, is_list=is_list)
        if values is None:
            return [(OPEN if is_list else "") + unknown(chunk)], is_list
        return values, is_list

    def operation(
        self, operation: str, name: str, values: list[str] | None, chunk: str, state: State, *, is_list: bool
    ) -> tuple[list[str], bool]:
        kind = re.match(r":?[-=+?]|##?|%%?|//?|\^\^?|,,?|:", operation)
        argument = operation[kind.end() :] if kind else ""
        way = kind[0] if kind else ""
        text = " ".join(values or ())
        is_set = values is not None and not (way.startswith(":") and text == "")
        if way[-1:] in ("-", "=") and way != "-=":
            if is_set:
                return values or [], is_list
            default = DEFAULT + self.text(Raw(argument, 0), state)
            if way[-1] == "=":
                state.variables[name] = ((default, 0),)
            return [default], False
        if way[-1:] == "+":
            alternative = list(self.fields(Raw(argument, 0), state))
            return (alternative if is_set else [] if is_list else [DEFAULT]), is_list or len(alternative) > 1
        if way[-1:] == "?" and values is not None:
            return values, is_list
        if values is None or UNKNOWN in text or not way:
            return [(OPEN if is_list else "") + unknown(chunk)], is_list
        if way == ":":
            bounds = [self.number(part, state) for part in argument.split(":")]
            if any(bound is None or int(bound) < 0 for bound in bounds):
                return [unknown(chunk)], False
            start, length = int(bounds[0] or 0), int(bounds[1] or 0) if len(bounds) > 1 else None
            if is_list:
                start -= name == "@"
                return values[start:][:length], True
            return [text[start:][:length]], False
        return [_edited(text, way, self.text(Raw(argument, 0), state)) for text in values], is_list

    def number(self, text: str, state: State) -> str | None:
        """Return the value of an arithmetic expression; None when it can't be known."""
        counting = _COUNTING.fullmatch(text)
        if counting is not None:
            name, way, rest = counting.groups()
            way, rest = (way[0] + "=", "1") if way in ("++", "--") else (way, rest)
            old = "0" if way == "=" else self.number(name, state)
            value = self.number(rest, state)
            if old is not None and value is not None and way != "=":
                value = self.number(f"({old}){way[0]}({value})", state)
            state.variables[name] = ((unknown(f"${name}") if value is None else value, 0),)
            return value
        expanded = self.text(Raw(text, 0), state, in_quotes=True)
        names = {name: joined(state.variables.get(name, ())) for name in re.findall(r"[A-Za-z_]\w*", expanded)}
        expanded = re.sub(r"[A-Za-z_]\w*", lambda name: f"({names[name[0]]})", expanded)
        default = DEFAULT if DEFAULT in expanded else ""
        plain = expanded.replace(DEFAULT, "")
        if not _SUM.fullmatch(plain) or "**" in plain or "<<" in plain:
            return None
        try:
            # Digits and signs alone, at most 200 of them.
            return f"{default}{int(eval(plain.strip().replace('/', '//')))}"
        except (SyntaxError, ArithmeticError, TypeError, ValueError):
            return None


NO_OUTPUT = f"{UNKNOWN}?{END}"


def unknown(source: str) -> str:
    return f"{UNKNOWN}{source.translate(MARKS)}{END}"


def word_of(text: str, line: int) -> Word:
    is_open = text.startswith(OPEN) and _ONE_UNKNOWN.fullmatch(text) is not None
    return Word(text.translate(MARKS), line, is_known=UNKNOWN not in text, is_open=is_open)


def text_of(word: Word) -> str:
    """Return the text that `word_of` makes the word of."""
    return word.text if word.is_known else (OPEN if word.is_open else "") + unknown(word.text)


def joined(values: Sequence[Text]) -> str:
    return " ".join(text for text, _ in values)


def variable_of(text: str, line: int) -> Variable:
    return Variable(value=word_of(text, line).value, line=line)


def base_name(path: str) -> str:
    """Return a path without its folders."""
    return path.translate(MARKS).rpartition("/")[2]


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


def printed(name: str, values: list[str], text: str) -> str:
    """Return what a command prints."""
    if name == "echo":
        values = values[1:] if values[:1] and re.fullmatch(r"-[neE]+", values[0]) else values
        return f"{' '.join(values)}\n"
    if name == "printf" and values:
        pattern = values[0].replace("\\n", "\n")
        if pattern.count("%s") != pattern.count("%") or pattern.count("%") not in (0, 1, len(values) - 1):
            return NO_OUTPUT
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
        return "".join(f"{number}\n" for number in numbers[:MOST_ROUNDS])
    return NO_OUTPUT


def decide(tokens: list[str], state: State) -> tuple[bool | None, bool]:
    """Return whether a test holds, None where the script does not decide it, and whether that is so for an empty
    environment alone."""
    for operators, needed in ((("||", "-o"), True), (("&&", "-a"), False)):
        at = next((index for index, token in enumerate(tokens) if token in operators), None)
        if at is not None:
            sides = [decide(tokens[:at], state), decide(tokens[at + 1 :], state)]
            if (needed, False) in sides or ((needed, True) in sides and (None, False) not in sides):
                return needed, (needed, False) not in sides
            return (None, False) if (None, False) in sides else (not needed, any(likely for _, likely in sides))
    if tokens[:1] == ["!"]:
        status, is_likely = decide(tokens[1:], state)
        return None if status is None else not status, is_likely
    if len(tokens) == 1 or (len(tokens) == 2 and tokens[0] in ("-n", "-z")):
        text, wanted = tokens[-1], tokens[0] == "-z"
        name = re.fullmatch(rf"{UNKNOWN}\$\{{?(\w+)\}}?{END}", text)
        is_absent = name is not None and name[1] not in state.variables
        if UNKNOWN in text and not is_absent:
            return None, False
        is_empty = is_absent or text.translate(MARKS) == ""
        return is_empty == wanted, is_absent or DEFAULT in text
    if len(tokens) != 3 or any(UNKNOWN in token or DEFAULT in token for token in tokens):
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
