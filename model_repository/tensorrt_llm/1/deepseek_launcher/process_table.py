"""Looks up processes in Linux's /proc, and sends a signal to exactly the process that was meant."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
# Columns of /proc/PID/stat behind the name, from proc(5).
_STATE, _PARENT, _USER_TICKS, _SYSTEM_TICKS, _STARTED = 0, 1, 11, 12, 19
_CHUNK = 1 << 16
_ENDED = ("Z", "X")
_AT_A_LIMIT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def _read(pid: int, name: str) -> bytes:
    """Read a file of /proc/PID. Without pathlib and buffers, for there may be thousands of processes."""
    descriptor = os.open(f"/proc/{pid}/{name}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = os.read(descriptor, _CHUNK)
        while more := os.read(descriptor, _CHUNK):
            data += more
        return data
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class Process:
    """A running process. Its number may later be another's, but never number and start time together."""

    pid: int
    started: int
    """Start time, in clock ticks after the machine's start."""
    parent: int
    name: str
    """The kernel's name of it, at most 15 characters."""
    cpu_s: float


def look_up(pid: int) -> Process | None:
    """Return the process; None when there is none that we may see, or it has ended and only waits to be reaped.

    :raises OSError: at a limit of open files or memory, where nobody can tell.
    """
    try:
        text = _read(pid, "stat").decode(errors="replace")
    except OSError as error:
        if error.errno in _AT_A_LIMIT:
            raise
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
        cpu_s=ticks / _CLOCK_TICKS,
    )


def runs(process: Process) -> bool:
    """Return whether this very process still runs. True where /proc can't be read: nothing may be ended for that."""
    try:
        now = look_up(process.pid)
    except OSError:
        return True
    return now is not None and now.started == process.started


def all_processes() -> Iterator[Process]:
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (process := look_up(int(entry))):
            yield process


def is_this_users(pid: int) -> bool:
    try:
        return os.stat(f"/proc/{pid}").st_uid == os.getuid()
    except OSError:
        return False


def environment(pid: int) -> dict[str, str]:
    """Return the variables that the process was started with; none when we may not read them."""
    try:
        raw = _read(pid, "environ")
    except OSError:
        return {}
    pairs = (entry.partition("=") for entry in raw.decode("utf-8", errors="surrogateescape").split("\0"))
    return {name: value for name, equals, value in pairs if equals}


def descendants(processes: Iterable[Process], roots: Iterable[int]) -> set[int]:
    """Return the numbers of all processes below `roots`, without `roots` themselves."""
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
    """Return the numbers of all processes above `pid`, and its own."""
    line = {pid}
    while (process := look_up(pid)) and process.parent not in line:
        pid = process.parent
        line.add(pid)
    return line


def send(process: Process, signum: int) -> None:
    """Send a signal to this process, if it still runs, and never to another one that has its number by now."""
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
    """Return the bytes read so far, from storage or the page cache (rchar of proc(5)), without mapped files."""
    try:
        first = _read(pid, "io").split(maxsplit=2)
    except OSError:
        return 0
    return int(first[1])


def rss_bytes(pid: int) -> int:
    try:
        pages = _read(pid, "statm").split()[1]
    except (OSError, IndexError):
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
