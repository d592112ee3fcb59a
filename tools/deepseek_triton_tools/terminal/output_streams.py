"""Standard output and error, whose reader may leave, whose disk may be full, or which may be a terminal."""

import os
import sys
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TextIO

from deepseek_triton_tools.tool_errors import ToolError

NO_LIMIT = sys.maxsize
"""Columns where nothing is wrapped."""


def prepare() -> None:
    """Replace streams that were closed (`>&-`) by /dev/null, and let stdout take names that are not UTF-8."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")


@contextmanager
def to_reader() -> Iterator[None]:
    """A block that prints. Its reader (`head`, say) may leave at any line, which is no failure: the block ends, and the
    program goes on behind it.

    Raises ToolError when stdout can't be written for another reason. An OSError that names no file is taken for one of
    stdout.
    """
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        _discard(sys.stdout)
    except OSError as error:
        if error.filename is not None:
            raise
        _discard(sys.stdout)
        raise ToolError(f"the output can't be written: {error.strerror}") from error


def print_json(document: Mapping[str, Any]) -> None:
    import json

    print(json.dumps(document, indent=2, allow_nan=False))


def complain(text: str) -> None:
    """Print one line on stderr; a terminal gets as many as it takes. Nothing happens when nobody reads it."""
    try:
        print(wrapped(text, columns(sys.stderr)), file=sys.stderr, flush=True)
    except OSError:
        _discard(sys.stderr)


def printable(text: str) -> str:
    """Return `text` on one line, with its control characters written out: a file's name can hold any of them."""
    return "".join(c if c.isprintable() or c == "\t" else c.encode("unicode_escape").decode("ascii") for c in text)


def can_redraw(stream: TextIO) -> bool:
    """Whether `stream` is a terminal that obeys escape sequences."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def has_style(stream: TextIO) -> bool:
    """Whether `stream` shows bold and colours, and the user wants them (NO_COLOR: no-color.org)."""
    return can_redraw(stream) and not os.environ.get("NO_COLOR")


def columns(stream: TextIO) -> int:
    """How many characters a line of the terminal has; NO_LIMIT in a pipe or a file."""
    return terminal_columns(stream) if stream.isatty() else NO_LIMIT


def terminal_columns(stream: TextIO) -> int:
    try:
        return int(os.environ.get("COLUMNS") or 0) or os.get_terminal_size(stream.fileno()).columns or 80
    except (ValueError, OSError):
        return 80


def wrapped(text: str, width: int, *, indent: str = "", hanging: str = "  ") -> str:
    """Return `text`, made printable, in lines of `width` characters (40 or more); it is broken only at blanks."""
    text, width = printable(text), max(40, width)
    if len(indent) + len(text) <= width:
        return indent + text
    return "\n".join(
        textwrap.wrap(
            text,
            width,
            initial_indent=indent,
            subsequent_indent=indent + hanging,
            break_long_words=False,
            break_on_hyphens=False,
        )
    )


def _discard(stream: TextIO) -> None:
    """Send what is left in the buffer to /dev/null. Python would write it at exit, and fail again."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)
