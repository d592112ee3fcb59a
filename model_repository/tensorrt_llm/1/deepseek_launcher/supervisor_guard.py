"""A small process that outlives the one it guards for a moment, and ends everything that this one leaves behind.

The kernel kills the direct child of a process that dies (children.py), but not what that child has started: the
tritonserver of a shell script, the workers of an engine. The guard reads a pipe whose writing end only the guarded
process has. When that end is closed without a dismissal, for any reason, the guard kills every process with the tag.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from deepseek_launcher.launch_tag import LaunchTag, kill_all, remove_shared_memory
from deepseek_launcher.launcher_errors import LauncherError, StillRunningError
from deepseek_launcher.output import write_last_message

_NAME = "launch_guard"
"""Name of the process, as ps shows it."""
_DISMISSAL = b"."


class SupervisorGuard:
    """The guarded process's side of the pipe. Make it before any thread is started or file is opened: it forks.

    As a context manager it dismisses the guard at the end and waits for its end. It does not after an unexpected error,
    because the guarded process may then have left something behind, for example when it can open no more files.
    """

    def __init__(self, tag: LaunchTag, *, afterwards: Callable[[], None]) -> None:
        """`afterwards` runs in the guard when it had to act."""
        reading, self._writing = os.pipe2(os.O_CLOEXEC)
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._writing)
            _watch(reading, tag, afterwards)
        os.close(reading)

    def __enter__(self) -> SupervisorGuard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, LauncherError):
            with contextlib.suppress(BrokenPipeError):  # somebody has killed the guard
                os.write(self._writing, _DISMISSAL)
            os.close(self._writing)
            with contextlib.suppress(ChildProcessError):  # it was killed, and reaped already
                os.waitpid(self.pid, 0)


def _watch(reading: int, tag: LaunchTag, afterwards: Callable[[], None]) -> NoReturn:
    try:
        os.setsid()
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(signum, signal.SIG_IGN)
        with contextlib.suppress(OSError):  # some sandboxes forbid it
            Path("/proc/self/comm").write_text(_NAME, encoding="ascii")
        if os.read(reading, 1) != _DISMISSAL:
            _clear_away(tag)
            afterwards()
    finally:
        os._exit(0)


def _clear_away(tag: LaunchTag) -> None:
    problem = ""
    try:
        kill_all(tag)
    except StillRunningError as error:
        problem = f"deepseek-triton: {error}\n"
    if tag.rank is None:
        remove_shared_memory(tag.launch)
    write_last_message(problem.encode())
