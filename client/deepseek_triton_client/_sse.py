"""Server-sent events: bytes in, the data of whole events out. No I/O.

Follows https://html.spec.whatwg.org/multipage/server-sent-events.html#parsing-an-event-stream, less the fields `event`,
`id` and `retry`: Triton's generate_stream sends none of them, and a POST can't be resumed by event id.

Works on bytes throughout. A line ends in CR, LF or CRLF, and neither byte occurs inside a UTF-8 character, so a chunk
border inside a character needs no care.
"""

from __future__ import annotations

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class SseDecoder:
    """One per response: keeps the line and the event that are not complete yet."""

    def __init__(self) -> None:
        self._partial_line = b""
        self._data: list[bytes] = []
        self._after_cr = False
        self._at_start = True

    def feed(self, chunk: bytes) -> list[bytes]:
        """The data of each event that `chunk` completes; lines of one event are joined by LF."""
        if not chunk:
            return []
        events = []
        for line in self._lines(chunk):
            if line:
                self._field(line)
            elif self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events

    def _lines(self, chunk: bytes) -> list[bytes]:
        # A CR at the end of a chunk ends its line at once, rather than when the next chunk shows whether it was a CRLF:
        # that may be a whole token later. The LF, if it comes, is dropped.
        if self._after_cr:
            chunk = chunk.removeprefix(b"\n")
        self._after_cr = chunk.endswith(b"\r")
        lines = (self._partial_line + chunk).splitlines(keepends=True)
        ended = not lines or lines[-1].endswith((b"\n", b"\r"))
        self._partial_line = b"" if ended else lines.pop()
        return [self._without_mark(line.rstrip(b"\r\n")) for line in lines]

    def _without_mark(self, line: bytes) -> bytes:
        if self._at_start:
            self._at_start = False
            return line.removeprefix(_BYTE_ORDER_MARK)
        return line

    def _field(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
