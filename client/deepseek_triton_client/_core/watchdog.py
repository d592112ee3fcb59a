"""Time limits of a request, and who holds it to them: a thread for all of them, or a timer of an event loop.

Neither a blocked socket read nor a gRPC stream takes a time limit that changes from token to token; both can be
interrupted. Without limits `NO_WATCHDOG` does, so there is no thread and no timer.
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
    import asyncio  # its import takes longer than all of this package, and blocking clients do without

_Due = tuple[float, str]
"""A moment of time.monotonic(), and the field of `Timeouts` that runs out then."""
_NEVER: _Due = (math.inf, "")

_GRACE_S = 0.02
"""So long what has arrived while other code blocked the event loop has to be handled."""


class _NoWatchdog:
    """For requests without limits."""

    expired: str | None = None

    def expect(self, *, first: bool) -> None:
        pass

    def relax(self) -> None:
        pass

    def stop(self) -> None:
        pass


NO_WATCHDOG = _NoWatchdog()


class _Limits:
    """When a request's limits run out."""

    def __init__(self, deadlines: Deadlines) -> None:
        self._between_s = deadlines.between_tokens_s
        self.end = _NEVER if deadlines.end is None else (deadlines.end, "total")
        first = _NEVER if deadlines.first_token is None else (deadlines.first_token, "first_token")
        self.first = min(first, self.end)

    def next(self, *, first: bool) -> _Due:
        """Of a wait that begins now."""
        if first:
            return self.first
        if self._between_s is None:
            return self.end
        return min((time.monotonic() + self._between_s, "between_tokens"), self.end)


class ThreadWatchdog:
    """Calls `interrupt` once, from the sentry's thread, when a limit runs out.

    `expect`, `relax` and `stop` are the reading thread's calls. It may be interrupted in any of them: `stop` can be
    called again then, and nothing is left of a watchdog that nobody holds any more.
    """

    def __init__(self, deadlines: Deadlines, interrupt: Callable[[], None]) -> None:
        self.expired: str | None = None
        self._limits = _Limits(deadlines)
        self._interrupt = interrupt
        self._due = self._limits.first
        self._stopped = False
        self._acting = threading.RLock()  # reentrant, for a signal's handler may stop what its thread is stopping
        self._ref: weakref.ref[ThreadWatchdog] | None = None

    def expect(self, *, first: bool) -> None:
        self._set(self._limits.next(first=first))

    def relax(self) -> None:
        self._set(self._limits.end)

    def stop(self) -> None:
        with self._acting:  # an interrupt that is under way comes first
            self._stopped = True
        if self._ref is not None:
            _sentry.watched.discard(self._ref)

    def _set(self, due: _Due) -> None:
        self._due = due
        if self._stopped or self.expired is not None:
            return
        if self._ref is None:
            # A method of C, because Python swallows what is raised in such a callback, Ctrl-C too.
            self._ref = weakref.ref(self, _sentry.watched.discard)
        _sentry.watch(self._ref, due[0])

    def act(self) -> float:
        """For the sentry: interrupts if a limit has run out. Returns the moment when it wants to be asked again."""
        with self._acting:
            if self._stopped or self.expired is not None:
                return math.inf
            moment, limit = self._due
            if moment > time.monotonic():
                return moment
            self.expired = limit
            self._interrupt()
            return math.inf


class _Sentry:
    """The one thread of the process that holds blocking requests to their limits: starting one for each request would
    take longer than all else here.

    Every lock is one of C, taken by `with` or for ever, and the thread is started by one call of C: an interrupt such
    as Ctrl-C lands between two steps of Python code, and threading's Condition, Event and Thread are written in Python.
    """

    def __init__(self) -> None:
        self.watched: set[weakref.ref[ThreadWatchdog]] = set()  # weak: who drops a stream has its request end
        self._wakes_at = math.inf
        self._alarm = threading.Lock()
        self._alarm.acquire()
        self._on_duty = threading.Lock()

    def watch(self, watchdog: weakref.ref[ThreadWatchdog], moment: float) -> None:
        """`moment` may be another one than before."""
        self.watched.add(watchdog)
        if moment < self._wakes_at:  # a later one it finds by itself, so most tokens don't wake the thread
            with suppress(RuntimeError):  # it has been woken already
                self._alarm.release()
        if not self._on_duty.locked():
            _thread.start_new_thread(self._stand_guard, ())

    def _stand_guard(self) -> None:
        if self._on_duty.acquire(blocking=False):  # two threads may have started one each
            try:
                while True:
                    self._wakes_at = moment = self._look_round()
                    left_s = moment - time.monotonic()
                    self._alarm.acquire(timeout=min(max(left_s, 0.0), threading.TIMEOUT_MAX))
            finally:
                self._on_duty.release()

    def _look_round(self) -> float:
        """Returns the moment when the next limit can run out."""
        self._wakes_at = math.inf  # who comes meanwhile raises the alarm
        moments = [watchdog.act() for ref in list(self.watched) if (watchdog := ref()) is not None]
        return min(moments, default=math.inf)


_sentry = _Sentry()


def _after_fork() -> None:
    """The thread is the parent's alone, and a lock may have been copied while it was held."""
    global _sentry
    _sentry = _Sentry()


os.register_at_fork(after_in_child=_after_fork)


class LoopWatchdog:
    """Calls `interrupt` once, on the loop's thread, when a limit runs out. All its methods are for that thread."""

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
        self._wakes_at = -math.inf  # no timer is set again
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set(self, due: _Due) -> None:
        self._due = due
        if due[0] < self._wakes_at:  # a later one the timer finds when it fires, so most tokens don't move it
            self._arm(due[0])

    def _arm(self, moment: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._wakes_at = moment
        # Relative, for a loop's clock is its own.
        self._timer = self._loop.call_later(max(0.0, moment - time.monotonic()), self._fire)

    def _fire(self) -> None:
        self._timer = None
        self._wakes_at = math.inf
        now = time.monotonic()
        if self._due[0] > now:
            self._set(self._due)
            return
        if self._due != self._overdue:  # the token may be there, behind what kept the loop from this timer too
            self._overdue = self._due
            self._arm(now + _GRACE_S)
            return
        self.expired = self._due[1]
        self._wakes_at = -math.inf  # once is enough
        self._interrupt()
