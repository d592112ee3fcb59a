"""A process that outlives the one it guards for a moment, and ends all that this one leaves.

The kernel kills the direct child of a process that dies (children.py), but not what that child has started: a shell
script's tritonserver, an engine's workers. The guard holds the reading end of a pipe whose writing end only the guarded
process has. When that is closed without a word, however it came, the guard kills whatever carries the mark.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from deepseek_launcher.errors import StillRunningError
from deepseek_launcher.marking import Mark, kill_all, remove_shared_memory

NAME = "launch_guard"
"""What ps calls it."""
_WORD = b"."


class Guard:
    """The guarded process's side. Make it before any thread is started, and before anything is opened: it is a fork."""

    def __init__(self, mark: Mark, *, afterwards: Callable[[], None] | None = None) -> None:
        """`afterwards` runs in the guard when it had to act."""
        reading, self._writing = os.pipe2(os.O_CLOEXEC)
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._writing)
            _watch(reading, mark, afterwards)
        os.close(reading)

    def dismiss(self) -> None:
        """This process is about to end and has cleared up behind it."""
        try:
            os.write(self._writing, _WORD)
        except BrokenPipeError:
            return  # somebody has killed it
        finally:
            os.close(self._writing)


def _watch(reading: int, mark: Mark, afterwards: Callable[[], None] | None) -> NoReturn:
    try:
        os.setsid()
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(signum, signal.SIG_IGN)
        with contextlib.suppress(OSError):  # not every sandbox lets it
            Path("/proc/self/comm").write_text(NAME, encoding="ascii")
        if os.read(reading, 1) != _WORD:
            _clear_away(mark)
            if afterwards is not None:
                afterwards()
    finally:
        os._exit(0)


def _clear_away(mark: Mark) -> None:
    left = ""
    try:
        kill_all(mark)
    except StillRunningError as error:
        left = f"deepseek-triton: {error}\n"
    if mark.rank is None:
        remove_shared_memory(mark.launch)
    with contextlib.suppress(OSError):  # whoever read it may be gone too
        os.write(2, left.encode())
