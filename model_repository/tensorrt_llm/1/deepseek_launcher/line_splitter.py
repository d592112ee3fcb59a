"""Lines out of output that comes in pieces; no reading or writing is done here.

`mpirun --tag-output` puts `[job,rank]<stream>:` before each piece that it has read from a rank, and a piece can end
anywhere in a line: the next one, of this rank or of another, follows with its tag in the middle of that line (Open MPI
4.1, orte/mca/iof/base/iof_base_output.c). So what comes is cut at the tags, and each rank's stream is put together by
itself. What follows a line's end without a tag is the launcher's own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

_TAG = re.compile(rb"\[\d+,\d+\]<std(?:out|err|diag)>:")
_BEGUN_TAG = re.compile(rb"\[[\d,]{0,24}(?:\](?:<(?:s[a-z]{0,6}>?)?)?)?\Z")
_END = re.compile(rb"\r\n|\r(?!\Z)|\n")
"""A progress bar ends its lines with a \\r. With one that came last a \\n may still belong."""
_LONGEST_LINE = 1 << 20


class _Stream:
    """What one rank writes to its stdout or its stderr, or all that comes without tags."""

    def __init__(self) -> None:
        self.text = b""
        """Of the line that has not ended yet."""
        self.num_handed_on = 0
        """Bytes of it."""


class Lines:
    """`feed`, `idle` and `end` return what is to be handed on.

    Without tags that is what came, byte for byte; else whole lines, each with its tag.
    """

    def __init__(self, on_line: Callable[[str], bool], *, tagged: bool) -> None:
        """`on_line` gets every line, with its tag and without its end, and says whether it is handed on."""
        self._on_line = on_line
        self._tagged = tagged
        self._streams: dict[bytes, _Stream] = {}
        self._tag = b""
        self._held = b""
        """Perhaps the beginning of a tag."""
        self._unfinished: bytes | None = None
        """Whose line was handed on last, without its end."""
        self._out: list[bytes] = []

    def feed(self, data: bytes) -> bytes:
        if self._tagged:
            data = self._held + data
            begun = _BEGUN_TAG.search(data)
            whole = begun.start() if begun else len(data)
            data, self._held = data[:whole], data[whole:]
        for tag, text in self._pieces(data):
            self._take(tag, text)
        return self._taken()

    def idle(self) -> bytes:
        """When nothing more has come for a while: unfinished lines, which nobody should wait for."""
        for tag, stream in self._streams.items():
            if len(stream.text) > stream.num_handed_on and self._hear(tag, stream.text):
                self._hand_on(tag, stream.text[stream.num_handed_on :])
                stream.num_handed_on = len(stream.text)
        return self._taken()

    def end(self) -> bytes:
        """When nothing more will come."""
        for tag, text in self._pieces(self._held):
            self._take(tag, text)
        self._held = b""
        return self.idle()

    def _pieces(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Each with whose it is."""
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

    def _take(self, tag: bytes, text: bytes) -> None:
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
        rest = line[stream.num_handed_on :]
        if self._hear(tag, line) or stream.num_handed_on:
            self._hand_on(tag, rest)
        stream.num_handed_on = 0

    def _hear(self, tag: bytes, line: bytes) -> bool:
        return self._on_line((tag + line).rstrip(b"\r\n").decode(errors="replace"))

    def _hand_on(self, tag: bytes, text: bytes) -> None:
        if self._unfinished != tag:
            self._out.append(tag if self._unfinished is None else b"\n" + tag)
        self._out.append(text)
        self._unfinished = None if text.endswith((b"\r", b"\n")) else tag

    def _taken(self) -> bytes:
        out = b"".join(self._out)
        self._out.clear()
        return out
