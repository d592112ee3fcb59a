"""One open file and how its bytes are brought into the page cache, a step at a time.

sendfile(2) to /dev/null moves the pages and copies none of them: a sixth of the processor time of reading into a buffer
(tests/bench/warm.py). Either way the kernel reads ahead as for any reader in sequence, and the call returns when the
bytes are there.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from deepseek_triton_tools.warming.filesystem import FileSystem

STEP = 2**23
"""Bytes of one call, after which it is known how far the file is: 8 MiB. Smaller ones wait for Python's lock more."""
BUFFER = 2**21
"""Bytes that are copied at once, where they are: 2 MiB, which a processor's cache holds."""
MOST_BUFFERS = 2**24
"""Of all threads together; with more than eight of them each has a smaller one."""
SMALLEST_READ_AHEAD = 2**17
"""What one call of posix_fadvise brings in at least, by the kernel's default read-ahead of 128 KiB."""
_NOT_POSSIBLE = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM})
"""What sendfile says on a file system that can't do it, or under a filter of system calls."""


class Sink:
    """Where one of `num_threads` threads' bytes go: nowhere. Holds its only buffer, made when it is needed."""

    def __init__(self, num_threads: int = 1) -> None:
        self._size = min(BUFFER, MOST_BUFFERS // num_threads)
        self.nowhere = os.open(os.devnull, os.O_WRONLY)
        self._buffer: bytearray | None = None

    @property
    def buffer(self) -> bytearray:
        if self._buffer is None:
            self._buffer = bytearray(self._size)
        return self._buffer

    def close(self) -> None:
        os.close(self.nowhere)


class Source:
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
                return os.sendfile(self._sink.nowhere, self.fd, offset, length)
            except OSError as error:
                if error.errno not in _NOT_POSSIBLE:
                    raise
                self._copies = True
        return len(self.read(offset, length))

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

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
