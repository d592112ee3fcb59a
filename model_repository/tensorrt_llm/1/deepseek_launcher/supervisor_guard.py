"""A process that outlives the one it guards for a moment, and ends all that this one leaves.

The kernel kills the direct child of a process that dies (children.py), but not what that child has started: a shell
script's tritonserver, an engine's workers. The guard holds the reading end of a pipe whose writing end only the guarded
process has. When that is closed without a word, however it came, the guard kills whatever carries the mark.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from deepseek_launcher.launch_tag import LaunchTag, kill_all, remove_shared_memory
from deepseek_launcher.launcher_errors import LauncherError, StillRunningError

NAME = "launch_guard"
"""What ps calls it."""
_WORD = b"."
_READ_WITHIN_S = 2.0


class SupervisorGuard:
    """The guarded process's side. Make it before any thread is started, and before anything is opened: it is a fork.

    As a context manager it is dismissed at the end, unless that is an error which nobody has foreseen: this process may
    not have come to clear up then, as when it can open no more files.
    """

    def __init__(self, mark: LaunchTag, *, afterwards: Callable[[], None] | None = None) -> None:
        """`afterwards` runs in the guard when it had to act."""
        reading, self._writing = os.pipe2(os.O_CLOEXEC)
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._writing)
            _watch(reading, mark, afterwards)
        os.close(reading)

    def __enter__(self) -> SupervisorGuard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, LauncherError):
            self._dismiss()

    def _dismiss(self) -> None:
        """This process is about to end and has cleared up behind it."""
        try:
            os.write(self._writing, _WORD)
        except BrokenPipeError:
            return  # somebody has killed it
        finally:
            os.close(self._writing)


def _watch(reading: int, mark: LaunchTag, afterwards: Callable[[], None] | None) -> NoReturn:
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


def _clear_away(mark: LaunchTag) -> None:
    left = ""
    try:
        kill_all(mark)
    except StillRunningError as error:
        left = f"deepseek-triton: {error}\n"
    if mark.rank is None:
        remove_shared_memory(mark.launch)
    say_last(left.encode())


def say_last(text: bytes) -> None:
    """On stderr, and without staying for it: whoever read there may be gone too, or have stopped."""
    poll = select.poll()
    poll.register(2, select.POLLOUT)
    with contextlib.suppress(OSError):
        if text and poll.poll(_READ_WITHIN_S * 1000):
            os.write(2, text)
