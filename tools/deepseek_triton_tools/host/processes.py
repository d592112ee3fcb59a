"""Processes by Linux's /proc: whether one runs, which one listens on a port; and how many files this one may open."""

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path


def is_running(pid: int) -> bool:
    """Tell whether a process runs. One that has ended runs no more, also while its parent has not asked for its end."""
    return start_of(pid) is not None


def start_of(pid: int) -> int | None:
    """When a process that runs began, in clock ticks since the machine did; None of one that has ended."""
    try:
        # The name is in parentheses and may hold any character. After it come the fields from 3 on, of proc(5).
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] in "ZX" else int(fields[22 - 3])
    except OSError:
        return None


def holder_of(port: int) -> str | None:
    """The process that listens on `port`; None where nothing does or /proc does not show it to this user."""
    sockets = {f"socket:[{inode}]" for inode in listening_inodes(port)}
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        # The process belongs to another user, or has ended meanwhile.
        with contextlib.suppress(OSError):
            if os.readlink(descriptor) in sockets:
                name = (descriptor.parents[1] / "comm").read_text().strip()
                return f"process {descriptor.parents[1].name} ({name})"
    return None


def listening_inodes(port: int) -> Iterator[str]:
    """The inodes of sockets that listen on `port`, by /proc/net/tcp.

    Its columns (proc(5)): 1 is address:port in hexadecimal, 3 is the state, 9 is the inode.
    """
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        for row in table.read_text().splitlines()[1:] if table.is_file() else []:
            columns = row.split()
            if columns[3] == "0A" and int(columns[1].rpartition(":")[2], 16) == port:
                yield columns[9]


def allow_open_files(wanted: int) -> None:
    """Raise the soft limit on open files, as far as the hard limit allows it. The usual soft limit of 1,024 is low only
    for old programs that use select(2)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
