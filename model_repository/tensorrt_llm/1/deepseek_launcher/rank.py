"""The guard of one rank, between the MPI launcher, or the supervisor, and the command that runs as the rank.

It ends everything of its rank when the launcher dies, when its command ends, and when it is told to. It tells the
supervisor where the rank runs and with which files. These
lines, the events `started`, `alive` and `ended`, pass the MPI launcher like any other output.
"""

import contextlib
import json
import os
import platform
import re
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from deepseek_launcher import command, processes
from deepseek_launcher.command import seconds, with_plain_path
from deepseek_launcher.launch_tag import (
    LAUNCH_VARIABLE,
    RANK_VARIABLE,
    LaunchTag,
    SupervisorGuard,
    kill_all,
    members,
    own_launch_id,
    terminate_servers,
)
from deepseek_launcher.output import OutputWriter, write_last_message
from deepseek_launcher.processes import END_NOW, KILLED_CODE, ORDERLY, ChildProcess, Signals, StopRequests, signal_of
from deepseek_launcher.server_watch import DEFAULT_EXIT_TIMEOUT_S, LEAVE_S, PATIENCE_S, ServerWatch

_PREFIX = "deepseek-triton rank "


def event_line(rank: int, event: str, launch: str, **facts: Any) -> str:
    """Return the line of an event.

    The line names the launch, because an engine's log may show text of users, and a launch may run within another.
    """
    return f"{_PREFIX}{json.dumps({'rank': rank, 'event': event, **facts, 'launch': launch}, separators=(',', ':'))}"


def ended_line(rank: int, launch: str, code: int) -> str:
    """Return the line of the `ended` event; `code` is the exit code as a shell gives it."""
    return event_line(rank, "ended", launch, code=code, signal=signal_of(code))


def is_alive_event(text: str) -> bool:
    """Return whether the line is an `alive` event, which comes every 15 s and is for the supervisor alone."""
    return _PREFIX in text and '"event":"alive"' in text


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 60


def _is_text(pattern: str) -> Callable[[object], bool]:
    return lambda value: isinstance(value, str) and re.fullmatch(pattern, value) is not None


_HASH = "[0-9a-f]{16}"
_CHECKS: dict[str, Callable[[object], bool]] = {
    "rank": _is_count,
    "event": _is_text("started|alive|ended"),
    "launch": _is_text("[0-9a-f]{8}"),
    "size": _is_count,
    "host": _is_text(r"[\w.-]{1,255}"),
    "pid": _is_count,
    "repository": _is_text(_HASH),
    "checkpoint": _is_text(_HASH),
    "python": _is_text(r"[\w.+]{1,40}"),
    "cpu_s": lambda value: isinstance(value, (int, float)) and type(value) is not bool and 0 <= value < 1e15,
    "read_bytes": _is_count,
    "rss_bytes": _is_count,
    "code": _is_count,
    "signal": _is_count,
}
_NEEDED = {"started": ("host", "pid"), "alive": (), "ended": ("code",)}


def parse_event(text: str, launch: str) -> dict[str, Any] | None:
    """Return the event's facts; None for any other line. A launcher may have put a tag before the event."""
    _, prefix, rest = text.partition(_PREFIX)
    if not prefix:
        return None
    try:
        facts, _ = json.JSONDecoder().raw_decode(rest)
    except (ValueError, RecursionError):
        return None
    if not isinstance(facts, dict) or facts.get("launch") != launch:
        return None
    # Every value is checked: a launcher can lose a piece of a line, and the rest may still be JSON.
    known = {name: value for name, value in facts.items() if name in _CHECKS and value is not None}
    if not all(_CHECKS[name](value) for name, value in known.items()) or not {"rank", "event"} <= known.keys():
        return None
    return facts if known.keys() >= set(_NEEDED[known["event"]]) else None


_RANK = ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
# PMIx gives the size by a call, not by a variable; Slurm and Open MPI set their own variables beside it.
_SIZE = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


def mpi_rank(environment: Mapping[str, str]) -> int:
    return _first_number(environment, _RANK, 0)


def mpi_size(environment: Mapping[str, str]) -> int:
    return _first_number(environment, _SIZE, 1)


def _first_number(environment: Mapping[str, str], names: tuple[str, ...], default: int) -> int:
    values = (environment.get(name, "") for name in names)
    return next((int(value) for value in values if value.isdecimal()), default)


