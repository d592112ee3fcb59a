"""Reads the command's output without a pause, and writes output without ever making the caller wait.

`mpirun --tag-output` puts `[job,rank]<stream>:` before each piece that it has read from a rank. A piece can end
anywhere in a line; the next piece, of this rank or of another, then follows with its tag in the middle of that line
(Open MPI 4.1, orte/mca/iof/base/iof_base_output.c). The input is therefore cut at the tags, and each rank's stream is
put together by itself. Text that follows the end of a line without a tag is the launcher's own.
"""

import contextlib
import errno
import os
import re
import select
import threading
from collections import deque
from collections.abc import Callable, Iterator

_TAG = re.compile(rb"\[\d+,\d+\]<std(?:out|err|diag)>:")
_BEGUN_TAG = re.compile(rb"\[[\d,]{0,24}(?:\](?:<(?:s[a-z]{0,6}>?)?)?)?\Z")
# A progress bar ends its lines with a \r. Where the \r is the last byte so far, a \n may still belong to it.
_END = re.compile(rb"\r\n|\r(?!\Z)|\n")
_LONGEST_LINE = 1 << 20


class _Stream:
    """The output of one rank to stdout or stderr, or all output that has no tag."""

    def __init__(self) -> None:
        self.text = b""
        """The beginning of a line that has not ended yet."""
        self.num_passed_on = 0
        """Number of bytes of `text` that were passed on already."""


class Lines:
    """Splits output into lines; `feed`, `idle` and `end` return the bytes to pass on.

    Without tags these are the bytes that came, unchanged. With tags they are whole lines, each with its tag.
    """

    def __init__(self, on_line: Callable[[str], bool], *, tagged: bool) -> None:
        """`on_line` gets every line with its tag and without its end, and returns whether to pass the line on."""
        self._on_line = on_line
        self._tagged = tagged
        self._streams: dict[bytes, _Stream] = {}
        self._tag = b""
        self._held = b""
        """The end of the input, when it may be the beginning of a tag."""
        self._unfinished: bytes | None = None
        """Tag of the line that was passed on last, when its end is still missing."""
        self._out: list[bytes] = []

    def feed(self, data: bytes) -> bytes:
        if self._tagged:
            data = self._held + data
            begun = _BEGUN_TAG.search(data)
            whole = begun.start() if begun else len(data)
            data, self._held = data[:whole], data[whole:]
        for tag, text in self._pieces(data):
            self._add(tag, text)
        return self._take_output()

    def idle(self) -> bytes:
        """Return also the unfinished lines. Call it when no more input has come for a while."""
        for tag, stream in self._streams.items():
            if len(stream.text) > stream.num_passed_on and self._is_wanted(tag, stream.text):
                self._pass_on(tag, stream.text[stream.num_passed_on :])
                stream.num_passed_on = len(stream.text)
        return self._take_output()

    def end(self) -> bytes:
        """Return everything that is left. Call it when no more input will come."""
        for tag, text in self._pieces(self._held):
            self._add(tag, text)
        self._held = b""
        return self.idle()

    def _pieces(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Cut the input at the tags; yield each piece with the tag that it belongs to."""
        position = 0
        for match in _TAG.finditer(data) if self._tagged else ():
            yield from self._until_tag(data[position : match.start()])
            self._tag = match[0]
            position = match.end()
        yield from self._until_tag(data[position:])

    def _until_tag(self, text: bytes) -> Iterator[tuple[bytes, bytes]]:
        end = text.find(b"\n") + 1 if self._tag else 0
        if end:
            yield self._tag, text[:end]
            self._tag = b""
        if len(text) > end:
            yield self._tag, text[end:]

    def _add(self, tag: bytes, text: bytes) -> None:
        stream = self._streams.setdefault(tag, _Stream())
        searched = max(0, len(stream.text) - 1)
        text = stream.text + text
        begin = 0
        for match in _END.finditer(text, searched):
            self._end_line(tag, stream, text[begin : match.end()])
            begin = match.end()
        stream.text = text[begin:]
        if len(stream.text) > _LONGEST_LINE:
            self._end_line(tag, stream, stream.text)
            stream.text = b""

    def _end_line(self, tag: bytes, stream: _Stream, line: bytes) -> None:
        rest = line[stream.num_passed_on :]
        if self._is_wanted(tag, line) or stream.num_passed_on:
            self._pass_on(tag, rest)
        stream.num_passed_on = 0

    def _is_wanted(self, tag: bytes, line: bytes) -> bool:
        return self._on_line((tag + line).rstrip(b"\r\n").decode(errors="replace"))

    def _pass_on(self, tag: bytes, text: bytes) -> None:
        if self._unfinished != tag:
            self._out.append(tag if self._unfinished is None else b"\n" + tag)
        self._out.append(text)
        self._unfinished = None if text.endswith((b"\r", b"\n")) else tag

    def _take_output(self) -> bytes:
        out = b"".join(self._out)
        self._out.clear()
        return out


_KEPT_BYTES = 8 << 20
_CHUNK = 65536
# Seconds without input after which an unfinished line is passed on.
_IDLE_S = 1
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
            note = f"deepseek-triton: {self._lost} bytes of output left out: the disk was full\n" if self._lost else ""
            is_open = True
            try:
                left = self._write_out(note.encode() + chunk)
                self._lost = left if left <= len(chunk) else self._lost + len(chunk)
            except OSError:
                # Closed, a terminal that hung up.
                is_open = False
            with self._changed:
                self._kept -= len(chunk)
                self._closed = not is_open
                self._changed.notify_all()

    def _write_out(self, chunk: bytes) -> int:
        """Write it; return how many bytes did not fit on the disk."""
        while chunk:
            try:
                chunk = chunk[os.write(self._descriptor, chunk) :]
            except BlockingIOError:
                # Another process that shares the terminal or pipe has set it to non-blocking.
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
