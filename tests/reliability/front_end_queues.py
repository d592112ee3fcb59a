"""Makes the queues of a running tritonserver's HTTP front end longer, as its host's `net.core.wmem_default` does at its
start. With short ones it loses ends of streams (docs/tritonserver.md, "HTTP streams under load")."""

import ctypes
import errno
import os
import socket

_PIDFD_GETFD = 438
"""The number of the system call on x86-64 and arm64 (Linux, scripts/syscall.tbl)."""
_SO_SNDBUFFORCE = 32
"""As SO_SNDBUF, past the limit net.core.wmem_max; needs CAP_NET_ADMIN (Linux, asm-generic/socket.h)."""
_WANTED_BYTES = 16 * 2**20
LONG_BYTES = 8 * 2**20
"""Room for 10,900 responses. On Linux 6.18 any user may give a socket so much (net.core.wmem_max)."""
_MAY_NOT = (errno.EPERM, errno.EACCES, errno.ENOSYS)
"""The errors of a sandbox, and of a kernel that is too old."""


def lengthen_queues(pid: int) -> int:
    """Give the Unix sockets of a process that this one has started 16 MiB, or as much as this user may.

    Returns the bytes of the shortest one. Where this user may not touch the process, those are what the kernel gives.

    :raises OSError: when the process has ended.
    """
    first, second = socket.socketpair()
    with first, second:
        usual_bytes, possible_bytes = _size(first), _enlarge(first)
    try:
        owner = os.pidfd_open(pid)
        try:
            numbers = [int(name) for name in os.listdir(f"/proc/{pid}/fd")]
            sizes = [size for number in numbers if (size := _lengthen(owner, number, possible_bytes))]
        finally:
            os.close(owner)
    except OSError as error:
        if error.errno not in _MAY_NOT:
            raise
        return usual_bytes
    if not sizes:
        raise ProcessLookupError(errno.ESRCH, "it has no Unix socket, as a process that has ended", str(pid))
    return min(sizes)


def _lengthen(owner: int, number: int, num_bytes: int) -> int | None:
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
        size = _size(shared)
        return size if size >= num_bytes else _enlarge(shared)


def _size(of: socket.socket) -> int:
    return of.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)


def _enlarge(queue: socket.socket) -> int:
    """Give a socket as many bytes as this user may, at most 16 MiB, and return how many it has then."""
    half = _WANTED_BYTES // 2  # the kernel doubles what it is given
    try:
        queue.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, half)
    except PermissionError:
        queue.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, half)
    return _size(queue)
