"""Puts lines together out of output that comes in pieces. It reads and writes nothing itself.

`mpirun --tag-output` puts `[job,rank]<stream>:` before each piece that it has read from a rank. A piece can end
anywhere in a line; the next piece, of this rank or of another, then follows with its tag in the middle of that line
(Open MPI 4.1, orte/mca/iof/base/iof_base_output.c). The input is therefore cut at the tags, and each rank's stream is
put together by itself. Text that follows the end of a line without a tag is the launcher's own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

_TAG = re.compile(rb"\[\d+,\d+\]<std(?:out|err|diag)>:")
_BEGUN_TAG = re.compile(rb"\[[\d,]{0,24}(?:\](?:<(?:s[a-z]{0,6}>?)?)?)?\Z")
_END = re.compile(rb"\r\n|\r(?!\Z)|\n")
"""A progress bar ends its lines with a \\r. Where the \\r is the last byte so far, a \\n may still belong to it."""
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
