"""The parser of verbs, options that several verbs have, and types of values."""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from deepseek_triton_tools.terminal.output_streams import columns
from deepseek_triton_tools.tool_errors import ToolError, nearest

_T = TypeVar("_T")
Handler = Callable[[argparse.Namespace], int]
"""Runs a verb and returns its exit code."""


class VerbParser(argparse.ArgumentParser):
    """The parser of a verb (`launch`) or of a form of one (`launch docker`)."""

    names: Callable[[], str] | None = None
    """Returns a last section of the help. It is looked up when the help is shown."""
    rest: str | None = None
    """The attribute that gets the words after `--`, as a list."""
    default_form: str | None = None
    """The form that is meant by a command line that begins with none: `bench URL` is `bench run URL`."""
    common = ""
    """The options that --help shows beside those that are required; "" for all."""
    example = "deepseek-triton demo"

    def __init__(self, *, has_help: bool = True, **settings: Any) -> None:
        super().__init__(**settings, formatter_class=HelpFormatter, allow_abbrev=False, add_help=False)
        text = "show the usual options, or with --help-all every option"
        if has_help:
            self.add_argument("-h", "--help", "--help-all", action=_Help, nargs=0, default=argparse.SUPPRESS, help=text)

    def runs(self, handler: Handler, *examples: str, notes: str = "", common: str = "") -> None:
        """Set what runs the verb, the end of its help, and the options that most people need."""
        self.set_defaults(handler=handler, parser=self)
        self.common = common
        self._end_help(examples, notes)

    def add_forms(self, metavar: str, *examples: str, notes: str) -> Verbs:
        """Let the verb have forms, and set the end of its help."""
        self.example = " ".join(examples[:1])
        self._end_help(examples, notes)
        return self.add_subparsers(
            title="forms", required=True, metavar=metavar, prog=self.prog, parser_class=VerbParser
        )

    def _end_help(self, examples: Sequence[str], notes: str) -> None:
        self.epilog = "\n  ".join(["examples:", *examples]) + (f"\n\n{notes}" if notes else "")

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        given, forms = list(args or ()), list(forms_of(self))
        first = given[0].partition("=")[0] if given else ""
        if forms and first not in (*forms, *self._option_string_actions):
            if not given or not self.default_form:
                raise ToolError(self._form_first(forms, given), exit_code=2)
            given.insert(0, self.default_form)
        if self.rest is None:
            return super().parse_known_args(given, namespace)
        end = given.index("--") if "--" in given else len(given)
        known, unknown = super().parse_known_args(given[:end], namespace)
        setattr(known, self.rest, given[end + 1 :])
        return known, unknown

    def _form_first(self, forms: Sequence[str], given: Sequence[str]) -> str:
        if given and not given[0].startswith("-") and (meant := nearest(given[0], forms)):
            return f"there is no {given[0]}{meant}"
        got = f", got {given[0]!r:.100}" if given else ""
        return f"expected {', '.join(forms[:-1])} or {forms[-1]} first{got}; as in {self.example}"

    def shorten(self) -> None:
        """Leave what is not common out of the help."""
        shown = {"--help", *self.common.split()}
        options = [each for each in self._actions if each.option_strings and each.help != argparse.SUPPRESS]
        others = [each for each in options if self.common and not each.required and not shown & {*each.option_strings}]
        for action in others:
            action.help = argparse.SUPPRESS
        for group in self._action_groups:
            if all(action.help == argparse.SUPPRESS for action in group._group_actions):
                group.description = None
        if others:
            self.epilog = f"{self.epilog}\n\n{len(others)} more options: {self.prog} --help-all"

    def _print_message(self, message: str, file: Any = None) -> None:
        out = file or sys.stderr
        width = columns(out)
        super()._print_message("".join(_fitted(line, width) for line in message.splitlines(keepends=True)), out)

    def format_help(self) -> str:
        text = super().format_help()
        return text if self.names is None else f"{text}\n{self.names()}"


class _Help(argparse.Action):
    def __call__(self, parser: Any, namespace: object, values: object, option_string: str | None = None) -> None:
        if option_string != "--help-all":
            parser.shorten()
        parser.print_help()
        parser.exit()


