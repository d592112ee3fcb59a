"""Templates of scripts, units and manifests, with @@{name} for a value."""

from __future__ import annotations

import string
from collections.abc import Mapping
from importlib import resources

from deepseek_triton_build.text import LINE_WIDTH, comment_lines

_TOLERATED = 10
"""Columns by which a comment may be longer than WIDTH, because its author chose where the line ends."""


class _Template(string.Template):
    delimiter = "@@"  # none of the languages uses it


def filled(package: str, path: str, values: Mapping[str, str]) -> str:
    """Return the template at `path` in the folder `templates` of `package`, with its values."""
    text = resources.files(package).joinpath("templates", *path.split("/")).read_text("utf-8")
    return _Template(text).substitute(values)


def wrapped(text: str) -> str:
    """Return `text` with the comments wrapped that a value has made too long. The last line ends with a newline."""
    return "".join(f"{line}\n" for given in text.splitlines() for line in _wrapped(given))


def _wrapped(line: str) -> list[str]:
    text = line.lstrip()
    # An indented line within a comment is a command to be copied, so it stays on one line.
    if len(line) <= LINE_WIDTH + _TOLERATED or not text.startswith("# ") or text.startswith("#  "):
        return [line]
    return comment_lines(text[2:], line[: len(line) - len(text)])
