"""The templates of `launch kubernetes`, filled in, and pieces of YAML."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Mapping

from deepseek_triton_tools import text_templates


def filled(name: str, values: Mapping[str, str]) -> str:
    """:param name: of a file in templates/kubernetes."""
    return text_templates.filled(__package__, f"kubernetes/{name}", values)


def block(text: str, indent: int) -> str:
    """Lines for a place in a template that is a line of its own: indented, and without the last line's end."""
    return textwrap.indent(text, " " * indent).rstrip("\n")


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
