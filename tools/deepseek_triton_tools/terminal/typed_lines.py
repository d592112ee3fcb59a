"""The lines of a chat: typed at a terminal, with line editing and a history, or read from a pipe."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from deepseek_triton_tools.terminal.output_streams import complain
from deepseek_triton_tools.tool_errors import ToolError

_HISTORY_LINES = 1000

ReadLine = Callable[[str], str]
"""Shows its argument as a prompt if there is a terminal, and returns a line. Raises EOFError at the end."""


def is_interactive() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def turns(read: ReadLine) -> Iterator[str]:
    """Yield what the user says, one turn after the other. A line that ends in a backslash goes on in the next one."""
    while True:
        try:
            lines = [read("> ")]
            while lines[-1].endswith("\\"):
                lines[-1] = lines[-1][:-1]
                lines.append(read("  "))
        except EOFError:
            return
        except KeyboardInterrupt:
            if not is_interactive():
                raise
            print()  # the line is dropped
            continue
        yield "\n".join(lines)


def piped(_: str) -> str:
    """Read a line from a pipe. Raises ToolError when it is not UTF-8."""
    line = sys.stdin.buffer.readline()
    if not line:
        raise EOFError
    try:
        return line.decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise ToolError(f"standard input is not UTF-8: {error.reason}") from error


@contextmanager
def edited() -> Iterator[ReadLine]:
    """Yield `input`, with line editing and a history that is kept for the next chat."""
    try:
        import readline
    except ImportError:  # a Python built without it
        yield input
        return
    readline.parse_and_bind("set enable-bracketed-paste on")  # makes a paste one turn; Python switches it off
    path = _history_file()
    with contextlib.suppress(OSError):  # a history that can't be read is an empty one
        readline.read_history_file(path)
    readline.set_history_length(_HISTORY_LINES)
    try:
        yield input
    finally:
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
            path.chmod(0o600)
            readline.write_history_file(path)
        except OSError as error:
            complain(f"the history can't be kept in {path}: {error.strerror}")


def _history_file() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state"
    return Path(state) / "deepseek-triton" / "chat_history"
