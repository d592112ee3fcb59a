"""Output that always has a reader, and a writer that nobody can hold up."""

from __future__ import annotations

import errno
import os
import select
import threading
from collections import deque
from collections.abc import Callable

from deepseek_launcher.line_splitter import Lines

_KEPT_BYTES = 8 << 20
_CHUNK = 65536
_IDLE_S = 1
"""After that, what is there of a line is handed on."""

_DISK_IS_FULL = (errno.ENOSPC, errno.EDQUOT)


def readable(descriptor: int, timeout_s: float | None) -> bool:
    """Whether it became so in time. Not select(2): that can't take numbers from 1024 on, and who starts this may leave
    it more open files than that."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))


def start_thread(name: str, run: Callable[[], None]) -> threading.Thread:
    """:raises OSError: at the limit of this user's processes."""
    thread = threading.Thread(target=run, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise OSError(errno.EAGAIN, str(error)) from error
    return thread


class OutputWriter:
    """Writes to a descriptor from a thread of its own.

    Where nobody reads there, what is over 8 MiB is dropped and counted, and what comes while a disk is full; where it
    is closed, everything is. Whoever calls `write` never waits.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._chunks: deque[bytes] = deque()
        self._kept = self._dropped = 0
        self._lost = 0
        """Bytes that found the disk full, since something went through."""
        self._closed = False
        self._news = threading.Condition()
        start_thread(f"writer {descriptor}", self._run)

    def write(self, data: bytes) -> None:
        with self._news:
            if self._closed or not data:
                return
            if self._kept + len(data) > _KEPT_BYTES:
                self._dropped += len(data)
                return
            if self._dropped:
                data = f"deepseek-triton: {self._dropped} bytes of output left out: nobody read\n".encode() + data
                self._dropped = 0
            self._chunks.append(data)
            self._kept += len(data)
            self._news.notify()

    def flush(self, timeout_s: float) -> None:
        """Wait until all is written, no longer than that."""
        with self._news:
            self._news.wait_for(lambda: self._closed or not self._kept, timeout_s)

    def _run(self) -> None:
        while not self._closed:
            with self._news:
                self._news.wait_for(lambda: self._chunks)
                chunk = self._chunks.popleft()
            sound = self._write_whole(chunk)
            with self._news:
                self._kept -= len(chunk)
                self._closed = not sound
                self._news.notify_all()

    def _write_whole(self, chunk: bytes) -> bool:
        """False when there is nobody any more to write to."""
        words = f"deepseek-triton: {self._lost} bytes of output left out: the disk was full\n" if self._lost else ""
        try:
            left = self._write_out(words.encode() + chunk)
        except OSError:  # closed, a terminal that hung up
            return False
        self._lost = left if left <= len(chunk) else self._lost + len(chunk)
        return True

    def _write_out(self, chunk: bytes) -> int:
        """How much of it a full disk has left over."""
        while chunk:
            try:
                chunk = chunk[os.write(self._descriptor, chunk) :]
            except BlockingIOError:  # somebody who shares a terminal or pipe with us has made it so
                select.select([], [self._descriptor], [])
            except OSError as error:
                if error.errno not in _DISK_IS_FULL:
                    raise
                break
        return len(chunk)


class OutputReader:
    """Reads a pipe to its end in a thread of its own."""

    def __init__(self, descriptor: int, writer: OutputWriter, lines: Lines) -> None:
        self._descriptor = descriptor
        self._writer = writer
        self._lines = lines
        self._thread = start_thread("reader", self._run)

    def join(self, timeout_s: float) -> None:
        """Wait until all that wrote to it have ended."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        has_come = False
        while True:
            if not readable(self._descriptor, _IDLE_S if has_come else None):
                has_come = False
                self._writer.write(self._lines.idle())
                continue
            data = os.read(self._descriptor, _CHUNK)
            if not data:
                break
            has_come = True
            self._writer.write(self._lines.feed(data))
        self._writer.write(self._lines.end())
        os.close(self._descriptor)
