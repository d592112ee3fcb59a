"""Time limits of a request, and the thread that holds it to them."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, fields

from deepseek_triton_client._errors import InvalidRequest

# Sockets count their time limit in milliseconds, in 32 bits: 24 days.
_LONGEST_S = 2**31 // 1000 - 1


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """In seconds; None is no limit. DeadlineExceeded when one runs out, ServerUnavailable for `connect`.

    A cold server or a long queue can keep the first token back for minutes, and a long answer takes as long as it
    takes: only connecting is limited unless asked.
    """

    connect: float | None = 10.0
    """To reach the server; also for each step of `ready()` and `metadata()`, which have no tokens to wait for."""
    first_token: float | None = None
    """From sending the request to its first chunk. Streams only."""
    between_tokens: float | None = None
    """Waiting for each later chunk; the time the caller spends between chunks does not count. Streams only."""
    total: float | None = None
    """From sending the request to its end, the caller's own time included."""

    def __post_init__(self) -> None:
        for field in fields(self):
            limit = getattr(self, field.name)
            if limit is not None and not 0 < limit <= _LONGEST_S:
                raise InvalidRequest(f"timeouts.{field.name}: expected 0 < seconds <= {_LONGEST_S}, got {limit!r}")

    def until_first_token(self) -> float | None:
        """The tighter of the two limits that hold from the start."""
        return min((limit for limit in (self.first_token, self.total) if limit is not None), default=None)


@dataclass(frozen=True, order=True)
class _Due:
    at: float
    limit: str = ""


_NEVER = _Due(math.inf)


class Watchdog:
    """Calls `interrupt` once, from a thread of its own, when a limit runs out.

    Neither a blocked socket read nor a blocked gRPC stream takes a time limit that changes from token to token; both
    can be interrupted from another thread. Without limits there is no thread.

    The reading thread owns the object: `expect`, `relax` and `stop` are its calls. `_due`, `_wakes_at` and `_stopped`
    are shared under `_changed`; `expired` is written by the watching thread before it interrupts.
    """

    def __init__(self, timeouts: Timeouts, *, started: float, interrupt: Callable[[], None]) -> None:
        self.expired: str | None = None
        """The name of the limit that ran out."""
        self._timeouts = timeouts
        self._interrupt = interrupt
        self._first = _due(started, timeouts.first_token, "first_token")
        self._end = _due(started, timeouts.total, "total")
        self._due = min(self._first, self._end)
        self._wakes_at = -math.inf
        self._stopped = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        if (timeouts.first_token, timeouts.between_tokens, timeouts.total) != (None, None, None):
            self._thread = threading.Thread(target=self._watch, name="deepseek-triton-watchdog", daemon=True)
            self._thread.start()

    def expect(self, *, first: bool) -> None:
        """The caller begins to wait for a token."""
        if self._thread is not None:
            wait = self._first if first else _due(time.monotonic(), self._timeouts.between_tokens, "between_tokens")
            self._set(min(wait, self._end))

    def relax(self) -> None:
        """The token came: until the next wait only the total counts."""
        if self._thread is not None:
            self._set(self._end)

    def stop(self) -> None:
        """No interrupt happens after this returns."""
        if self._thread is not None:
            with self._changed:
                self._stopped = True
                self._changed.notify()
            self._thread.join()
            self._thread = None

    def _set(self, due: _Due) -> None:
        with self._changed:
            self._due = due
            if due.at < self._wakes_at:  # a later one it finds by itself, so most tokens don't wake the thread
                self._changed.notify()

    def _watch(self) -> None:
        with self._changed:
            while not self._stopped and (left := self._due.at - time.monotonic()) > 0:
                self._wakes_at = self._due.at
                self._changed.wait(None if math.isinf(left) else left)
            if self._stopped:
                return
            self.expired = self._due.limit
        self._interrupt()


def _due(start: float, seconds: float | None, limit: str) -> _Due:
    return _NEVER if seconds is None else _Due(start + seconds, limit)
