"""One open file, whose bytes are brought into the page cache a step at a time.

splice(2) through a pipe to /dev/null moves the pages and copies none of them: it takes a sixth of the processor time of
reading into a buffer. In both ways the kernel reads ahead as for any sequential reader, and the call returns when the
bytes are in the page cache. sendfile(2) does the same through a pipe of its own, of 64 KiB. The kernel's read-ahead
depends on the size of the first request: on 31 MB shards a pipe of 1 MiB took 2.1 s and sendfile 2.5 s (medians of
five, interleaved).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from pathlib import Path

from deepseek_triton_tools.warming.filesystem import FileSystem

# Bytes of one call, between updates of the progress: 8 MiB. With smaller steps threads wait more for Python's lock.
STEP = 2**23
# Bytes that are copied at once where splice is not possible: 2 MiB, which fit in a processor's cache.
BUFFER = 2**21
# Bytes of the buffers of all threads together. With more than eight threads each has a smaller buffer.
MOST_BUFFERS = 2**24
# Bytes of a thread's pipe: 1 MiB, the most that an ordinary user may give a pipe (/proc/sys/fs/pipe-max-size).
PIPE = 2**20
# Bytes that one call of posix_fadvise brings in at least: the kernel's default read-ahead of 128 KiB.
SMALLEST_READ_AHEAD = 2**17
# Errors of splice on a file system that does not support it, or under a filter of system calls.
_SPLICE_IMPOSSIBLE = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM})


class Sink:
    """Discards the bytes that one of `num_threads` threads reads. Its buffer is made when it is first needed."""

    def __init__(self, num_threads: int = 1) -> None:
        self._size = min(BUFFER, MOST_BUFFERS // num_threads)
        self._buffer: bytearray | None = None
        self._nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        try:
            self._out, self._in = os.pipe2(os.O_CLOEXEC)
        except OSError:
            os.close(self._nowhere)
            raise
        with contextlib.suppress(OSError):  # a user with many pipes gets small ones, which work too
            fcntl.fcntl(self._in, fcntl.F_SETPIPE_SZ, PIPE)

    def splice(self, fd: int, offset: int, length: int) -> int:
        """Move at most PIPE bytes of a file to /dev/null. Returns how many; 0 at the file's end."""
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
    """A file that one thread reads.

    :raises OSError: when the file can't be opened.
    """

    def __init__(self, path: Path, system: FileSystem, sink: Sink) -> None:
        self._sink = sink
        self._ahead = system.reading.read_ahead
        self._piece = max((system.read_ahead_kb or 0) * 1024, SMALLEST_READ_AHEAD)
        self._copies = system.reading.method == "read"
        self._advised = 0
        # With O_NONBLOCK a pipe in the place of the file is an error; without it, opening it would wait for a writer.
        self.fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self.status = os.fstat(self.fd)
        # This doubles the kernel's read-ahead, which helps where it is small. Doubling one of 8 MiB cost a third of the
        # rate.
        if self._ahead:
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)

    def bring_in(self, offset: int, length: int) -> int:
        """Bring at most `length` bytes from `offset` into the page cache. Returns how many; 0 at the file's end.

        :raises OSError: when the storage can't deliver them.
        """
        # Ask the kernel to read ahead, in pieces that are no larger than it takes at once.
        end = min(offset + self._ahead, self.status.st_size) if self._ahead else 0
        self._advised = max(self._advised, offset)
        while self._advised < end:
            os.posix_fadvise(self.fd, self._advised, self._piece, os.POSIX_FADV_WILLNEED)
            self._advised += self._piece
        if not self._copies:
            try:
                return self._splice(offset, length)
            except OSError as error:
                if error.errno not in _SPLICE_IMPOSSIBLE:
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
        return done  # the next call fails at the byte that could not be read, and its error is reported

    def read(self, offset: int, length: int) -> memoryview:
        """Read at most BUFFER bytes. They lie in the thread's buffer until the next call.

        :raises OSError: when the storage can't deliver them.
        """
        view = memoryview(self._sink.buffer)[:length]
        return view[: os.preadv(self.fd, [view], offset)]

    def close(self) -> None:
        os.close(self.fd)
