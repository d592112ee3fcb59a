"""One line on stderr that says how far something is: drawn again on a terminal, printed now and then otherwise."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable

from deepseek_triton_tools.terminal.output_streams import complain, printable

_REDRAW_S = 0.1


class StatusLine:
    """
    :param plain_s: between two lines where there is no terminal; the first comes after as much.
    """

    def __init__(self, plain_s: float) -> None:
        self.is_terminal = sys.stderr.isatty()
        self._period_s = _REDRAW_S if self.is_terminal else plain_s
        # On a terminal it is there at once.
        self._shown_s = float("-inf") if self.is_terminal else time.monotonic()

    def show(self, line: Callable[[], str]) -> None:
        """Say where it is; `line` is called when it is time."""
        now = time.monotonic()
        if now - self._shown_s <= self._period_s:
            return
        self._shown_s = now
        if self.is_terminal:
            # One column less than there are: a full line wraps on some terminals.
            self._write(f"\r\x1b[K{printable(line())[: shutil.get_terminal_size().columns - 1]}")
        else:
            complain(line())

    def say(self, text: str) -> None:
        """A line of its own, which stays."""
        self.clear()
        complain(text)

    def clear(self) -> None:
        """Leave the terminal's line to others."""
        if self.is_terminal:
            self._write("\r\x1b[K")
            self._shown_s = float("-inf")

    def _write(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()


def clock(seconds: float) -> str:
    """0:07:30"""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
