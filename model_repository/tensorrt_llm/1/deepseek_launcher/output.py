"""Reads the command's output without a pause, and writes output without ever making the caller wait."""

from __future__ import annotations

import contextlib
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
"""Seconds without input after which an unfinished line is passed on."""
_LAST_MESSAGE_S = 2.0

_DISK_IS_FULL = (errno.ENOSPC, errno.EDQUOT)


def readable(descriptor: int, timeout_s: float | None) -> bool:
    """Wait until the descriptor can be read; return whether it can.

    Not by select(2), which takes no descriptors from 1024 on: this process may inherit more open files than that.
    """
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))


def start_thread(name: str, run: Callable[[], None]) -> threading.Thread:
    """Start a daemon thread.

    :raises OSError: at the limit of this user's processes.
    """
    thread = threading.Thread(target=run, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise OSError(errno.EAGAIN, str(error)) from error
    return thread


class OutputWriter:
    """Writes to a descriptor from a thread of its own, so that `write` never waits.

    Where nobody reads, it keeps 8 MiB, and drops and counts the rest. It also drops and counts what comes while the
    disk is full. Once the descriptor is closed, it drops everything.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._chunks: deque[bytes] = deque()
        self._kept = self._dropped = 0
        self._lost = 0
        """Bytes dropped because the disk was full, since the last write that succeeded."""
        self._closed = False
        self._changed = threading.Condition()
        start_thread(f"writer {descriptor}", self._run)

    def write(self, data: bytes) -> None:
        with self._changed:
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
            self._changed.notify()

    def flush(self, timeout_s: float) -> None:
        """Wait until everything is written, `timeout_s` at most."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not self._kept, timeout_s)

    def _run(self) -> None:
        while not self._closed:
            with self._changed:
                self._changed.wait_for(lambda: self._chunks)
                chunk = self._chunks.popleft()
            is_open = self._write_whole(chunk)
            with self._changed:
                self._kept -= len(chunk)
                self._closed = not is_open
                self._changed.notify_all()

    def _write_whole(self, chunk: bytes) -> bool:
        """Write it, with a note about bytes lost before; return False when the descriptor is closed."""
        note = f"deepseek-triton: {self._lost} bytes of output left out: the disk was full\n" if self._lost else ""
        try:
            left = self._write_out(note.encode() + chunk)
        except OSError:  # closed, a terminal that hung up
            return False
        self._lost = left if left <= len(chunk) else self._lost + len(chunk)
        return True

    def _write_out(self, chunk: bytes) -> int:
        """Write it; return how many bytes did not fit on the disk."""
        while chunk:
            try:
                chunk = chunk[os.write(self._descriptor, chunk) :]
            except BlockingIOError:  # another process that shares the terminal or pipe has set it to non-blocking
                select.select([], [self._descriptor], [])
            except OSError as error:
                if error.errno not in _DISK_IS_FULL:
                    raise
                break
        return len(chunk)


def write_last_message(text: bytes) -> None:
    """Write to stderr, where its reader may have gone or may not read: give up after two seconds."""
    poll = select.poll()
    poll.register(2, select.POLLOUT)
    with contextlib.suppress(OSError):
        if text and poll.poll(_LAST_MESSAGE_S * 1000):
            os.write(2, text)


class OutputReader:
    """Reads a pipe to its end in a thread of its own, and gives it to a writer."""

    def __init__(self, descriptor: int, writer: OutputWriter, lines: Lines) -> None:
        self._descriptor = descriptor
        self._writer = writer
        self._lines = lines
        self._thread = start_thread("reader", self._run)

    def join(self, timeout_s: float) -> None:
        """Wait until every process that writes to the pipe has ended, `timeout_s` at most."""
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
