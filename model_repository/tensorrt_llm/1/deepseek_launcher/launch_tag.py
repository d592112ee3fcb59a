"""What belongs to a launch: the processes of this user that carry its mark, and their shared memory.

The mark is an environment variable, which children inherit and the kernel shows. Neither a new session, nor a parent
that is gone, nor a new process group takes it away. Assumed: nothing of the engine starts a process with an empty
environment and leaves it behind; one below a process that still runs is found all the same.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from deepseek_launcher import children, process_table
from deepseek_launcher.launcher_errors import StillRunningError
from deepseek_launcher.process_table import Process

LAUNCH = "DEEPSEEK_TRITON_LAUNCH"
RANK = "DEEPSEEK_TRITON_RANK"
SHARED_MEMORY = Path("/dev/shm")
SERVER_NAME = "tritonserver"
STUB_NAME = "triton_python_backend_stub"[:15]

_ID = re.compile(r"[0-9a-f]{8}")
_PATIENCE_S = 10
_TICK_S = 0.02


def new_launch() -> str:
    return os.urandom(4).hex()


def is_launch(text: str) -> bool:
    return _ID.fullmatch(text) is not None


@dataclass(frozen=True, kw_only=True)
class LaunchTag:
    """A launch, or one rank of it."""

    launch: str
    rank: int | None = None

    def is_on(self, environment: dict[str, str]) -> bool:
        if environment.get(LAUNCH) != self.launch:
            return False
        return self.rank is None or environment.get(RANK) == str(self.rank)


def members(mark: LaunchTag, *, spare: Collection[int] = ()) -> list[Process]:
    """What carries the mark and still runs, all below it, and all below this process.

    Never this process, what it was started from, or one in `spare`. All orphans of a container come to its process 1,
    those of `docker exec` too: there the mark alone counts, and what is below it.
    """
    spared = process_table.ancestors(os.getpid()) | set(spare)
    by_pid = {process.pid: process for process in process_table.all_processes()}
    marked = {
        pid
        for pid in by_pid.keys() - spared
        if process_table.of_this_user(pid) and mark.is_on(process_table.environment(pid))
    }
    adopting = {os.getpid()} - {1}
    below = process_table.descendants(by_pid.values(), marked | adopting)
    return [by_pid[pid] for pid in sorted((marked | below) - spared) if pid in by_pid]


def launches() -> dict[str, list[Process]]:
    """Every launch of this user on this machine that has a process with its mark."""
    found: dict[str, list[Process]] = {}
    spared = process_table.ancestors(os.getpid())
    for process in process_table.all_processes():
        if process.pid in spared or not process_table.of_this_user(process.pid):
            continue
        launch = process_table.environment(process.pid).get(LAUNCH, "")
        if is_launch(launch):
            found.setdefault(launch, []).append(process)
    return found


def kill_all(mark: LaunchTag, *, spare: Collection[int] = ()) -> None:
    """SIGKILL until none is left: one may have forked before its turn came.

    The youngest first, so that guards come last: when this process is killed meanwhile, they go on.
    Two looks have to find none. /proc is no snapshot: what loses its parent while it is read seems to be below nobody.

    :raises StillRunningError: when some are still there after ten seconds, as when a driver holds them.
    :raises OSError: when for as long nobody can tell, at a limit of open files.
    """
    deadline = time.monotonic() + _PATIENCE_S
    looks_in_vain = 0
    while looks_in_vain < 2:
        try:
            left = members(mark, spare=spare)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_TICK_S)
            continue
        looks_in_vain = 0 if left else looks_in_vain + 1
        if left and time.monotonic() > deadline:
            named = ", ".join(f"{process.pid} ({process.name})" for process in left)
            raise StillRunningError(f"processes that can't be killed: {named}: look at them with ps -o pid,stat,wchan")
        for process in sorted(left, key=lambda process: (process.started, process.pid), reverse=True):
            with contextlib.suppress(PermissionError):
                process_table.send(process, signal.SIGKILL)
        children.reap()
        time.sleep(_TICK_S)


def remove_shared_memory(launch: str) -> None:
    """What its tritonserver's Python backend shares with its stubs; nobody removes it when both are killed."""
    for region in SHARED_MEMORY.glob(f"deepseek_triton_{launch}_*"):
        with contextlib.suppress(OSError):
            region.unlink()
