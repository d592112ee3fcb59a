"""Output that always has a reader, and a writer that nobody can hold up."""

from __future__ import annotations

import os
import select
import threading
from collections import deque

from deepseek_launcher.lines import Lines

_KEPT_BYTES = 8 << 20
_CHUNK = 65536
_IDLE_S = 1
"""After that, what is there of a line is handed on."""


class Writer:
    """Writes to a descriptor from a thread of its own.

    Where nobody reads there, what is over 8 MiB is dropped and counted; where it is closed, everything is. Whoever
    calls `write` never waits.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._chunks: deque[bytes] = deque()
        self._kept = self._dropped = 0
        self._closed = False
        self._news = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=f"writer {descriptor}", daemon=True)
        self._thread.start()

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
            sound = self._write_out(chunk)
            with self._news:
                self._kept -= len(chunk)
                self._closed = not sound
                self._news.notify_all()

    def _write_out(self, chunk: bytes) -> bool:
        """False when there is nobody any more to write to."""
        while chunk:
            try:
                chunk = chunk[os.write(self._descriptor, chunk) :]
            except BlockingIOError:  # somebody who shares a terminal or pipe with us has made it so
                select.select([], [self._descriptor], [])
            except OSError:  # closed, a terminal that hung up, a full disk
                return False
        return True


class Reader:
    """Reads a pipe to its end in a thread of its own."""

    def __init__(self, descriptor: int, writer: Writer, lines: Lines) -> None:
        self._descriptor = descriptor
        self._writer = writer
        self._lines = lines
        self._thread = threading.Thread(target=self._run, name="reader", daemon=True)
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait until all that wrote to it have ended."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        has_come = False
        while True:
            if not select.select([self._descriptor], [], [], _IDLE_S if has_come else None)[0]:
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
