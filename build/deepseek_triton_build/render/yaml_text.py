"""What the renderings share: comments and settings as YAML."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import yaml

from deepseek_triton_build.data.planned_settings import Setting

WIDTH = 110


def comment(text: str, indent: str = "") -> list[str]:
    """`text` as lines of a comment, in YAML, protobuf and shell alike."""
    wrapped = textwrap.wrap(
        one_line(" ".join(text.split())), WIDTH - len(indent), break_long_words=False, break_on_hyphens=False
    )
    return [f"{indent}# {line}" for line in wrapped]


def one_line(text: str) -> str:
    """`text` with a question mark for whatever might end a line: a user's path can hold anything, a comment can't."""
    return "".join(character if character.isprintable() else "?" for character in text)


def yaml_lines(settings: Iterable[Setting]) -> list[str]:
    """`settings` as nested sections, the reason above each line, or above the first of several that share it."""
    return list(_section([(setting.key.split("."), setting) for setting in settings], indent=""))


_Row = tuple[Sequence[str], Setting]
"""What is left of a setting's path inside a section, and the setting."""


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
    """A section's rows by their next key, each where it first comes: a section is never opened twice."""
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
    """A list of lists in flow style, as many on a line as fit."""
    line = f"{indent}["
    for number, item in enumerate(map(flow, items)):
        if number and len(f"{line}, {item}") >= WIDTH:
            yield f"{line},"
            line = f"{indent} {item}"
        else:
            line += f", {item}" if number else item
    yield f"{line}]"


def flow(value: Any) -> str:
    """`value` as YAML on one line: dumped as the one item of a list in flow style, less the brackets."""
    return yaml.safe_dump([_plain(value)], default_flow_style=True, sort_keys=False, width=math.inf).strip()[1:-1]


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
