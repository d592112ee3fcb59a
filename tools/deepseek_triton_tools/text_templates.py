"""Texts with @@{values}: scripts, units and manifests. Comments that a value makes long are wrapped."""

from __future__ import annotations

import string
from collections.abc import Mapping
from importlib import resources

from deepseek_triton_build.render.yaml_text import WIDTH, comment

_TOLERATED = 10
"""A line may be so much longer than WIDTH: where it ends was chosen by hand."""


class _Template(string.Template):
    delimiter = "@@"  # in none of the languages


def filled(package: str, path: str, values: Mapping[str, str]) -> str:
    """
    :param package: in whose folder `templates` it is.
    :param path: within that folder.
    """
    text = resources.files(package).joinpath("templates", *path.split("/")).read_text("utf-8")
    return _Template(text).substitute(values)


def wrapped(text: str) -> str:
    """`text` with comments that have become long over several lines. The last line is ended too."""
    return "".join(f"{line}\n" for given in text.splitlines() for line in _wrapped(given))


def _wrapped(line: str) -> list[str]:
    text = line.lstrip()
    # What is indented within a comment is a command, to be copied.
    if len(line) <= WIDTH + _TOLERATED or not text.startswith("# ") or text.startswith("#  "):
        return [line]
    return comment(text[2:], line[: len(line) - len(text)])
