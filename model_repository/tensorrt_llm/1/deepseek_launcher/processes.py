"""Processes by Linux's /proc: which there are, and a signal to exactly the one that was meant."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")

# Columns of /proc/PID/stat behind the name, from proc(5).
_STATE, _PARENT, _USER_TICKS, _SYSTEM_TICKS, _STARTED = 0, 1, 11, 12, 19
_ENDED = ("Z", "X")


@dataclass(frozen=True)
class Process:
    """A process that runs. Its number may be another's one day; number and start time together are not."""

    pid: int
    started: int
    """Clock ticks after the machine's start."""
    parent: int
    name: str
    """As the kernel has it: at most 15 characters."""
    cpu_s: float


def look_up(pid: int) -> Process | None:
    """None when there is no such process, or it has ended and only waits to be reaped."""
    try:
        text = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The name is in parentheses and may hold anything.
    before, _, behind = text.rpartition(")")
    columns = behind.split()
    if columns[_STATE] in _ENDED:
        return None
    ticks = int(columns[_USER_TICKS]) + int(columns[_SYSTEM_TICKS])
    return Process(
        pid=pid,
        started=int(columns[_STARTED]),
        parent=int(columns[_PARENT]),
        name=before.partition("(")[2],
        cpu_s=ticks / os.sysconf("SC_CLK_TCK"),
    )


def runs(process: Process) -> bool:
    """Whether this very process still runs."""
    now = look_up(process.pid)
    return now is not None and now.started == process.started


def all_processes() -> Iterator[Process]:
    for entry in os.listdir(PROC):
        if entry.isdigit() and (process := look_up(int(entry))):
            yield process


def of_this_user(pid: int) -> bool:
    try:
        return (PROC / str(pid)).stat().st_uid == os.getuid()
    except OSError:
        return False


def environment(pid: int) -> dict[str, str]:
    """What the process was started with; empty when it is not for us to read."""
    try:
        raw = (PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return {}
    pairs = (entry.partition("=") for entry in raw.decode("utf-8", errors="surrogateescape").split("\0"))
    return {name: value for name, equals, value in pairs if equals}


def descendants(processes: Iterable[Process], roots: Iterable[int]) -> set[int]:
    """The numbers of all below `roots`, without these."""
    children: dict[int, list[int]] = {}
    for process in processes:
        children.setdefault(process.parent, []).append(process.pid)
    found: set[int] = set()
    waiting = list(roots)
    while waiting:
        new = [pid for pid in children.get(waiting.pop(), []) if pid not in found]
        found.update(new)
        waiting += new
    return found


def ancestors(pid: int) -> set[int]:
    """The numbers of all above `pid`, and its own."""
    line = {pid}
    while (process := look_up(pid)) and process.parent not in line:
        pid = process.parent
        line.add(pid)
    return line


def send(process: Process, signum: int) -> None:
    """A signal to this process, and never to another that has its number by now. Nothing when it has ended."""
    with contextlib.suppress(ProcessLookupError):
        try:
            descriptor = os.pidfd_open(process.pid)
        except ProcessLookupError:
            return
        except OSError:  # before Linux 5.3, or forbidden
            if runs(process):
                os.kill(process.pid, signum)
            return
        try:
            if runs(process):
                signal.pidfd_send_signal(descriptor, signum)
        finally:
            os.close(descriptor)


def read_bytes(pid: int) -> int:
    """What it has read so far, from storage or the page cache (rchar of proc(5)); mapped files don't count."""
    try:
        first = (PROC / str(pid) / "io").read_text(encoding="ascii").split(maxsplit=2)
    except OSError:
        return 0
    return int(first[1])


def rss_bytes(pid: int) -> int:
    try:
        pages = (PROC / str(pid) / "statm").read_text(encoding="ascii").split()[1]
    except (OSError, IndexError):
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
