"""How far a batch is, on stderr."""

from __future__ import annotations

import time

from deepseek_triton_tools.terminal.status_line import StatusLine, clock

_PLAIN_S = 10.0


class BatchProgress:
    """Of `total` rows, of which `done` were answered by an earlier run."""

    def __init__(self, total: int, done: int) -> None:
        self._total = total
        self._before = self.done = done
        self.failed = 0
        self._num_tokens = 0
        self._started = time.monotonic()
        self._status = StatusLine(_PLAIN_S)
        if self._status.is_terminal:
            self._status.show(self._line)

    @property
    def answered(self) -> int:
        """By this run."""
        return self.done - self._before - self.failed

    def row(self, num_tokens: int | None, *, failed: bool) -> None:
        self.done += 1
        self.failed += failed
        self._num_tokens += num_tokens or 0
        self._status.show(self._line)

    def clear(self) -> None:
        """Leave the terminal's line to others."""
        self._status.clear()

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
        eta = f", {clock(elapsed / fresh * left)} left" if fresh and left else ""
        return f"{self.done}/{self._total} done, {self.failed} failed, {self._rate():,.0f} tokens/s{eta}"

    def _rate(self) -> float:
        return self._num_tokens / max(time.monotonic() - self._started, 1e-9)
