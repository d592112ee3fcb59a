"""The processes of a server or of a program that has Triton inside, and whether they have ended."""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from deepseek_backend.triton_process import NAME
from support.supervising import name_of, runs
from support.waiting import PATIENCE_S, wait_for


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
    """Send SIGKILL to the processes until none is left: a process may fork before it is killed."""
    deadline = time.monotonic() + PATIENCE_S
    while pids := members():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{pids} can't be killed")
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def children_of(pid: int | None) -> tuple[int, int]:
    """Return the pids of the model's process (the stub) and of its guard."""
    assert pid is not None
    by_name = {name_of(member): member for member in session_members(pid)}
    return by_name["triton_python_b"], by_name[NAME]


def assert_gone(*pids: int) -> None:
    wait_for(lambda: not any(map(runs, pids)), lambda: f"of {pids} these run: {[pid for pid in pids if runs(pid)]}")
