"""SIGINT and SIGTERM as a request to stop, for a verb whose work can end in an orderly way."""

from __future__ import annotations

import os
import queue
import signal
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
        self._signums: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._first: int | None = None

    @property
    def exit_code(self) -> int:
        """The exit code after the first signal, as in a shell: 130 or 143."""
        return 128 + (self._first or signal.SIGINT)

    def __enter__(self) -> Stop:
        # A shell lets its background jobs ignore SIGINT; a signal that was ignored stays ignored.
        self._before = {n: signal.getsignal(n) for n in _SIGNALS if signal.getsignal(n) != signal.SIG_IGN}
        threading.Thread(target=self._act, name="stop", daemon=True).start()
        for signum in self._before:
            signal.signal(signum, self._take)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        self._signums.put(None)

    def _take(self, signum: int, _: FrameType | None) -> None:
        # A handler may interrupt any code of this thread. Event.set would wait for a lock that the thread itself may
        # hold, so the signal goes through a queue to another thread.
        if self._first is not None and self.forward is None:
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
        self._first = self._first or signum
        self._signums.put(signum)

    def _act(self) -> None:
        while (signum := self._signums.get()) is not None:
            if (forward := self.forward) is not None:
                forward(signum)
            else:
                self.event.set()
