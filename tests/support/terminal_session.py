"""The command line at a terminal: a process with a pty as its own, typed into and read."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import subprocess
import sys
import time
from types import TracebackType

CTRL_C, CTRL_D = "\x03", "\x04"
_PATIENCE_S = 60

# The pty becomes the controlling terminal, so that Ctrl-C is a signal, as it is for people.
_IN_A_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, "-m", "deepseek_triton_tools.cli.main", *sys.argv[1:]])
"""


class Terminal:
    """`deepseek-triton *argv` at a terminal; `seen` is everything that it has shown."""

    def __init__(self, *argv: str, **environment: str) -> None:
        self._keyboard, terminal = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", _IN_A_TERMINAL, *argv],
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            start_new_session=True,
            # Wide, so that what is waited for is not broken in two.
            env={**os.environ, "TERM": "xterm", "COLUMNS": "500", **environment},
        )
        os.close(terminal)
        self.seen = ""
        self._read_to = 0

    def type(self, text: str) -> None:
        os.write(self._keyboard, text.encode())

    def read_until(self, text: str, patience_s: float = _PATIENCE_S) -> str:
        """Return what it shows up to `text`, from where the last call ended. Fails when `text` never comes."""
        deadline = time.monotonic() + patience_s
        while (found := self.seen.find(text, self._read_to)) < 0:
            if time.monotonic() > deadline or not self._read():
                raise AssertionError(f"{text!r} never came; it showed {self.seen[self._read_to :]!r}")
        shown = self.seen[self._read_to : found]
        self._read_to = found + len(text)
        return shown

    def press(self, key: str, until: str) -> str:
        """Press `key` until it shows `until`: Python's readline misses a signal between two of its waits."""
        deadline = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline:
            self.type(key)
            with contextlib.suppress(AssertionError):
                return self.read_until(until, patience_s=5)
        raise AssertionError(f"{key!r} brought no {until!r}; it showed {self.seen[self._read_to :]!r}")

    def interrupt(self) -> int:
        """Press Ctrl-C until it ends, and return its exit code. Python misses a signal that comes between its last
        look for one and the wait for the server."""
        deadline = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline:
            self.type(CTRL_C)
            with contextlib.suppress(AssertionError):
                self.read_until("what it never shows", patience_s=5)
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self.process.wait(1)
        raise AssertionError(f"Ctrl-C did not end it; it showed {self.seen!r}")

    def exit_code(self) -> int:
        """When it ends."""
        deadline = time.monotonic() + _PATIENCE_S
        while self._read() and time.monotonic() < deadline:
            pass
        return self.process.wait(_PATIENCE_S)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._keyboard)

    def _read(self) -> bool:
        """False when the terminal has no user left."""
        if not select.select([self._keyboard], [], [], 1)[0]:
            return True
        try:
            data = os.read(self._keyboard, 65536)
        except OSError:  # EIO: Linux's end of a terminal
            return False
        self.seen += data.decode(errors="replace")
        return bool(data)
