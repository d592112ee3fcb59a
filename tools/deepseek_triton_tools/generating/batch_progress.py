"""The progress of many requests, on stderr."""

from __future__ import annotations

import time

from deepseek_triton_tools.terminal.status_line import StatusLine, clock


class BatchProgress:
    def __init__(self, total: int, done: int) -> None:
        """`done`: how many of the `total` rows an earlier run has answered."""
        self._total = total
        self._before = self.done = done
        self.failed = 0
        self._num_tokens = 0
        self._started = time.monotonic()
        self._status = StatusLine()
        if self._status.is_terminal:
            self._status.show(self._line)

    @property
    def answered(self) -> int:
        """Rows that this run has answered, failed ones not counted."""
        return self.done - self._before - self.failed

    def count_answered(self, num_tokens: int | None) -> None:
        """`num_tokens`: those of the answer; None where the server doesn't count them."""
        self.done += 1
        self._num_tokens += num_tokens or 0
        self._status.show(self._line)

    def count_failed(self) -> None:
        self.done += 1
        self.failed += 1
        self._status.show(self._line)

    def clear(self) -> None:
        """Empty the terminal's line, for other output."""
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
        done_now = self.done - self._before
        elapsed = time.monotonic() - self._started
        eta = f", {clock(elapsed / done_now * left)} left" if done_now and left else ""
        return f"{self.done}/{self._total} done, {self.failed} failed, {self._rate():,.0f} tokens/s{eta}"

    def _rate(self) -> float:
        return self._num_tokens / max(time.monotonic() - self._started, 1e-9)
