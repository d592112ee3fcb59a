"""SIGINT and SIGTERM as a request to stop, for a verb whose work can end in an orderly way."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """A context in which a signal sets `event`, or is passed to `forward` where that is set. Without `forward`, a
    second signal ends the process. Enter it in the main thread.
    """

    def __init__(self) -> None:
        self.event = threading.Event()
        self.forward: Callable[[int], object] | None = None
        self._first: int | None = None
        self._handled = 0

    @property
    def exit_code(self) -> int:
        """The exit code after the first signal, as in a shell: 130 or 143."""
        return 128 + (self._first or signal.SIGINT)

    def __enter__(self) -> Stop:
        # A shell lets its background jobs ignore SIGINT; a signal that was ignored stays ignored.
        self._before = {n: signal.getsignal(n) for n in _SIGNALS if signal.getsignal(n) != signal.SIG_IGN}
        # Python runs a handler only when the main thread gets to it, which takes as long as a wait that it has just
        # begun. The interpreter writes the signal's number to this socket at once, and another thread reads it.
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._wakeup_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._act, name="stop", daemon=True).start()
        for signum in self._before:
            signal.signal(signum, self._take)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        self._writer.close()  # ends the thread, which closes the other one

    def _take(self, signum: int, _: FrameType | None) -> None:
        self._handled += 1
        if self._handled > 1 and self.forward is None:
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)

    def _act(self) -> None:
        with self._reader:
            while number := self._reader.recv(1):
                signum = number[0]
                if signum not in self._before:
                    continue
                self._first = self._first or signum
                if (forward := self.forward) is not None:
                    forward(signum)
                else:
                    self.event.set()
