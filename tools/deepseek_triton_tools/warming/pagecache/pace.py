"""A limit on bytes a second that threads share."""

from __future__ import annotations

import threading
import time


class Pace:
    """Makes threads wait so that together they read no more than `rate` bytes a second. None: no limit."""

    def __init__(self, rate: float | None) -> None:
        self._rate = rate
        self._lock = threading.Lock()
        self._next_s = 0.0

    def wait(self, num_bytes: int, stop: threading.Event) -> None:
        """Wait until `num_bytes` may be read, or `stop` is set."""
        if self._rate is None:
            return
        with self._lock:
            now = time.monotonic()
            begin = max(now, self._next_s)
            self._next_s = begin + num_bytes / self._rate
        stop.wait(begin - now)
