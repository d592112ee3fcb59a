"""Time limits of requests: one thread watches those of all blocking requests; an event loop has a timer for each.

A blocked socket read and a gRPC stream do not accept a time limit that changes from token to token, but both can be
interrupted. Requests without limits use `NO_WATCHDOG`, so that they need no thread and no timer.
"""

from __future__ import annotations

import _thread
import math
import os
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from deepseek_triton_client._core.runtime import Deadlines

if TYPE_CHECKING:
    import asyncio  # importing asyncio takes longer than importing all of this package, and blocking clients do without

_Due = tuple[float, str]
"""A moment of time.monotonic(), and the name of the field of `Timeouts` that runs out then."""
_NEVER: _Due = (math.inf, "")

_GRACE_S = 0.02
"""Seconds to handle what arrived while other code blocked the event loop, before a limit counts as run out."""


class _NoWatchdog:
    """The watchdog of requests without limits."""

    expired: str | None = None

    def expect(self, *, first: bool) -> None:
        pass

    def relax(self) -> None:
        pass

    def stop(self) -> None:
        pass


NO_WATCHDOG = _NoWatchdog()


class _Limits:
    """Computes when the limits of a request run out."""

    def __init__(self, deadlines: Deadlines) -> None:
        self._between_s = deadlines.between_tokens_s
        self.end = _NEVER if deadlines.end is None else (deadlines.end, "total")
        first = _NEVER if deadlines.first_token is None else (deadlines.first_token, "first_token")
        self.first = min(first, self.end)

    def next(self, *, first: bool) -> _Due:
        """Return the limit that ends a wait which begins now."""
        if first:
            return self.first
        if self._between_s is None:
            return self.end
        return min((time.monotonic() + self._between_s, "between_tokens"), self.end)


class ThreadWatchdog:
    """Calls `interrupt` once when a limit runs out. The call comes from the thread of `_WatchdogThread`.

    `expect`, `relax` and `stop` are called by the reading thread. An exception such as KeyboardInterrupt may land in
    any of them: `stop` can be called again then, and nothing remains of a watchdog that is no longer referenced.
    """

    def __init__(self, deadlines: Deadlines, interrupt: Callable[[], None]) -> None:
        self.expired: str | None = None
        self._limits = _Limits(deadlines)
        self._interrupt = interrupt
        self._due = self._limits.first
        self._stopped = False
        # Reentrant, because a signal handler may call `stop` while its thread is in `stop`.
        self._lock = threading.RLock()
        self._ref: weakref.ref[ThreadWatchdog] | None = None

    def expect(self, *, first: bool) -> None:
        self._set(self._limits.next(first=first))

    def relax(self) -> None:
        self._set(self._limits.end)

    def stop(self) -> None:
        with self._lock:  # waits for an interrupt that is being made
            self._stopped = True
        if self._ref is not None:
            _watchdog_thread.watched.discard(self._ref)

    def _set(self, due: _Due) -> None:
        self._due = due
        if self._stopped or self.expired is not None:
            return
        if self._ref is None:
            # A bound method of C: Python swallows exceptions that are raised in such a callback, KeyboardInterrupt too.
            self._ref = weakref.ref(self, _watchdog_thread.watched.discard)
        _watchdog_thread.watch(self._ref, due[0])

    def check(self) -> float:
        """Interrupt if a limit has run out. Called by the watchdog thread; returns the moment of the next check."""
        with self._lock:
            if self._stopped or self.expired is not None:
                return math.inf
            moment, limit = self._due
            if moment > time.monotonic():
                return moment
            self.expired = limit
            self._interrupt()
            return math.inf


class _WatchdogThread:
    """The one thread of the process that checks the limits of all blocking requests.

    A thread for each request would take longer to start than all else here. Every lock is one of C, acquired by `with`
    or held for ever, and the thread is started by one call of C: an exception such as KeyboardInterrupt lands between
    two steps of Python code, and threading's Condition, Event and Thread are written in Python.
    """

    def __init__(self) -> None:
        # Weak, so that a stream that is dropped ends its request.
        self.watched: set[weakref.ref[ThreadWatchdog]] = set()
        self._wakes_at = math.inf
        self._wake_up = threading.Lock()
        self._wake_up.acquire()
        self._running_lock = threading.Lock()

    def watch(self, watchdog: weakref.ref[ThreadWatchdog], moment: float) -> None:
        """Check this watchdog at `moment`, which may differ from the moment given before."""
        self.watched.add(watchdog)
        if moment < self._wakes_at:  # the thread finds a later moment by itself, so most tokens do not wake it
            with suppress(RuntimeError):  # it has been woken already
                self._wake_up.release()
        if not self._running_lock.locked():
            _thread.start_new_thread(self._run, ())

    def _run(self) -> None:
        if self._running_lock.acquire(blocking=False):  # two threads may each have started one
            try:
                while True:
                    self._wakes_at = moment = self._check_all()
                    left_s = moment - time.monotonic()
                    self._wake_up.acquire(timeout=min(max(left_s, 0.0), threading.TIMEOUT_MAX))
            finally:
                self._running_lock.release()

    def _check_all(self) -> float:
        """Check all watchdogs. Returns the moment when the next limit can run out."""
        self._wakes_at = math.inf  # a watchdog that is added meanwhile wakes the thread
        moments = [watchdog.check() for ref in list(self.watched) if (watchdog := ref()) is not None]
        return min(moments, default=math.inf)


_watchdog_thread = _WatchdogThread()


def _after_fork() -> None:
    """Start afresh in a forked child: it has no copy of the thread, and may have a copy of a held lock."""
    global _watchdog_thread
    _watchdog_thread = _WatchdogThread()


os.register_at_fork(after_in_child=_after_fork)


class LoopWatchdog:
    """Calls `interrupt` once when a limit runs out. Everything here happens on the event loop's thread."""

    def __init__(self, deadlines: Deadlines, interrupt: Callable[[], None], loop: asyncio.AbstractEventLoop) -> None:
        self.expired: str | None = None
        self._limits = _Limits(deadlines)
        self._interrupt = interrupt
        self._loop = loop
        self._due = _NEVER
        self._overdue: _Due | None = None
        self._wakes_at = math.inf
        self._timer: asyncio.TimerHandle | None = None
        self._set(self._limits.first)

    def expect(self, *, first: bool) -> None:
        self._set(self._limits.next(first=first))

    def relax(self) -> None:
        self._set(self._limits.end)

    def stop(self) -> None:
        self._wakes_at = -math.inf  # so that no timer is set again
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set(self, due: _Due) -> None:
        self._due = due
        if due[0] < self._wakes_at:  # the timer finds a later moment when it fires, so most tokens do not move it
            self._arm(due[0])

    def _arm(self, moment: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._wakes_at = moment
        # Relative, because the loop has a clock of its own.
        self._timer = self._loop.call_later(max(0.0, moment - time.monotonic()), self._fire)

    def _fire(self) -> None:
        self._timer = None
        self._wakes_at = math.inf
        now = time.monotonic()
        if self._due[0] > now:
            self._set(self._due)
            return
        if self._due != self._overdue:  # The token may have arrived already, delayed by what delayed this timer
            self._overdue = self._due
            self._arm(now + _GRACE_S)
            return
        self.expired = self._due[1]
        self._wakes_at = -math.inf  # interrupts only once
        self._interrupt()
