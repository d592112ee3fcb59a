"""The templates of `launch --with kubernetes`, filled in, and pieces of YAML."""

from __future__ import annotations

import json
import string
import textwrap
from collections.abc import Iterable, Mapping
from importlib import resources

from deepseek_triton_build.render.text import WIDTH, comment


class _Template(string.Template):
    delimiter = "@@"  # in neither YAML nor a shell


def filled(name: str, values: Mapping[str, str]) -> str:
    """:param name: of a file in templates/kubernetes."""
    text = (resources.files(__package__) / "templates" / "kubernetes" / name).read_text("utf-8")
    return _Template(text).substitute(values)


def block(text: str, indent: int) -> str:
    """Lines for a place in a template that is a line of its own: indented, and without the last line's end."""
    return textwrap.indent(text, " " * indent).rstrip("\n")


def wrapped(text: str) -> str:
    """Comments that have become long, over several lines."""
    return "".join(f"{line}\n" for given in text.splitlines() for line in _wrapped(given))


def _wrapped(line: str) -> list[str]:
    text = line.lstrip()
    # What is indented within a comment is a command, to be copied.
    if len(line) <= WIDTH + 10 or not text.startswith("# ") or text.startswith("#  "):
        return [line]
    return comment(text[2:], line[: len(line) - len(text)])


def mapping(values: Mapping[str, object]) -> str:
    """On one line. JSON's scalars are YAML's."""
    return "{" + ", ".join(f"{_key(key)}: {_flow(value)}" for key, value in values.items()) + "}"


def _flow(value: object) -> str:
    return mapping(value) if isinstance(value, Mapping) else json.dumps(value)


def _key(key: str) -> str:
    return key if all(c.isalnum() or c in "._/-" for c in key) and key[0].isalpha() else json.dumps(key)


def items(entries: Iterable[Mapping[str, object] | str], indent: int) -> str:
    """A list, each entry on a line; a text is the comment of what follows."""
    pad = " " * indent
    return "".join(f"{pad}# {entry}\n" if isinstance(entry, str) else f"{pad}- {mapping(entry)}\n" for entry in entries)


def literal(value: str) -> str:
    """For an environment variable or an argument of a container, where $(NAME) would be replaced."""
    return value.replace("$", "$$")
