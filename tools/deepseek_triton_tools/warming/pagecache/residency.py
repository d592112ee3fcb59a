"""What of a file is in the page cache: by cachestat(2) where the kernel has it and tells the truth, else mincore(2).

cachestat tells nothing true of a file on an overlay, whose pages belong to the file beneath; mincore, which asks about
a mapping, does. But mincore says that every page of somebody else's file is there (since Linux 5.2), so it is tried
first on a page that can't be there. Pages that are still being read count for cachestat, and not for mincore.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from deepseek_triton_tools.warming.pagecache import linux
from deepseek_triton_tools.warming.pagecache.linux import PAGE_SIZE

WINDOW = 2**26
"""Bytes of a file that mincore is asked about at once: 64 MiB, for which it answers with 16 KiB."""

_OVERLAY = 0x794C7630  # OVERLAYFS_SUPER_MAGIC of linux/magic.h
_OWN_CACHES = frozenset({0x2FC12FC1, 0x47504653})  # ZFS (its ARC) and GPFS (its page pool)
_NOTHING_TO_WRITE = frozenset({errno.EINVAL, errno.EROFS, errno.EOPNOTSUPP})
"""What fdatasync says on file systems that are never written, as squashfs."""
_BEYOND_END = 2**30
"""From a file's end to a page that surely isn't in the page cache: the largest folio is 512 MiB."""


class ResidentFile:
    """One open file and how to ask about its pages.

    :raises OSError: when it can't be opened.
    """

    def __init__(self, path: Path) -> None:
        # O_NONBLOCK: a pipe in the place of a file is not waited for.
        self.fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self._method = _method(self.fd)

    @property
    def method(self) -> Literal["cachestat", "mincore"] | None:
        """None where the kernel does not say (a file of somebody else, a file system whose cache is its own)."""
        return self._method

    def resident(self, offset: int = 0, length: int | None = None) -> int | None:
        """Bytes of the range (to the file's end unless given) that are in the page cache; None: unknown."""
        if self._method is None:
            return None
        size = os.fstat(self.fd).st_size  # now: a file may have become shorter
        end = size if length is None else min(offset + length, size)
        return self._bytes(offset, end) if offset < end else 0

    def close(self) -> None:
        os.close(self.fd)

    def __enter__(self) -> ResidentFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _bytes(self, begin: int, end: int) -> int:
        """The whole pages that the range touches, less what of the first and the last lies outside of it."""
        first, past = begin // PAGE_SIZE * PAGE_SIZE, -(-end // PAGE_SIZE) * PAGE_SIZE
        found = self._num_pages(first, past) * PAGE_SIZE
        if begin > first:
            found -= self._num_pages(first, first + PAGE_SIZE) * (begin - first)
        if past > end:
            found -= self._num_pages(past - PAGE_SIZE, past) * (past - end)
        return found

    def _num_pages(self, begin: int, end: int) -> int:
        if self._method == "cachestat":
            return linux.count_cached_pages(self.fd, begin, end - begin)
        windows = ((at, min(WINDOW, end - at)) for at in range(begin, end, WINDOW))
        return sum(_num_core_pages(self.fd, offset, length) for offset, length in windows)


def resident_bytes(path: Path) -> int | None:
    """Of the whole file; None: unknown.

    :raises OSError: when it can't be opened.
    """
    with ResidentFile(path) as file:
        return file.resident()


def evict(path: Path) -> int | None:
    """Drop the file's pages from the page cache; the bytes still there after it (mapped or locked by somebody, or not
    yet written back), None: unknown.

    What was not yet written to the storage is written first, for only then it can be dropped. Of a file on an overlay
    the pages of the file beneath go, but the kernel writes it in its own time.

    :raises OSError: when it can't be opened or written.
    """
    with ResidentFile(path) as file:
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
    except OSError:  # an older kernel, somebody else's file, a filter of system calls
        return False
    return True


def _answers_mincore(fd: int) -> bool:
    """Whether it says of a page that can't be there that it is not."""
    beyond = -(-os.fstat(fd).st_size // PAGE_SIZE) * PAGE_SIZE + _BEYOND_END
    try:
        return _num_core_pages(fd, beyond, PAGE_SIZE) == 0
    except OSError:  # what can't be mapped, or not so far
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
