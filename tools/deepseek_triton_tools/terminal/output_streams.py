"""The program's own output: readers that leave, disks that are full, and what a terminal would obey."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from deepseek_triton_tools.tool_errors import ToolError


def prepare() -> None:
    """Give what was closed (`>&-`) a place to go, and take names that are not UTF-8."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")


@contextmanager
def to_reader() -> Iterator[None]:
    """Inside, nothing but printing raises OSError, and no other work is done: the reader (head) may leave at any line.

    That is no failure; what follows the block is done all the same.

    :raises ToolError: when stdout takes nothing for another reason.
    """
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        _discard(sys.stdout)
    except OSError as error:
        _discard(sys.stdout)
        raise ToolError(f"the output can't be written: {error.strerror}") from error


def complain(text: str) -> None:
    """One line on stderr, if anybody reads it."""
    try:
        print(printable(text), file=sys.stderr, flush=True)
    except OSError:
        _discard(sys.stderr)


def printable(text: str) -> str:
    """`text` on one line, with nothing in it that a terminal would obey: a name can hold anything."""
    return "".join(c if c.isprintable() or c == "\t" else c.encode("unicode_escape").decode("ascii") for c in text)


def _discard(stream: TextIO) -> None:
    """What is left in the buffer goes nowhere, or it would fail again at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
