"""Signals as something the main loop takes, one after the other, when it is ready for them."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable
from types import FrameType

from deepseek_launcher.output import readable

END_NOW = signal.SIGUSR2
"""Ends a launch, or a rank, at once. mpirun and srun hand it on to every rank, on other nodes too. Not SIGQUIT alone: a
script's background job ignores that."""
SAME_WISH_S = 1.0
"""Within it, a second signal is the first one once more: timeout(1), a terminal, a launcher and Slurm each hand one on
that has come by another way, too. Nobody types two Ctrl-C as fast who means it."""

_OF_A_TERMINAL = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)


class Signals:
    """Takes over `signums` for good, and SIGCHLD. Make it in the main thread, which alone calls `wait`.

    Handlers are needed for process 1 of a container, to which the kernel delivers nothing that has no handler.
    Those that a terminal sends stay ignored where they were (SIGHUP by nohup, SIGINT and SIGQUIT in a script's
    background job); SIGTERM does not: it is how one is asked to end.
    """

    def __init__(self, signums: Iterable[int]) -> None:
        self._came: list[int] = []
        self._reading, self._writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda signum, frame: None)
        for signum in signums:
            if signum not in _OF_A_TERMINAL or signal.getsignal(signum) != signal.SIG_IGN:
                signal.signal(signum, self._take)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())  # whoever started this may have had some blocked

    def wait(self, timeout_s: float) -> list[int]:
        """Those that came, in order. Returns early when one comes or a child ends."""
        readable(self._reading, max(0.0, timeout_s))
        with contextlib.suppress(BlockingIOError):
            while os.read(self._reading, 512):
                pass
        came, self._came = self._came, []
        return came

    def _take(self, signum: int, _: FrameType | None) -> None:
        self._came.append(signum)
