"""The guard of one rank, between the MPI launcher, or the supervisor, and the command that runs as the rank.

It ends everything of its rank when the launcher dies, when its command ends, and when it is told to. It tells the
supervisor where the rank runs and with which files.
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
from deepseek_launcher.children import KILLED_CODE, ChildProcess
from deepseek_launcher.command import seconds
from deepseek_launcher.launch_tag import (
    LAUNCH_VARIABLE,
    RANK_VARIABLE,
    LaunchTag,
    given_launch_id,
    kill_all,
    members,
    terminate_servers,
)
from deepseek_launcher.output import OutputWriter, write_last_message
from deepseek_launcher.repository_link import with_plain_path
from deepseek_launcher.server_processes import DEFAULT_EXIT_TIMEOUT_S, LEAVE_S, PATIENCE_S, ServerWatch
from deepseek_launcher.signals import END_NOW, ORDERLY, Signals, StopRequests
from deepseek_launcher.supervisor_guard import SupervisorGuard

_PARENT_DIED = signal.SIGRTMIN + 3
"""A signal that nothing else sends."""
_ALIVE_EVERY_S = 15
_ALIVE_FOR_S = 2 * 3600
"""Seconds for which `alive` events are sent. A rank does not learn when the model is ready; the longest load seen took
one hour."""
_TICK_S = 0.5
"""Pause of rank 0 between two looks at its tritonserver."""
_OTHERS_TICK_S = 2.0
"""Pause of the other ranks, which look at nothing. Every rank wakes up for a signal or the end of a child."""
_LINGER_S = 1.5
"""Seconds that a failed rank stays. As soon as a rank has gone unexpectedly, mpirun passes on no output until it has
ended the others."""


def rank(command: Sequence[str]) -> int:
    """Run `command` as this rank; return its exit code, as a shell gives it, when no process of it is left."""
    number = mpi_environment.rank(os.environ)
    tag = LaunchTag(launch=given_launch_id(), rank=number)
    killed = f"{rank_events.ended(number, tag.launch, KILLED_CODE)}\n".encode()
    with SupervisorGuard(tag, afterwards=lambda: write_last_message(killed)) as guard:
        return _RankGuard(tag, number, command, guard).run()


class _RankGuard:
    def __init__(self, tag: LaunchTag, number: int, command: Sequence[str], guard: SupervisorGuard) -> None:
        self._tag = tag
        self._number = number
        self._command = command
        self._spare = (guard.pid,)
        self._stop = StopRequests(seconds(command, "--exit-timeout-secs", DEFAULT_EXIT_TIMEOUT_S) + PATIENCE_S)
        self._was_told_to_end_now = False
        self._alive_at = self._began = time.monotonic()

    def run(self) -> int:
        parent = os.getppid()
        signals = Signals((*ORDERLY, signal.SIGQUIT, END_NOW, _PARENT_DIED))
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # mpirun passes this one on, too
        children.adopt_orphans()
        children.signal_at_parents_death(_PARENT_DIED)
        self._stderr = OutputWriter(2)
        self._send_event("started", **self._facts())
        environment = {**os.environ, LAUNCH_VARIABLE: self._tag.launch, RANK_VARIABLE: str(self._number)}
        # The ranks of other nodes have no server, so that the link's name is enough for them.
        command = with_plain_path(self._command, self._tag.launch, make=self._number == 0)
        child = ChildProcess(command, environment)
        server = ServerWatch(self._tag, self._command, spare=self._spare) if self._number == 0 else None
        tick_s = _OTHERS_TICK_S if server is None else _TICK_S
        left_behind = False
        while child.exit_code is None:
            for signum in signals.wait(tick_s):
                self._handle_signal(signum, child)
            children.reap()
            # The signal alone proves nothing: it also comes at the end of the thread that started this process.
            if os.getppid() != parent:
                self._stop.end_now = True
            left_behind = server is not None and server.look()
            if self._stop.end_now or left_behind or self._stop.is_overdue:
                self._kill(child)
                break
            self._send_alive()
        # A shell whose children are killed first may still end with 0 before it is killed itself.
        code = self._clear_away(child) or (KILLED_CODE if left_behind else 0)
        self._stderr.write(f"{rank_events.ended(self._number, self._tag.launch, code)}\n".encode())
        self._stderr.flush(2)
        if self._was_told_to_end_now:
            return 0  # mpirun would take any other code for a failure of the rank
        if code and mpi_environment.size(os.environ) > 1 and not self._stop.stopping:
            return code if _lingers(signals) else 0
        return code

    def _handle_signal(self, signum: int, child: ChildProcess) -> None:
        if signum == _PARENT_DIED:
            return  # the loop checks the parent itself
        self._was_told_to_end_now = self._was_told_to_end_now or signum == END_NOW
        # Only rank 0 acts: the engine's leader ends its workers when it ends.
        if self._stop.take(signum) and self._number == 0 and not terminate_servers(self._members()):
            child.send(signal.SIGTERM)

    def _clear_away(self, child: ChildProcess) -> int:
        """End what is left of this rank; return the command's exit code."""
        assert child.exit_code is not None
        leave_by = time.monotonic() + (LEAVE_S if child.exit_code == 0 else 0)
        while self._members() and time.monotonic() < leave_by:
            time.sleep(0.1)
            children.reap()
        kill_all(self._tag, spare=self._spare)
        return child.exit_code

    def _kill(self, child: ChildProcess) -> None:
        kill_all(self._tag, spare=self._spare)
        while child.exit_code is None:
            time.sleep(0.02)
            children.reap()

    def _members(self) -> list[process_table.Process]:
        return members(self._tag, spare=self._spare)

    def _send_event(self, event: str, **facts: object) -> None:
        self._stderr.write(f"{rank_events.line(self._number, event, self._tag.launch, **facts)}\n".encode())

    def _facts(self) -> dict[str, object]:
        repository = checkpoint = None
        served = node_identity.served_repository(self._command) or Path(__file__).resolve().parents[3]
        with contextlib.suppress(OSError):  # the engine reports unreadable files better
            repository, checkpoint = node_identity.repository_hash(served), node_identity.checkpoint_hash(served)
        return {
            "size": mpi_environment.size(os.environ),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "repository": repository,
            "checkpoint": checkpoint,
            "python": platform.python_version(),
        }

    def _send_alive(self) -> None:
        now = time.monotonic()
        if now - self._alive_at < _ALIVE_EVERY_S or now - self._began > _ALIVE_FOR_S:
            return
        self._alive_at = now
        try:
            alive = self._members()
        except OSError:  # no more files can be opened
            return
        self._send_event(
            "alive",
            cpu_s=round(sum(process.cpu_s for process in alive), 1),
            read_bytes=sum(process_table.read_bytes(process.pid) for process in alive),
            rss_bytes=sum(process_table.rss_bytes(process.pid) for process in alive),
        )


def _lingers(signals: Signals) -> bool:
    """Wait after a failure; return False when a signal ended the wait."""
    end = time.monotonic() + _LINGER_S
    while (left := end - time.monotonic()) > 0:
        if signals.wait(left):
            return False
        children.reap()
    return True
