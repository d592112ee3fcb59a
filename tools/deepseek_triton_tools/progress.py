"""How far a batch is, on stderr: one line that is drawn again on a terminal, a plain one now and then otherwise."""

from __future__ import annotations

import shutil
import sys
import time

from deepseek_triton_tools.streams import complain

_REDRAW_S = 0.1
_PLAIN_S = 10.0


class Progress:
    """Of `total` rows, of which `done` were answered by an earlier run."""

    def __init__(self, total: int, done: int) -> None:
        self._total = total
        self._before = self.done = done
        self.failed = 0
        self._num_tokens = 0
        self._started = self._shown = time.monotonic()
        self._is_terminal = sys.stderr.isatty()
        if self._is_terminal:
            self._draw()

    @property
    def answered(self) -> int:
        """By this run."""
        return self.done - self._before - self.failed

    def row(self, num_tokens: int | None, *, failed: bool) -> None:
        self.done += 1
        self.failed += failed
        self._num_tokens += num_tokens or 0
        if time.monotonic() - self._shown > (_REDRAW_S if self._is_terminal else _PLAIN_S):
            self._shown = time.monotonic()
            if self._is_terminal:
                self._draw()
            else:
                complain(self._line())

    def clear(self) -> None:
        """Leave the terminal's line to others."""
        if self._is_terminal:
            self._write("\r\x1b[K")

    def summary(self) -> str:
        elapsed = time.monotonic() - self._started
        failed = f", {self.failed} failed" if self.failed else ""
        before = f" ({self._before} by an earlier run)" if self._before else ""
        return (
            f"{self.done} of {self._total} rows done{before}{failed}; "
            f"{self._num_tokens:,} tokens in {elapsed:.1f} s, {self._rate():,.0f} tokens/s"
        )

    def _line(self) -> str:
        left = self._total - self.done
        fresh = self.done - self._before
        elapsed = time.monotonic() - self._started
        eta = f", {_clock(elapsed / fresh * left)} left" if fresh and left else ""
        return f"{self.done}/{self._total} done, {self.failed} failed, {self._rate():,.0f} tokens/s{eta}"

    def _rate(self) -> float:
        return self._num_tokens / max(time.monotonic() - self._started, 1e-9)

    def _draw(self) -> None:
        # One column less than there are: a full line wraps on some terminals.
        self._write(f"\r\x1b[K{self._line()[: shutil.get_terminal_size().columns - 1]}")

    def _write(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
