"""One line of progress on stderr: drawn again and again on a terminal, printed now and then elsewhere."""

import sys
import time
from collections.abc import Callable

from deepseek_triton_tools.terminal.output_streams import can_redraw, columns, complain, printable

_REDRAW_S = 0.1


class StatusLine:
    def __init__(self, plain_s: float = 10.0) -> None:
        """`plain_s`: where stderr is no terminal, seconds before the first line and between two lines."""
        self.is_terminal = can_redraw(sys.stderr)
        self._period_s = _REDRAW_S if self.is_terminal else plain_s
        # On a terminal the line is drawn at once.
        self._shown_s = float("-inf") if self.is_terminal else time.monotonic()

    def show(self, line: Callable[[], str]) -> None:
        """Show the progress if it is time to. Only then `line` is called for the text."""
        now = time.monotonic()
        if now - self._shown_s <= self._period_s:
            return
        self._shown_s = now
        if self.is_terminal:
            # One column less than the terminal has, because a full line wraps on some terminals.
            self._write(f"\r\x1b[K{_fitted(printable(line()), columns(sys.stderr) - 1)}")
        else:
            complain(line())

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self.clear()
        complain(text)

    def clear(self) -> None:
        """Empty the terminal's line, for other output."""
        if self.is_terminal:
            self._write("\r\x1b[K")
            self._shown_s = float("-inf")

    def _write(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()


def _fitted(text: str, width: int) -> str:
    """Return as many whole words of `text` as there is room for."""
    if len(text) <= width:
        return text
    words, blank, _ = text[: width - 1].rpartition(" ")
    return f"{words.rstrip() if blank else text[: width - 2]} …"


def clock(seconds: float) -> str:
    """Write a duration such as 0:07:30."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
