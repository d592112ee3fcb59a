"""Locking files' pages into memory, as far as RLIMIT_MEMLOCK or CAP_IPC_LOCK allows it (mlock(2))."""

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
"""Bytes of one call, 64 MiB: it reads what is not there, and no signal interrupts it."""
_CAP_IPC_LOCK = 14
"""Its bit in CapEff of /proc/self/status; linux/capability.h."""
_HOW = (
    "give it with ulimit -l unlimited in a shell, LimitMEMLOCK=infinity in a systemd unit, --cap-add IPC_LOCK for a "
    "container, or hold by --hold=watch"
)


class LockedFiles:
    """Files that are mapped and locked; to close it lets them go. Page tables take 2 MiB for each GiB."""

    def __init__(self) -> None:
        self.size = 0
        """Bytes that are locked."""
        self._mapped: list[tuple[int, int]] = []

    def lock(self, paths: Iterable[Path], stop: threading.Event) -> None:
        """Until all are locked or `stop` is set.

        :raises LockError: when so much may not be locked, or a file can't be mapped.
        """
        for path in paths:
            try:
                address, size = self._map(path)
            except OSError as error:
                raise LockError(f"{path}: can't be mapped, which locking takes: {error.strerror}") from error
            for offset in range(0, size, WINDOW):
                if stop.is_set():
                    return
                self._lock_window(path, address + offset, min(WINDOW, size - offset))

    def _map(self, path: Path) -> tuple[int, int]:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe in its place is not waited for
        try:
            size = os.fstat(fd).st_size
            if not size:
                return 0, 0
            address = linux.map_file(fd, 0, size)
        finally:
            os.close(fd)  # the mapping stays
        self._mapped.append((address, size))
        return address, size

    def _lock_window(self, path: Path, address: int, length: int) -> None:
        try:
            linux.lock(address, length)
        except OSError as error:
            locked = f"{sized(self.size)} were locked, then {path.name} could not be: {error.strerror}"
            raise LockError(f"{locked}; {_limit()}; {_HOW}") from error
        self.size += length

    def close(self) -> None:
        for address, size in self._mapped:
            linux.unmap(address, size)
        self._mapped.clear()

    def __enter__(self) -> LockedFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def allow_locking(size: int) -> None:
    """Raise the soft limit to the hard one.

    :raises LockError: when `size` bytes are more than that allows.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))
    if hard != resource.RLIM_INFINITY and hard < size and not _may_lock_all():
        raise LockError(f"to lock {sized(size)} takes a higher limit: {_limit()}; {_HOW}")


def _limit() -> str:
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    shown = "unlimited" if hard == resource.RLIM_INFINITY else sized(hard)
    return f"RLIMIT_MEMLOCK is {shown}, CAP_IPC_LOCK is {'there' if _may_lock_all() else 'not there'}"


def _may_lock_all() -> bool:
    """CAP_IPC_LOCK: no limit holds. In a user namespace it is said to be there, and is not honoured."""
    status = Path("/proc/self/status").read_text()
    [effective] = [line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")]
    return bool(int(effective, 16) >> _CAP_IPC_LOCK & 1)