# A signal that nothing else sends.
_PARENT_DIED = signal.SIGRTMIN + 3
_ALIVE_EVERY_S = 15
# Seconds for which `alive` events are sent. A rank does not learn when the model is ready; the longest load seen took
# one hour.
_ALIVE_FOR_S = 2 * 3600
# Pause of rank 0 between two looks at its tritonserver.
_TICK_S = 0.5
# Pause of the other ranks, which look at nothing. Every rank wakes up for a signal or the end of a child.
_OTHERS_TICK_S = 2.0
# Seconds that a failed rank stays. As soon as a rank has gone unexpectedly, mpirun passes on no output until it has
# ended the others.
_LINGER_S = 1.5


def rank(command: Sequence[str]) -> int:
    """Run `command` as this rank; return its exit code, as a shell gives it, when no process of it is left."""
    number = mpi_rank(os.environ)
    tag = LaunchTag(launch=own_launch_id(), rank=number)
    killed = f"{ended_line(number, tag.launch, KILLED_CODE)}\n".encode()
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
        processes.adopt_orphans()
        processes.signal_at_parents_death(_PARENT_DIED)
        self._stderr = OutputWriter(2)
        repository = checkpoint = None
        served = command.served_repository(self._command) or Path(__file__).resolve().parents[3]
        with contextlib.suppress(OSError):  # the engine reports unreadable files better
            repository, checkpoint = command.repository_hash(served), command.checkpoint_hash(served)
        self._send_event(
            "started",
            size=mpi_size(os.environ),
            host=socket.gethostname(),
            pid=os.getpid(),
            repository=repository,
            checkpoint=checkpoint,
            python=platform.python_version(),
        )
        environment = {**os.environ, LAUNCH_VARIABLE: self._tag.launch, RANK_VARIABLE: str(self._number)}
        # The ranks of other nodes have no server, so that the link's name is enough for them.
        words = with_plain_path(self._command, self._tag.launch, make=self._number == 0)
        child = ChildProcess(words, environment)
        server = ServerWatch(self._tag, self._command, spare=self._spare) if self._number == 0 else None
        tick_s = _OTHERS_TICK_S if server is None else _TICK_S
        left_behind = False
        while child.exit_code is None:
            for signum in signals.wait(tick_s):
                self._handle_signal(signum, child)
            processes.reap()
            # The signal alone proves nothing: it also comes at the end of the thread that started this process.
            if os.getppid() != parent:
                self._stop.end_now = True
            left_behind = server is not None and server.look()
            if self._stop.end_now or left_behind or self._stop.is_overdue:
                kill_all(self._tag, spare=self._spare)
                while child.exit_code is None:
                    time.sleep(0.02)
                    processes.reap()
                break
            self._send_alive()
        # A shell whose children are killed first may still end with 0 before it is killed itself.
        code = self._clear_away(child) or (KILLED_CODE if left_behind else 0)
        self._stderr.write(f"{ended_line(self._number, self._tag.launch, code)}\n".encode())
        self._stderr.flush(2)
        if self._was_told_to_end_now:
            return 0  # mpirun would take any other code for a failure of the rank
        if code and mpi_size(os.environ) > 1 and not self._stop.stopping:
            end = time.monotonic() + _LINGER_S
            while (left := end - time.monotonic()) > 0:
                if signals.wait(left):
                    return 0
                processes.reap()
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
            processes.reap()
        kill_all(self._tag, spare=self._spare)
        return child.exit_code

    def _members(self) -> list[processes.Process]:
        return members(self._tag, spare=self._spare)

    def _send_event(self, event: str, **facts: object) -> None:
        self._stderr.write(f"{event_line(self._number, event, self._tag.launch, **facts)}\n".encode())

    def _send_alive(self) -> None:
        now = time.monotonic()
        if now - self._alive_at < _ALIVE_EVERY_S or now - self._began > _ALIVE_FOR_S:
            return
        self._alive_at = now
        try:
            alive = self._members()
        except OSError:
            # No more files can be opened.
            return
        self._send_event(
            "alive",
            cpu_s=round(sum(process.cpu_s for process in alive), 1),
            read_bytes=sum(processes.read_bytes(process.pid) for process in alive),
            rss_bytes=sum(processes.rss_bytes(process.pid) for process in alive),
        )
