"""Finds and kills what belongs to a launch: this user's processes that carry its tag, and their shared memory.

The tag is an environment variable. Children inherit it, and the kernel shows it. A process keeps it in a new session,
in a new process group, and after its parent has gone. One thing is assumed: nothing of the engine starts a process with
an empty environment and leaves it behind. Such a process is found only below another one that still runs.
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

LAUNCH_VARIABLE = "DEEPSEEK_TRITON_LAUNCH"
"""Environment variable that holds the launch's id."""
RANK_VARIABLE = "DEEPSEEK_TRITON_RANK"
"""Environment variable that holds the rank's number, in the processes of a rank."""
SERVER_NAME = "tritonserver"
STUB_NAME = "triton_python_backend_stub"[:15]

_SHARED_MEMORY = Path("/dev/shm")
_ID = re.compile(r"[0-9a-f]{8}")
_KILL_WITHIN_S = 10
_TICK_S = 0.02


def is_launch_id(text: str) -> bool:
    return _ID.fullmatch(text) is not None


def given_launch_id() -> str:
    """Return the launch id of this process's environment, or a new one where there is none."""
    given = os.environ.get(LAUNCH_VARIABLE, "")
    return given if is_launch_id(given) else os.urandom(4).hex()


@dataclass(frozen=True, kw_only=True)
class LaunchTag:
    """The tag of a launch, or of one rank of it."""

    launch: str
    rank: int | None = None

    def is_in(self, environment: dict[str, str]) -> bool:
        if environment.get(LAUNCH_VARIABLE) != self.launch:
            return False
        return self.rank is None or environment.get(RANK_VARIABLE) == str(self.rank)


def members(tag: LaunchTag, *, spare: Collection[int] = ()) -> list[Process]:
    """Return the running processes that carry the tag, all processes below them, and all below this process.

    This process, its ancestors and the process numbers in `spare` are never among them. Where this process is process 1
    of a container, every orphan of the container comes to it, also those of `docker exec`. There only the processes
    with the tag and those below them count.
    """
    spared = process_table.ancestors(os.getpid()) | set(spare)
    by_pid = {process.pid: process for process in process_table.all_processes()}
    tagged = {
        pid
        for pid in by_pid.keys() - spared
        if process_table.is_this_users(pid) and tag.is_in(process_table.environment(pid))
    }
    adopting = {os.getpid()} - {1}
    below = process_table.descendants(by_pid.values(), tagged | adopting)
    return [by_pid[pid] for pid in sorted((tagged | below) - spared) if pid in by_pid]


def processes_by_launch() -> dict[str, list[Process]]:
    """Return the tagged processes of this user on this machine, by the id of their launch."""
    found: dict[str, list[Process]] = {}
    spared = process_table.ancestors(os.getpid())
    for process in process_table.all_processes():
        if process.pid in spared or not process_table.is_this_users(process.pid):
            continue
        launch = process_table.environment(process.pid).get(LAUNCH_VARIABLE, "")
        if is_launch_id(launch):
            found.setdefault(launch, []).append(process)
    return found


def terminate_servers(processes: Collection[Process]) -> bool:
    """Send SIGTERM to every tritonserver among `processes`, which then drains; return whether there was one."""
    servers = [process for process in processes if process.name == SERVER_NAME]
    for process in servers:
        process_table.send(process, signal.SIGTERM)
    return bool(servers)


def kill_all(tag: LaunchTag, *, spare: Collection[int] = ()) -> None:
    """Send SIGKILL to the members of the launch until none is left. A process may fork before it is killed.

    The youngest are killed first, so that the guards come last: they continue the work when this process is killed
    meanwhile. Two searches in a row have to find nothing, because /proc is no snapshot: a process that loses its parent
    during a search seems to be below no other.

    :raises StillRunningError: when processes are left after ten seconds, for example because a driver holds them.
    :raises OSError: when /proc can't be read for ten seconds, at a limit of open files.
    """
    deadline = time.monotonic() + _KILL_WITHIN_S
    num_empty_searches = 0
    while num_empty_searches < 2:
        try:
            left = members(tag, spare=spare)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_TICK_S)
            continue
        num_empty_searches = 0 if left else num_empty_searches + 1
        if left and time.monotonic() > deadline:
            named = ", ".join(f"{process.pid} ({process.name})" for process in left)
            raise StillRunningError(f"processes that can't be killed: {named}: look at them with ps -o pid,stat,wchan")
        for process in sorted(left, key=lambda process: (process.started, process.pid), reverse=True):
            with contextlib.suppress(PermissionError):
                process_table.send(process, signal.SIGKILL)
        children.reap()
        time.sleep(_TICK_S)


def shared_memory(launch: str, name: str) -> Path:
    """Return the path of what belongs to the launch and ends with it."""
    return _SHARED_MEMORY / f"deepseek_triton_{launch}_{name}"


def remove_shared_memory(launch: str) -> None:
    """Remove the regions that tritonserver's Python backend shares with its stubs: they stay when both are killed."""
    for region in _SHARED_MEMORY.glob(shared_memory(launch, "*").name):
        with contextlib.suppress(OSError):
            region.unlink()
