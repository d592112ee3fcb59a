"""Templates of scripts, units and manifests, with @@{name} for a value."""

from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from deepseek_triton_build.text import LINE_WIDTH, comment_lines, kept_lines, template_lines, with_values

# Columns by which a comment may be longer than WIDTH, because its author chose where the line ends.
_TOLERATED = 10


def filled(package: str, path: str, values: Mapping[str, Any]) -> str:
    """Return the template at `path` in the folder `templates` of `package`, with its values.

    A line with a list is written once for each entry, and lines from `#if name` to `#else` or `#end` if it is true.
    """
    lines = template_lines(Path(str(resources.files(package))) / "templates" / path)
    return "".join(f"{row}\n" for line in kept_lines(lines, values) for row in with_values(line, values))


def wrapped(text: str) -> str:
    """Return `text` with the comments wrapped that a value has made too long. The last line ends with a newline."""
    return "".join(f"{line}\n" for given in text.splitlines() for line in _wrapped(given))


def _wrapped(line: str) -> list[str]:
    text = line.lstrip()
    # An indented line within a comment is a command to be copied, so it stays on one line.
    if len(line) <= LINE_WIDTH + _TOLERATED or not text.startswith("# ") or text.startswith("#  "):
        return [line]
    return comment_lines(text[2:], line[: len(line) - len(text)])
