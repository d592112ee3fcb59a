"""System calls about the page cache that Python does not have. All raise OSError with the kernel's errno."""

import contextlib
import ctypes
import errno
import mmap
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

# Bytes of a page: 4096 on x86-64, 65536 on some aarch64 kernels.
PAGE_SIZE = mmap.PAGESIZE

# Number of the system call, the same on every architecture; since Linux 6.5.
_CACHESTAT = 451
_EVEN_BYTES = bytes(range(0, 256, 2))
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_libc.mmap.restype = ctypes.c_void_p
# The last one is off_t: only 64-bit architectures are supported.
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
_libc.mlock.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.fstatfs.argtypes = (ctypes.c_int, ctypes.c_char_p)


def count_cached_pages(fd: int, offset: int, length: int) -> int:
    """Pages of the range that are in the page cache, including pages that are still being read, by cachestat(2).

    :param length: bytes, not 0.
    :raises OSError: ENOSYS before Linux 6.5; EPERM for a file of another user, since about 6.17.
    """
    page_range = (ctypes.c_uint64 * 2)(offset, length)
    answer = (ctypes.c_uint64 * 5)()  # cached, dirty, in writeback, evicted, evicted lately
    flags = ctypes.c_uint(0)
    _check(_libc.syscall(ctypes.c_long(_CACHESTAT), ctypes.c_uint(fd), page_range, answer, flags))
    return answer[0]


def count_core_pages(address: int, length: int) -> int:
    """Pages of a mapping that are in memory and have been read, by mincore(2).

    When the mapped file belongs to another user, the kernel says that all of them are.
    """
    num_pages = -(-length // PAGE_SIZE)
    answer = ctypes.create_string_buffer(num_pages)
    _check(_libc.mincore(address, length, answer))
    return len(answer.raw.translate(None, _EVEN_BYTES))  # the lowest bit of each byte is the answer


def map_file(fd: int, offset: int, length: int) -> int:
    """Map a range of the file, shared and for reading, and return the address. The range may lie beyond the file's end.

    :param offset: a multiple of PAGE_SIZE.
    """
    address = _libc.mmap(None, length, mmap.PROT_READ, mmap.MAP_SHARED, fd, offset)
    if address == _MAP_FAILED:
        _check(-1)
    return int(address)


def unmap(address: int, length: int) -> None:
    _check(_libc.munmap(address, length))


def lock(address: int, length: int) -> None:
    """Bring a mapping into memory and lock it there, by mlock(2).

    :raises OSError: ENOMEM or EPERM where RLIMIT_MEMLOCK or a cgroup does not allow that much.
    """
    _check(_libc.mlock(address, length))


def file_system_magic(fd: int) -> int:
    """The magic number of the file system that an open file lies on (linux/magic.h), by fstatfs(2)."""
    answer = ctypes.create_string_buffer(256)  # struct statfs has 120 bytes and begins with the magic number
    _check(_libc.fstatfs(fd, answer))
    return ctypes.c_uint32.from_buffer(answer).value


def _check(status: int) -> None:
    if status == -1:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


# Bytes of a file that mincore is asked about at once: 64 MiB, for which it answers with 16 KiB.
WINDOW = 2**26

_OVERLAY = 0x794C7630  # OVERLAYFS_SUPER_MAGIC of linux/magic.h
_OWN_CACHES = frozenset({0x2FC12FC1, 0x47504653})  # ZFS (its ARC) and GPFS (its page pool)
# Errors of fdatasync on file systems that are never written, such as squashfs.
_NOTHING_TO_WRITE = frozenset({errno.EINVAL, errno.EROFS, errno.EOPNOTSUPP})
# Bytes from a file's end to a page that is surely not in the page cache: the largest folio has 512 MiB.
_BEYOND_END = 2**30


class ResidentFile:
    """One open file whose page cache residency can be asked for.

    :raises OSError: when the file can't be opened.
    """

    def __init__(self, path: Path) -> None:
        # O_NONBLOCK: a pipe in the place of the file must not block.
        self.fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self.method = _method(self.fd)
        """The system call that answers. None for a file of another user or on a file system with a cache of its own."""

    def resident(self, offset: int = 0, length: int | None = None) -> int | None:
        """Bytes of the range that are in the page cache; None: unknown.

        :param length: None: up to the file's end.
        """
        if self.method is None:
            return None
        size = os.fstat(self.fd).st_size  # asked each time, because a file may become shorter
        end = size if length is None else min(offset + length, size)
        if offset >= end:
            return 0
        # The pages that the range touches, without the parts of the first and the last one outside of it.
        first, past = offset // PAGE_SIZE * PAGE_SIZE, -(-end // PAGE_SIZE) * PAGE_SIZE
        resident = self._num_pages(first, past) * PAGE_SIZE
        if offset > first:
            resident -= self._num_pages(first, first + PAGE_SIZE) * (offset - first)
        if past > end:
            resident -= self._num_pages(past - PAGE_SIZE, past) * (past - end)
        return resident

    def close(self) -> None:
        os.close(self.fd)

    def _num_pages(self, begin: int, end: int) -> int:
        if self.method == "cachestat":
            return count_cached_pages(self.fd, begin, end - begin)
        windows = ((at, min(WINDOW, end - at)) for at in range(begin, end, WINDOW))
        return sum(_num_core_pages(self.fd, offset, length) for offset, length in windows)


def known_sum(parts: Iterable[int | None]) -> int | None:
    """The sum of the bytes of several files; None when they are unknown for one of them."""
    known = list(parts)
    return None if None in known else sum(filter(None, known))


def evict(path: Path) -> int | None:
    """Drop the file's pages from the page cache.

    Returns the bytes that are still there (mapped or locked by a process, or not yet written back); None: unknown.
    Pages that were not yet written to the storage are written first, because only then can the kernel drop them. For a
    file on an overlay the pages of the file beneath are dropped, but the kernel writes that file back in its own time.

    :raises OSError: when the file can't be opened or written.
    """
    with contextlib.closing(ResidentFile(path)) as file:
        try:
            os.fdatasync(file.fd)
        except OSError as error:
            if error.errno not in _NOTHING_TO_WRITE:
                raise
        os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return file.resident()


def _method(fd: int) -> Literal["cachestat", "mincore"] | None:
    magic, status = file_system_magic(fd), os.fstat(fd)
    if magic in _OWN_CACHES or not stat.S_ISREG(status.st_mode):
        return None
    if magic != _OVERLAY:
        # Fails on an older kernel, for a file of another user, or under a filter of system calls.
        with contextlib.suppress(OSError):
            count_cached_pages(fd, 0, 1)
            return "cachestat"
    # mincore must tell the truth about a page that can't be resident. Some files can't be mapped so far beyond their
    # end, or not at all.
    beyond = -(-status.st_size // PAGE_SIZE) * PAGE_SIZE + _BEYOND_END
    with contextlib.suppress(OSError):
        return "mincore" if _num_core_pages(fd, beyond, PAGE_SIZE) == 0 else None
    return None


def _num_core_pages(fd: int, offset: int, length: int) -> int:
    address = map_file(fd, offset, length)
    try:
        return count_core_pages(address, length)
    finally:
        unmap(address, length)
