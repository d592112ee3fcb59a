"""One open file and how its bytes are brought into the page cache, a step at a time.

splice(2) through a pipe to /dev/null moves the pages and copies none of them: a sixth of the processor time of reading
into a buffer. Either way the kernel reads ahead as for any reader in sequence, and the call returns when the bytes are
there. sendfile(2) does the same through a pipe of its own, of 64 KiB: the kernel's read-ahead begins with what is asked
for first, and on 31 MB shards a pipe of 1 MiB took 2.1 s where that one took 2.5 (medians of five, interleaved).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from pathlib import Path

from deepseek_triton_tools.warming.pagecache.filesystem import FileSystem

STEP = 2**23
"""Bytes of one call, after which it is known how far the file is: 8 MiB. Smaller ones wait for Python's lock more."""
BUFFER = 2**21
"""Bytes that are copied at once, where they are: 2 MiB, which a processor's cache holds."""
MOST_BUFFERS = 2**24
"""Of all threads together; with more than eight of them each has a smaller one."""
PIPE = 2**20
"""Bytes of a thread's pipe: 1 MiB, the most that an ordinary user's may have (/proc/sys/fs/pipe-max-size)."""
SMALLEST_READ_AHEAD = 2**17
"""What one call of posix_fadvise brings in at least, by the kernel's default read-ahead of 128 KiB."""
_NOT_POSSIBLE = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM})
"""What splice says on a file system that can't do it, or under a filter of system calls."""


class Sink:
    """Where one of `num_threads` threads' bytes go: nowhere. Holds its only buffer, made when it is needed."""

    def __init__(self, num_threads: int = 1) -> None:
        self._size = min(BUFFER, MOST_BUFFERS // num_threads)
        self._buffer: bytearray | None = None
        self._nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        try:
            self._out, self._in = os.pipe2(os.O_CLOEXEC)
        except OSError:
            os.close(self._nowhere)
            raise
        with contextlib.suppress(OSError):  # a user with many pipes has small ones, which do as well
            fcntl.fcntl(self._in, fcntl.F_SETPIPE_SZ, PIPE)

    def splice(self, fd: int, offset: int, length: int) -> int:
        """Let at most PIPE bytes of a file pass; how many, 0 at its end."""
        passed = left = os.splice(fd, self._in, min(PIPE, length), offset_src=offset)
        while left:
            left -= os.splice(self._out, self._nowhere, left)
        return passed

    @property
    def buffer(self) -> bytearray:
        if self._buffer is None:
            self._buffer = bytearray(self._size)
        return self._buffer

    def close(self) -> None:
        for descriptor in (self._nowhere, self._out, self._in):
            os.close(descriptor)


class FileReader:
    """A file that is being read.

    :raises OSError: when it can't be opened.
    """

    def __init__(self, path: Path, system: FileSystem, sink: Sink) -> None:
        self._sink = sink
        self._ahead = system.reading.read_ahead
        self._piece = max((system.read_ahead_kb or 0) * 1024, SMALLEST_READ_AHEAD)
        self._copies = system.reading.method == "read"
        self._advised = 0
        # O_NONBLOCK: a pipe in the place of a file is an error then, and not waited for.
        self.fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self.status = os.fstat(self.fd)
        if self._ahead:  # it doubles the kernel's read-ahead: of 8 MiB, that took a third of the rate
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)

    def bring(self, offset: int, length: int) -> int:
        """Bring in at most `length` bytes from `offset`; how many, 0 at the file's end.

        :raises OSError: when the storage can't deliver them.
        """
        self._read_ahead(offset)
        if not self._copies:
            try:
                return self._splice(offset, length)
            except OSError as error:
                if error.errno not in _NOT_POSSIBLE:
                    raise
                self._copies = True
        return len(self.read(offset, length))

    def _splice(self, offset: int, length: int) -> int:
        done = 0
        try:
            while done < length and (passed := self._sink.splice(self.fd, offset + done, length - done)):
                done += passed
        except OSError:
            if not done:
                raise
        return done  # what could not be read is asked for again, and said with its byte

    def read(self, offset: int, length: int) -> memoryview:
        """The bytes themselves, at most BUFFER, in the thread's buffer until the next call.

        :raises OSError: when the storage can't deliver them.
        """
        view = memoryview(self._sink.buffer)[:length]
        return view[: os.preadv(self.fd, [view], offset)]

    def _read_ahead(self, offset: int) -> None:
        """Ask for what follows, in the pieces that the kernel takes."""
        end = min(offset + self._ahead, self.status.st_size) if self._ahead else 0
        self._advised = max(self._advised, offset)
        while self._advised < end:
            os.posix_fadvise(self.fd, self._advised, self._piece, os.POSIX_FADV_WILLNEED)
            self._advised += self._piece

    def close(self) -> None:
        os.close(self.fd)

    def __enter__(self) -> FileReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
