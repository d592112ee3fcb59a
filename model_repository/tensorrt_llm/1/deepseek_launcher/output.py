"""Output that always has a reader, and a writer that nobody can hold up."""

from __future__ import annotations

import os
import re
import select
import threading
from collections import deque
from collections.abc import Callable

_KEPT_BYTES = 8 << 20
_CHUNK = 65536
_LONGEST_LINE = 1 << 20
_LINE = re.compile(rb"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")


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
            if self._closed:
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
    """Reads a pipe to its end in a thread of its own, line by line; a progress bar ends its lines with a \\r."""

    def __init__(self, descriptor: int, writer: Writer, on_line: Callable[[str], bool]) -> None:
        """`on_line` gets every line, without its end, and says whether it is handed on."""
        self._descriptor = descriptor
        self._writer = writer
        self._on_line = on_line
        self._thread = threading.Thread(target=self._run, name="reader", daemon=True)
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait until all that wrote to it have ended."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        rest = b""
        while data := os.read(self._descriptor, _CHUNK):
            rest += data
            whole = max(rest.rfind(b"\n"), rest.rfind(b"\r")) + 1
            if not whole and len(rest) > _LONGEST_LINE:
                whole = len(rest)
            self._take(rest[:whole])
            rest = rest[whole:]
        self._take(rest)
        os.close(self._descriptor)

    def _take(self, data: bytes) -> None:
        passed = [line for line in _LINE.findall(data) if self._on_line(line.rstrip(b"\r\n").decode(errors="replace"))]
        if passed:
            self._writer.write(b"".join(passed))