def _fitted(line: str, width: int) -> str:
    """Break a line of the help where it is longer than `width`: a command so that it can still be copied."""
    if len(line) <= width:
        return line
    is_command = line.lstrip().startswith("deepseek-triton ")
    first_column = re.match(r" *(?:\S+ {2,})?", line)
    indent = " " * (first_column.end() if first_column and not is_command else 4)
    quoted = re.sub(r"\"[^\"]*\"|'[^']*'", lambda match: match[0].replace(" ", "\0"), line.rstrip("\n"))
    lines = textwrap.wrap(quoted, width - 2, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return (" \\\n" if is_command else "\n").join(lines).replace("\0", " ") + "\n"


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Help with one line for each verb and for most options."""

    def __init__(
        self, prog: str, indent_increment: int = 2, max_help_position: int = 34, width: int | None = None
    ) -> None:
        super().__init__(prog, indent_increment, max_help_position, width)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if isinstance(action, argparse.BooleanOptionalAction):
            return action.option_strings[0].replace("--", "--[no-]", 1)
        return super()._format_action_invocation(action)

    def _format_action(self, action: argparse.Action) -> str:
        if isinstance(action, argparse._SubParsersAction):
            return "".join(map(self._format_action, action._get_subactions()))
        return super()._format_action(action)


Verbs: TypeAlias = "argparse._SubParsersAction[VerbParser]"


def add_verb(verbs: Verbs, name: str, summary: str) -> VerbParser:
    return verbs.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")


def forms_of(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    """The verbs of the program, or the forms of a verb; empty for a verb without forms."""
    found = [action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(found[0]) if found else {}


def option(
    options: argparse._ActionsContainer,
    words: str,
    help: str,
    type: Callable[[str], Any] | None = None,
    **settings: Any,
) -> argparse.Action:
    """Add one option, mostly in one line: `option(group, "--file FILE", "read the prompt from a file instead", path)`.
    `words` are the option's names and the name of its value; without the latter, as in "-q --quiet", it is a switch.

    A positional argument has its attribute first: "url URL". `settings` are those of add_argument, such as `default`.
    """
    names = [word for word in words.split() if word.startswith("-")] or words.split()[:1]
    metavar = words.split()[len(names) :]
    if metavar:
        settings |= {"metavar": metavar[0], "type": type}
    elif names[0].startswith("-") and "choices" not in settings:
        settings.setdefault("action", "store_true")
    return options.add_argument(*names, help=help, **settings)


_OTHER_NAMES = {"--address": "--host", "--host": "--address", "--port": "--http-port", "--http-port": "--port"}


def about_option(given: str, parser: argparse.ArgumentParser, program: argparse.ArgumentParser) -> str:
    """Say what an option is called here, which verbs have one that this one lacks, or which option is meant."""
    name = given.partition("=")[0]
    if (meant := _OTHER_NAMES.get(name)) in _options(parser):
        return f"; here it is {meant}"
    if verbs := [leaf.prog.partition(" ")[2] for leaf in _leaves(program) if name in _options(leaf)]:
        return f"; {name} is an option of {', '.join(verbs)}"
    if not name.startswith("-"):
        return "; text with blanks needs quotes, a server's address --url" if "--url" in _options(parser) else ""
    return nearest(name, _options(parser)) + (
        "; tritonserver's own arguments come after --" if getattr(parser, "rest", None) else ""
    )


def _leaves(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    forms = forms_of(parser)
    for form in forms.values():
        yield from _leaves(form)
    if not forms:
        yield parser


def _options(parser: argparse.ArgumentParser) -> list[str]:
    return [option for action in parser._actions for option in action.option_strings]


def require_tools() -> None:
    """Raise ModuleNotFoundError without the extra `tools`. Whether a verb works mustn't depend on what it comes across:
    most plans have nothing that PyYAML is needed for."""
    if find_spec("yaml") is None:
        raise ModuleNotFoundError("No module named 'yaml'", name="yaml")


# --- Options of several verbs ---


def add_json(verb: argparse._ActionsContainer, page: str = "docs/generator.md") -> None:
    option(verb, "--json", f"print one JSON document instead ({page})")


def add_tritonserver(verb: VerbParser) -> None:
    places = "from PATH, then NVIDIA's container, then the nvidia-pytriton wheel"
    option(verb, "--tritonserver PATH", f"the server binary (default: {places})", path)


# --- Types of values ---

MOST_DIGITS = 20
"""No number on this command line has more digits. Python's int() refuses 4,301."""
_LONGEST_NAME = 255
"""Longest file name in bytes, on every file system of Linux."""


def words(text: str) -> str:
    """Any text that is not blank."""
    if text.strip():
        return text
    raise argparse.ArgumentTypeError("expected a value, got nothing: is a variable not set?")


def path(text: str) -> Path:
    """A path. The empty text is refused, because pathlib takes it for the current folder, and so is a name that is too
    long, because looking it up would raise OSError."""
    parsed = Path(words(text))
    if any(len(os.fsencode(part)) > _LONGEST_NAME for part in parsed.parts):
        raise argparse.ArgumentTypeError(f"expected a path, got a name of more than {_LONGEST_NAME} bytes in it")
    return parsed


def whole_number(expected: str, least: int = 0, most: int = 10**MOST_DIGITS) -> Callable[[str], int]:
    """Make a type that takes whole numbers from `least` to `most`, and says `expected` of anything else."""

    def parse(text: str) -> int:
        if text.isdecimal() and len(text) <= MOST_DIGITS and least <= int(text) <= most:
            return int(text)
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r:.100}")

    return parse


