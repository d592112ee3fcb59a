"""Page cache residency: which bytes of a file are in the page cache.

The kernel is asked by cachestat(2) where it has that call and answers truly, else by mincore(2). cachestat answers
wrongly for a file on an overlay, whose pages belong to the file beneath; mincore, which asks about a mapping, answers
rightly. But for a file of another user mincore says that every page is resident (since Linux 5.2), so it is tried first
on a page that can't be resident. Pages that are still being read count as resident for cachestat, and not for mincore.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

from deepseek_triton_tools.warming.pagecache import linux
from deepseek_triton_tools.warming.pagecache.linux import PAGE_SIZE

WINDOW = 2**26
"""Bytes of a file that mincore is asked about at once: 64 MiB, for which it answers with 16 KiB."""

_OVERLAY = 0x794C7630  # OVERLAYFS_SUPER_MAGIC of linux/magic.h
_OWN_CACHES = frozenset({0x2FC12FC1, 0x47504653})  # ZFS (its ARC) and GPFS (its page pool)
_NOTHING_TO_WRITE = frozenset({errno.EINVAL, errno.EROFS, errno.EOPNOTSUPP})
"""Errors of fdatasync on file systems that are never written, such as squashfs."""
_BEYOND_END = 2**30
"""Bytes from a file's end to a page that is surely not in the page cache: the largest folio has 512 MiB."""


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
        return self._resident_bytes(offset, end) if offset < end else 0

    def close(self) -> None:
        os.close(self.fd)

    def _resident_bytes(self, begin: int, end: int) -> int:
        """Count the pages that the range touches, and subtract the parts of the first and last page outside of it."""
        first, past = begin // PAGE_SIZE * PAGE_SIZE, -(-end // PAGE_SIZE) * PAGE_SIZE
        found = self._num_pages(first, past) * PAGE_SIZE
        if begin > first:
            found -= self._num_pages(first, first + PAGE_SIZE) * (begin - first)
        if past > end:
            found -= self._num_pages(past - PAGE_SIZE, past) * (past - end)
        return found

    def _num_pages(self, begin: int, end: int) -> int:
        if self.method == "cachestat":
            return linux.count_cached_pages(self.fd, begin, end - begin)
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
        _write_back(file.fd)
        os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return file.resident()


def _write_back(fd: int) -> None:
    try:
        os.fdatasync(fd)
    except OSError as error:
        if error.errno not in _NOTHING_TO_WRITE:
            raise


def _method(fd: int) -> Literal["cachestat", "mincore"] | None:
    magic = linux.file_system_magic(fd)
    if magic in _OWN_CACHES or not stat.S_ISREG(os.fstat(fd).st_mode):
        return None
    if magic != _OVERLAY and _answers_cachestat(fd):
        return "cachestat"
    return "mincore" if _answers_mincore(fd) else None


def _answers_cachestat(fd: int) -> bool:
    try:
        linux.count_cached_pages(fd, 0, 1)
    except OSError:  # an older kernel, a file of another user, or a filter of system calls
        return False
    return True


def _answers_mincore(fd: int) -> bool:
    """Whether mincore tells the truth about a page that can't be resident."""
    beyond = -(-os.fstat(fd).st_size // PAGE_SIZE) * PAGE_SIZE + _BEYOND_END
    try:
        return _num_core_pages(fd, beyond, PAGE_SIZE) == 0
    except OSError:  # the file can't be mapped, or not so far beyond its end
        return False


def _num_core_pages(fd: int, offset: int, length: int) -> int:
    with _mapped(fd, offset, length) as address:
        return linux.count_core_pages(address, length)


@contextlib.contextmanager
def _mapped(fd: int, offset: int, length: int) -> Iterator[int]:
    address = linux.map_file(fd, offset, length)
    try:
        yield address
    finally:
        linux.unmap(address, length)
