"""Locking the pages of files in memory, as far as RLIMIT_MEMLOCK or CAP_IPC_LOCK allows it (mlock(2))."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Iterable
from pathlib import Path

from deepseek_triton_tools.host.units import sized
from deepseek_triton_tools.tool_errors import LockError
from deepseek_triton_tools.warming.pagecache import linux

WINDOW = 2**26
"""Bytes of one call: 64 MiB. A call reads what is not resident yet, and no signal interrupts it."""
_CAP_IPC_LOCK = 14
"""Number of the capability's bit in CapEff of /proc/self/status (linux/capability.h)."""
_FIX = (
    "allow it with ulimit -l unlimited in a shell, LimitMEMLOCK=infinity in a systemd unit, --cap-add IPC_LOCK for a "
    "container, or hold by --hold=watch"
)


class LockedFiles:
    """Files that are mapped and locked until `close`. Their page tables take 2 MiB for each GiB."""

    def __init__(self) -> None:
        self.size = 0
        """Bytes that are locked."""
        self._mappings: list[tuple[int, int]] = []
        """(address, length) of each mapping."""

    def lock(self, paths: Iterable[Path], stop: threading.Event) -> None:
        """Lock the files, one after the other, until all are locked or `stop` is set.

        :raises LockError: when this process may not lock that much, or a file can't be mapped.
        """
        for path in paths:
            try:
                address, size = self._map(path)
            except OSError as error:
                raise LockError(f"{path}: can't be mapped, which is needed to lock it: {error.strerror}") from error
            for offset in range(0, size, WINDOW):
                if stop.is_set():
                    return
                self._lock_window(path, address + offset, min(WINDOW, size - offset))

    def _map(self, path: Path) -> tuple[int, int]:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe in its place must not block
        try:
            size = os.fstat(fd).st_size
            if not size:
                return 0, 0
            address = linux.map_file(fd, 0, size)
        finally:
            os.close(fd)  # the mapping stays
        self._mappings.append((address, size))
        return address, size

    def _lock_window(self, path: Path, address: int, length: int) -> None:
        try:
            linux.lock(address, length)
        except OSError as error:
            locked = f"{sized(self.size)} were locked, then {path.name} could not be: {error.strerror}"
            raise LockError(f"{locked}; {_limits()}; {_FIX}") from error
        self.size += length

    def close(self) -> None:
        for address, size in self._mappings:
            linux.unmap(address, size)
        self._mappings.clear()


def allow_locking(size: int) -> None:
    """Raise the soft limit on locked memory to the hard one.

    :raises LockError: when `size` bytes are more than the hard limit allows.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))
    if hard != resource.RLIM_INFINITY and hard < size and not _may_lock_all():
        raise LockError(f"locking {sized(size)} needs a higher limit: {_limits()}; {_FIX}")


def _limits() -> str:
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "unlimited" if hard == resource.RLIM_INFINITY else sized(hard)
    return f"RLIMIT_MEMLOCK is {limit}, CAP_IPC_LOCK is {'there' if _may_lock_all() else 'not there'}"


def _may_lock_all() -> bool:
    """Whether no limit holds. In a user namespace the kernel lists CAP_IPC_LOCK but does not honour it."""
    status = Path("/proc/self/status").read_text()
    [effective] = [line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")]
    return bool(int(effective, 16) >> _CAP_IPC_LOCK & 1)
