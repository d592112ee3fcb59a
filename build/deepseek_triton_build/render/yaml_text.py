"""Comments, and settings as YAML, for every file that is rendered."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import yaml

from deepseek_triton_build.data.planned_settings import Setting

WIDTH = 110
"""Characters in a line, as far as words and values can be broken."""


def comment(text: str, indent: str = "") -> list[str]:
    """Return `text` as the lines of a comment. YAML, protobuf and shell have the same comments."""
    wrapped = textwrap.wrap(
        one_line(" ".join(text.split())), WIDTH - len(indent), break_long_words=False, break_on_hyphens=False
    )
    return [f"{indent}# {line}" for line in wrapped]


def one_line(text: str) -> str:
    """Return `text` with a question mark for every character that can't be printed.

    A user's path may hold any character. Some of them would end the line of a comment.
    """
    return "".join(character if character.isprintable() else "?" for character in text)


def yaml_lines(settings: Iterable[Setting]) -> list[str]:
    """Return `settings` as nested sections. A reason stands above the first of the lines that it is for."""
    return list(_section([(setting.key.split("."), setting) for setting in settings], indent=""))


_Row = tuple[Sequence[str], Setting]
"""The names of a setting's path below the section that is written, and the setting."""


def _section(rows: list[_Row], indent: str) -> Iterator[str]:
    above = ""
    for name, members in _by_name(rows):
        if any(path for path, _ in members):
            yield f"{indent}{name}:"
            yield from _section(members, indent + "  ")
            above = ""
            continue
        [(_, setting)] = members
        if setting.comment != above:
            yield from comment(setting.comment, indent)
            above = setting.comment
        yield from _entry(name, setting.value, indent)


def _by_name(rows: list[_Row]) -> Iterable[tuple[str, list[_Row]]]:
    """Group the rows of a section by their next name, in the order of first use, so that no section is opened twice."""
    named: dict[str, list[_Row]] = {}
    for (name, *rest), setting in rows:
        named.setdefault(name, []).append((rest, setting))
    return named.items()


def _entry(name: str, value: Any, indent: str) -> Iterator[str]:
    line = f"{indent}{name}: {flow(value)}"
    if len(line) <= WIDTH or not isinstance(value, list | tuple | dict):
        yield line
        return
    if isinstance(value, list | tuple) and all(isinstance(item, list | tuple) for item in value):
        yield f"{indent}{name}:"
        yield from _wrapped(value, indent + "  ")
        return
    block = yaml.safe_dump(_plain(value), default_flow_style=False, sort_keys=False, width=math.inf)
    yield f"{indent}{name}:"
    yield from textwrap.indent(block, indent + "  ").splitlines()


def _wrapped(items: Iterable[Any], indent: str) -> Iterator[str]:
    """Yield a list of lists in flow style, with as many of them on a line as fit."""
    line = f"{indent}["
    for number, item in enumerate(map(flow, items)):
        if number and len(f"{line}, {item}") >= WIDTH:
            yield f"{line},"
            line = f"{indent} {item}"
        else:
            line += f", {item}" if number else item
    yield f"{line}]"


def flow(value: Any) -> str:
    """Return `value` as YAML on one line. It is dumped as the only item of a list, and the brackets are cut off."""
    return yaml.safe_dump([_plain(value)], default_flow_style=True, sort_keys=False, width=math.inf).strip()[1:-1]


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
