"""Collects signals for the main loop, and decides which kind of stop they ask for."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from types import FrameType

from deepseek_launcher.output import readable

END_NOW = signal.SIGUSR2
"""Signal that ends a launch, or a rank, at once. mpirun and srun pass it on to every rank, also on other nodes. SIGQUIT
does the same, but a script's background job ignores SIGQUIT."""
ORDERLY = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that ask for an orderly stop, in which tritonserver finishes its open requests."""

_SAME_REQUEST_S = 1.0
"""A repeated signal within one second is ignored: timeout(1), a terminal, a launcher and Slurm may each pass on the
same stop request. Nobody presses Ctrl-C twice within a second to ask for two different things."""
_TERMINAL_SIGNALS = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)


class Signals:
    """Handles `signums` and SIGCHLD from now on. Make it in the main thread, and call `wait` only there.

    Every signal gets a handler, because the kernel delivers to process 1 of a container only signals with a handler.
    Signals of a terminal stay ignored where they were ignored: SIGHUP by nohup, SIGINT and SIGQUIT in a script's
    background job. SIGTERM does not, because it is the usual request to end.
    """

    def __init__(self, signums: Iterable[int]) -> None:
        self._came: list[int] = []
        self._reading, self._writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda signum, frame: None)
        for signum in signums:
            if signum not in _TERMINAL_SIGNALS or signal.getsignal(signum) != signal.SIG_IGN:
                signal.signal(signum, self._take)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the parent process may have blocked some

    def wait(self, timeout_s: float) -> list[int]:
        """Return the signals that came, in order. Waits until one comes, a child ends, or `timeout_s` is over."""
        readable(self._reading, max(0.0, timeout_s))
        with contextlib.suppress(BlockingIOError):
            while os.read(self._reading, 512):
                pass
        came, self._came = self._came, []
        return came

    def _take(self, signum: int, _: FrameType | None) -> None:
        self._came.append(signum)


class StopRequests:
    """The stop that was asked for so far: none, an orderly one with a deadline, or an end at once."""

    def __init__(self, patience_s: float) -> None:
        self.stop_by: float | None = None
        """Deadline of the orderly stop, by time.monotonic(); None while none was requested."""
        self.end_now = False
        self._patience_s = patience_s
        self._first_at = 0.0

    @property
    def stopping(self) -> bool:
        return self.stop_by is not None or self.end_now

    @property
    def is_overdue(self) -> bool:
        return self.stop_by is not None and time.monotonic() > self.stop_by

    def take(self, signum: int) -> bool:
        """Take note of a stop signal; return True for the first request of an orderly stop."""
        now = time.monotonic()
        if signum in ORDERLY and not self.stopping:
            self._first_at, self.stop_by = now, now + self._patience_s
            return True
        if signum not in ORDERLY or now - self._first_at > _SAME_REQUEST_S:
            self.end_now = True
        return False
