"""Makes the queues of a running tritonserver's HTTP front end longer, as its host's `net.core.wmem_default` does at its
start. With short ones it loses ends of streams (docs/tritonserver.md, "HTTP streams under load")."""

from __future__ import annotations

import ctypes
import errno
import os
import socket
from pathlib import Path

_PIDFD_GETFD = 438
"""The number of the system call, the same on every architecture (Linux, scripts/syscall.tbl)."""
_SO_SNDBUFFORCE = 32
"""As SO_SNDBUF, past the limit net.core.wmem_max; needs CAP_NET_ADMIN (Linux, asm-generic/socket.h)."""
_WANTED_BYTES = 16 * 2**20
LONG_BYTES = 8 * 2**20
"""Room for 10,900 responses. On Linux 6.18 any user may give a socket so much (net.core.wmem_max)."""
_USUAL = Path("/proc/sys/net/core/wmem_default")


def lengthen_queues(pid: int) -> int:
    """Give the Unix sockets of a process that this one has started 16 MiB, or as much as this user may.

    Returns the bytes of the shortest one. Where this user may not touch the process, those are what the kernel gives.
    """
    owner = os.pidfd_open(pid)
    try:
        numbers = [int(name) for name in os.listdir(f"/proc/{pid}/fd")]
        return min(filter(None, (_lengthen(owner, number) for number in numbers)))
    except PermissionError:
        return int(_USUAL.read_text())
    finally:
        os.close(owner)


def _lengthen(owner: int, number: int) -> int | None:
    """Return the bytes that the socket has then; None where the descriptor is another thing, or has been closed."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.syscall(_PIDFD_GETFD, owner, number, 0)
    if descriptor < 0:
        problem = ctypes.get_errno()
        if problem == errno.EBADF:
            return None
        raise OSError(problem, os.strerror(problem))
    try:
        shared = socket.socket(fileno=descriptor)
    except OSError:  # it is no socket
        os.close(descriptor)
        return None
    with shared:
        if shared.family != socket.AF_UNIX:
            return None
        half = _WANTED_BYTES // 2  # the kernel doubles what it is given
        try:
            shared.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, half)
        except PermissionError:
            shared.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, half)
        return shared.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
