"""Finds and kills what belongs to a launch: this user's processes that carry its tag, and their shared memory.

The tag is an environment variable. Children inherit it, and the kernel shows it. A process keeps it in a new session,
in a new process group, and after its parent has gone. One thing is assumed: nothing of the engine starts a process with
an empty environment and leaves it behind. Such a process is found only below another one that still runs.

A small process, the guard, outlives the one that it guards for a moment, and ends everything that this one leaves
behind. The kernel kills the direct child of a process that dies (processes.py), but not what that child has started:
the tritonserver of a shell script, the workers of an engine. The guard reads a pipe whose writing end only the guarded
process has. When that end is closed without a dismissal, for any reason, it kills every process with the tag.
"""

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from deepseek_launcher import processes
from deepseek_launcher.options import LauncherError, StillRunningError
from deepseek_launcher.output import write_last_message
from deepseek_launcher.processes import Process

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


def own_launch_id() -> str:
    """Return the launch id of this process's environment, or a new one where there is none."""
    launch = os.environ.get(LAUNCH_VARIABLE, "")
    return launch if is_launch_id(launch) else os.urandom(4).hex()


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
    spared = processes.ancestors(os.getpid()) | set(spare)
    by_pid = {process.pid: process for process in processes.all_processes()}
    tagged = {
        pid
        for pid in by_pid.keys() - spared
        if processes.is_this_users(pid) and tag.is_in(processes.environment_of(pid))
    }
    adopting = {os.getpid()} - {1}
    below = processes.descendants(by_pid.values(), tagged | adopting)
    return [by_pid[pid] for pid in sorted((tagged | below) - spared) if pid in by_pid]


def processes_by_launch() -> dict[str, list[Process]]:
    """Return the tagged processes of this user on this machine, by the id of their launch.

    A machine shows its root the processes of its containers too, which are not its own to stop.
    """
    by_launch: dict[str, list[Process]] = {}
    spared, here = processes.ancestors(os.getpid()), processes.namespace()
    for process in processes.all_processes():
        if process.pid in spared or not processes.is_this_users(process.pid):
            continue
        launch = processes.environment_of(process.pid).get(LAUNCH_VARIABLE, "")
        if is_launch_id(launch) and processes.namespace(process.pid) == here:
            by_launch.setdefault(launch, []).append(process)
    return by_launch


def terminate_servers(candidates: Collection[Process]) -> bool:
    """Send SIGTERM to every tritonserver among `candidates`, which then drains; return whether there was one."""
    servers = [process for process in candidates if process.name == SERVER_NAME]
    for process in servers:
        processes.send(process, signal.SIGTERM)
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
                processes.send(process, signal.SIGKILL)
        processes.reap()
        time.sleep(_TICK_S)


def shared_memory(launch: str, name: str) -> Path:
    """Return the path of what belongs to the launch and ends with it."""
    return _SHARED_MEMORY / f"deepseek_triton_{launch}_{name}"


def remove_shared_memory(launch: str) -> None:
    """Remove the regions that tritonserver's Python backend shares with its stubs: they stay when both are killed."""
    for region in _SHARED_MEMORY.glob(shared_memory(launch, "*").name):
        with contextlib.suppress(OSError):
            region.unlink()


# Name of the process, as ps shows it.
_GUARD_NAME = "launch_guard"
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
            _watch_pipe(reading, tag, afterwards)
        os.close(reading)

    def __enter__(self) -> "SupervisorGuard":
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


def _watch_pipe(reading: int, tag: LaunchTag, afterwards: Callable[[], None]) -> NoReturn:
    try:
        os.setsid()
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(signum, signal.SIG_IGN)
        with contextlib.suppress(OSError):  # some sandboxes forbid it
            Path("/proc/self/comm").write_text(_GUARD_NAME, encoding="ascii")
        if os.read(reading, 1) != _DISMISSAL:
            problem = ""
            try:
                kill_all(tag)
            except StillRunningError as error:
                problem = f"deepseek-triton: {error}\n"
            if tag.rank is None:
                remove_shared_memory(tag.launch)
            write_last_message(problem.encode())
            afterwards()
    finally:
        os._exit(0)
