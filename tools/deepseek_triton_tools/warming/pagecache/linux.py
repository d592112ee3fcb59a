"""System calls about the page cache that Python does not have. All raise OSError with the kernel's errno."""

from __future__ import annotations

import ctypes
import mmap
import os

PAGE_SIZE = mmap.PAGESIZE
"""Bytes of a page: 4096 on x86-64, 65536 on some aarch64 kernels."""

_CACHESTAT = 451
"""Number of the system call, the same on every architecture; since Linux 6.5."""
_EVEN_BYTES = bytes(range(0, 256, 2))
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,  # off_t; only 64-bit architectures are supported
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
_libc.mlock.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.fstatfs.argtypes = (ctypes.c_int, ctypes.c_char_p)


def count_cached_pages(fd: int, offset: int, length: int) -> int:
    """Pages of the range that are in the page cache, including pages that are still being read, by cachestat(2).

    :param length: bytes, not 0.
    :raises OSError: ENOSYS before Linux 6.5; EPERM for a file of another user, since about 6.17.
    """
    asked = (ctypes.c_uint64 * 2)(offset, length)
    answer = (ctypes.c_uint64 * 5)()  # cached, dirty, in writeback, evicted, evicted lately
    flags = ctypes.c_uint(0)
    _check(_libc.syscall(ctypes.c_long(_CACHESTAT), ctypes.c_uint(fd), asked, answer, flags))
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