def real_number(expected: str, fits: Callable[[float], bool]) -> Callable[[str], float]:
    """Make a type that takes the numbers that fit, and says `expected` of anything else. "nan" fits no comparison."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if fits(value):
            return value
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r:.100}")

    return parse


def several(expected: str, parse_one: Callable[[str], _T]) -> Callable[[str], tuple[_T, ...]]:
    """Make a type that takes values of another type with commas between them, and says `expected` of anything else."""

    def parse(text: str) -> tuple[_T, ...]:
        try:
            return tuple(parse_one(part.strip()) for part in text.split(","))
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r:.100}") from error

    return parse


number = whole_number("a whole number")
positive = whole_number("a whole number from 1", least=1)
seconds = whole_number("a whole number of seconds")
duration = real_number("a number of seconds above 0", lambda value: 0 < value < math.inf)
port = whole_number("a number from 1 to 65535", least=1, most=65535)
_port_or_auto = whole_number("a number from 1 to 65535 or auto", least=1, most=65535)


def port_or_auto(text: str) -> int | str:
    return text if text == "auto" else _port_or_auto(text)


def size(text: str) -> int:
    """A number of bytes. "64GiB" and "64G" are binary, as in du; "64GB" is decimal; a plain number counts bytes."""
    match = re.fullmatch(r"(\d*\.?\d+) ?([a-z]*)", text.strip(), re.IGNORECASE)
    unit = match and _SIZES.get(match[2].lower())
    if match and unit and len(match[1]) <= MOST_DIGITS and (num_bytes := int(float(match[1]) * unit)) > 0:
        return num_bytes
    raise argparse.ArgumentTypeError(
        "expected a size such as 64GiB (2^30 bytes each), 500GB (10^9), 1.5T (binary) or a number of bytes, "
        f"got {text!r}"
    )


def share(text: str) -> tuple[int, int]:
    """ "2/8" is this process's number from 1, and how many processes there are."""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match and 1 <= int(match[1]) <= int(match[2]):
        return int(match[1]), int(match[2])
    raise argparse.ArgumentTypeError(f"expected K/N, such as 2/8 with K from 1 to N, got {text!r}")


_PREFIXES = "kmgtp"
_SIZES: Mapping[str, int] = {
    "": 1,
    "b": 1,
    **{f"{prefix}{end}": 1024**n for n, prefix in enumerate(_PREFIXES, 1) for end in ("", "ib")},
    **{f"{prefix}b": 1000**n for n, prefix in enumerate(_PREFIXES, 1)},
}


exit_timeout = whole_number("a number from 0 to 999999", most=10**6 - 1)
count_or_seconds = whole_number("a number from 0 to 999999999", most=10**9 - 1)

START_VARIABLES: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "http_port": ("HTTP_PORT", port),
    "grpc_port": ("GRPC_PORT", port),
    "metrics_port": ("METRICS_PORT", port),
    "exit_timeout": ("EXIT_TIMEOUT", exit_timeout),
    "ready_within": ("READY_WITHIN", count_or_seconds),
    "max_restarts": ("MAX_RESTARTS", count_or_seconds),
    "ssh_port": ("SSH_PORT", port),
    "address": ("HTTP_ADDRESS", str),
    "ready_file": ("READY_FILE", Path),
    "interface": ("INTERFACE", str),
    "hosts": ("HOSTS", str),
    "ssh_args": ("SSH_ARGS", str),
}
"""Option -> (variable of start.sh, type of its value)."""


def take_start_variables(args: argparse.Namespace, options: Iterable[str] = START_VARIABLES) -> None:
    """Set those of `options` that the verb has and the command line left out to the values of start.sh's variables.

    :raises ToolError: when variables have a wrong value; all of them are named.
    """
    problems = []
    for option in options:
        variable, parsed = START_VARIABLES[option]
        text = os.environ.get(variable)
        if text and getattr(args, option, text) is None:
            try:
                setattr(args, option, parsed(text))
            except argparse.ArgumentTypeError as error:
                problems.append(f"{variable}: {error}")
    if problems:
        raise ToolError("; ".join(problems), exit_code=2)
