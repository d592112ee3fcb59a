"""Where a chat's lines come from: people at a terminal, with line editing and a history, or a pipe."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from deepseek_triton_tools.terminal.output_streams import complain
from deepseek_triton_tools.tool_errors import ToolError

_MOST_LINES = 1000
"""Of the history."""

Prompt = Callable[[str], str]
"""Shows its argument where somebody looks; returns a line. EOFError at the end."""


def is_interactive() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def turns(read: Prompt) -> Iterator[str]:
    """What is said, one turn after the other: a line that ends in a backslash goes on in the next one."""
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
    """:raises ToolError: for what is no text."""
    line = sys.stdin.buffer.readline()
    if not line:
        raise EOFError
    try:
        return line.decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise ToolError(f"standard input is not UTF-8: {error.reason}") from error


@contextmanager
def edited() -> Iterator[Prompt]:
    """Lines as `input` reads them, which readline lets people edit and find again the next time."""
    try:
        import readline
    except ImportError:  # a Python built without it
        yield input
        return
    readline.parse_and_bind("set enable-bracketed-paste on")  # which Python switches off: a paste is one turn then
    path = _history_file()
    with contextlib.suppress(OSError):  # a history that can't be read is an empty one
        readline.read_history_file(path)
    readline.set_history_length(_MOST_LINES)
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
