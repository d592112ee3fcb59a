"""Processes, and those of a session (setsid(2)), by Linux's /proc: whether they run, finding and killing them."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from deepseek_triton_tools.tool_errors import ServerFailedError

_PATIENCE_S = 10


def is_running(pid: int) -> bool:
    """Tell whether a process runs. One that has ended runs no more, also while its parent has not asked for its end."""
    try:
        # The name is in parentheses and may hold any character. After it comes the state.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def session_members(session: int) -> list[int]:
    """Pids of the processes of a session that still run, by /proc/PID/stat (proc(5))."""
    members = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        # The process may have ended meanwhile.
        with contextlib.suppress(OSError):
            # The name is in parentheses and may hold any character. After it come state, parent, group and session.
            state, _, _, its_session = path.read_text().rpartition(")")[2].split()[:4]
            if its_session == str(session) and state not in "ZX":
                members.append(int(path.parent.name))
    return members


def kill_all(members: Callable[[], list[int]]) -> None:
    """Send SIGKILL to the processes until none is left. This repeats, because a process may fork before it is killed.

    :raises ServerFailedError: when some are still there after ten seconds, for example because a driver holds them.
    """
    deadline = time.monotonic() + _PATIENCE_S
    while pids := members():
        if time.monotonic() > deadline:
            raise ServerFailedError(f"processes {pids} of the server can't be killed: look at them with ps")
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
