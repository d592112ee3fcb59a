"""One rank's guard: between the MPI launcher, or the supervisor, and what runs there.

It ends all of its rank when the launcher dies, when its command does, and when it is told to; it tells the supervisor
which rank runs where, with which files.
"""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from deepseek_launcher import children, mpi_environment, node_identity, process_table, rank_events
from deepseek_launcher.children import ChildProcess
from deepseek_launcher.command import seconds
from deepseek_launcher.launch_tag import LAUNCH, RANK, SERVER_NAME, LaunchTag, is_launch, kill_all, members, new_launch
from deepseek_launcher.output import OutputWriter
from deepseek_launcher.server_processes import DEFAULT_EXIT_TIMEOUT_S, PATIENCE_S, ServerWatch
from deepseek_launcher.signals import END_NOW, SAME_WISH_S, Signals
from deepseek_launcher.supervisor_guard import SupervisorGuard, say_last

_PARENT_DIED = signal.SIGRTMIN + 3
"""Not a signal that anybody else sends."""
_ORDERLY = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_ALIVE_EVERY_S = 15
_ALIVE_FOR_S = 2 * 3600
"""A rank is not told when the model is ready; the longest load seen took one hour."""
_TICK_S = 0.5
"""Of rank 0, which looks for its tritonserver. The others only wait, and wake up for a signal or an end."""
_OTHERS_TICK_S = 2.0
_LEAVE_S = 5
"""For what a command that has ended leaves behind: a stub goes within 2 s of its server."""
_LINGER_S = 1.5
"""After a failure: mpirun hands on no output once a rank has gone that should not, until it has ended the others."""
_KILLED = 128 + signal.SIGKILL


def rank(command: Sequence[str]) -> int:
    """Run `command` as this rank; returns when nothing of it is left, with its exit code as a shell has it."""
    launch = os.environ.get(LAUNCH, "")
    number = mpi_environment.rank(os.environ)
    mark = LaunchTag(launch=launch if is_launch(launch) else new_launch(), rank=number)
    killed = f"{rank_events.ended(number, mark.launch, _KILLED)}\n".encode()
    with SupervisorGuard(mark, afterwards=lambda: say_last(killed)) as guard:
        return _Rank(mark, number, command, guard).run()


class _Rank:
    def __init__(self, mark: LaunchTag, number: int, command: Sequence[str], guard: SupervisorGuard) -> None:
        self._mark = mark
        self._number = number
        self._command = command
        self._guard = guard
        self._patience_s = seconds(command, "--exit-timeout-secs", DEFAULT_EXIT_TIMEOUT_S) + PATIENCE_S
        self._stop_by: float | None = None
        self._asked_at = 0.0
        self._end_now = self._told_now = False
        self._alive_at = self._began = time.monotonic()

    def run(self) -> int:
        parent = os.getppid()
        signals = Signals((*_ORDERLY, signal.SIGQUIT, END_NOW, _PARENT_DIED))
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # mpirun hands that on, too
        children.adopt_orphans()
        children.signal_at_parents_death(_PARENT_DIED)
        self._stderr = OutputWriter(2)
        self._say("started", **self._facts())
        child = ChildProcess(self._command, {**os.environ, LAUNCH: self._mark.launch, RANK: str(self._number)})
        server = ServerWatch(self._mark, self._command, spare=(self._guard.pid,)) if self._number == 0 else None
        tick_s = _OTHERS_TICK_S if server is None else _TICK_S
        left_behind = False
        while child.exit_code is None:
            for signum in signals.wait(tick_s):
                self._take(signum, child)
            children.reap()
            # Not only by the signal: that comes when the thread ends that had started this process, too.
            if os.getppid() != parent:
                self._end_now = True
            left_behind = server is not None and server.look()
            late = self._stop_by is not None and time.monotonic() > self._stop_by
            if self._end_now or left_behind or late:
                self._kill(child)
                break
            self._say_alive()
        # A shell whose children are killed first can still end with 0 before its own turn comes.
        code = self._clear_away(child) or (_KILLED if left_behind else 0)
        self._stderr.write(f"{rank_events.ended(self._number, self._mark.launch, code)}\n".encode())
        self._stderr.flush(2)
        if self._told_now:
            return 0  # it did what it was told; mpirun would take anything else for one rank's failure
        if code and mpi_environment.size(os.environ) > 1 and self._stop_by is None and not self._end_now:
            return code if _lingers(signals) else 0
        return code

    def _take(self, signum: int, child: ChildProcess) -> None:
        if signum == _PARENT_DIED:
            return  # the loop looks whether it is so
        self._told_now = self._told_now or signum == END_NOW
        now = time.monotonic()
        if signum in _ORDERLY and self._stop_by is None:
            self._asked_at, self._stop_by = now, now + self._patience_s
            self._ask_to_end(child)
        elif signum not in _ORDERLY or now - self._asked_at > SAME_WISH_S:
            self._end_now = True

    def _ask_to_end(self, child: ChildProcess) -> None:
        if self._number != 0:
            return  # the engine's leader lets its workers go when it ends
        servers = [process for process in self._members() if process.name == SERVER_NAME]
        for process in servers:
            process_table.send(process, signal.SIGTERM)
        if not servers:
            child.send(signal.SIGTERM)

    def _clear_away(self, child: ChildProcess) -> int:
        """Returns when nothing of this rank is left: the command's exit code."""
        assert child.exit_code is not None
        leave_by = time.monotonic() + (_LEAVE_S if child.exit_code == 0 else 0)
        while self._members() and time.monotonic() < leave_by:
            time.sleep(0.1)
            children.reap()
        kill_all(self._mark, spare=(self._guard.pid,))
        return child.exit_code

    def _kill(self, child: ChildProcess) -> None:
        kill_all(self._mark, spare=(self._guard.pid,))
        while child.exit_code is None:
            time.sleep(0.02)
            children.reap()

    def _members(self) -> list[process_table.Process]:
        return members(self._mark, spare=(self._guard.pid,))

    def _say(self, event: str, **facts: object) -> None:
        self._stderr.write(f"{rank_events.line(self._number, event, self._mark.launch, **facts)}\n".encode())

    def _facts(self) -> dict[str, object]:
        repository = checkpoint = None
        served = node_identity.served_repository(self._command) or Path(__file__).resolve().parents[3]
        with contextlib.suppress(OSError):  # the engine will say it better
            repository, checkpoint = node_identity.repository_hash(served), node_identity.checkpoint_hash(served)
        return {
            "size": mpi_environment.size(os.environ),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "repository": repository,
            "checkpoint": checkpoint,
            "python": platform.python_version(),
        }

    def _say_alive(self) -> None:
        now = time.monotonic()
        if now - self._alive_at < _ALIVE_EVERY_S or now - self._began > _ALIVE_FOR_S:
            return
        self._alive_at = now
        try:
            alive = self._members()
        except OSError:  # no more files can be opened
            return
        self._say(
            "alive",
            cpu_s=round(sum(process.cpu_s for process in alive), 1),
            read_bytes=sum(process_table.read_bytes(process.pid) for process in alive),
            rss_bytes=sum(process_table.rss_bytes(process.pid) for process in alive),
        )


def _lingers(signals: Signals) -> bool:
    """False when it was told to end meanwhile."""
    end = time.monotonic() + _LINGER_S
    while (left := end - time.monotonic()) > 0:
        if signals.wait(left):
            return False
        children.reap()
    return True
