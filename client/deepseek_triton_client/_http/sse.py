"""Server-sent events: bytes in, the data of complete events out. No I/O.

Follows https://html.spec.whatwg.org/multipage/server-sent-events.html#parsing-an-event-stream except for the fields
`event`, `id` and `retry`: Triton's generate_stream sends none of them, and a POST can't be resumed by event id.

Everything here works on bytes. A line ends in CR, LF or CRLF, and neither byte occurs inside a UTF-8 character, so a
chunk may end inside a character.
"""

import math

from deepseek_triton_client._core.exceptions import ProtocolError

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class SseDecoder:
    """Decodes one response, and keeps what is not complete yet. `max_bytes` limits one event; None is no limit."""

    def __init__(self, max_bytes: int | None = None) -> None:
        self._max_bytes = math.inf if max_bytes is None else max_bytes
        self._partial_line: list[bytes] = []
        self._num_partial = 0  # number of bytes in `_partial_line`
        self._data: list[bytes] = []
        self._num_bytes = 0  # number of bytes of the lines in `_data`
        self._after_cr = False
        self._at_start = True

    @property
    def pending(self) -> bool:
        """Whether an event, or a line, has begun and not ended: at the end of a body something is missing."""
        return bool(self._partial_line or self._data)

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return the data of each event completed now, lines joined by LF. Raises ProtocolError for one too large."""
        if not chunk:
            return []
        events = self._whole_events(chunk)
        if events is None:
            events = []
            for line in self._lines(chunk):
                if line:
                    self._field(line)
                elif self._data:
                    events.append(b"\n".join(self._data))
                    self._data = []
                    self._num_bytes = 0
            self._check(self._num_bytes + self._num_partial)
        return events

    def _whole_events(self, chunk: bytes) -> list[bytes] | None:
        """Return the data of a chunk of whole events as Triton writes them, which most are; otherwise None."""
        if not (chunk.startswith(b"data: ") and chunk.endswith(b"\n\n")) or b"\r" in chunk:
            return None
        if self.pending or len(chunk) > self._max_bytes:
            return None
        events = chunk[6:-2].split(b"\n\ndata: ")
        if chunk.count(b"\n") != 2 * len(events):  # some events have other lines too
            return None
        self._at_start = self._after_cr = False
        return events

    def _lines(self, chunk: bytes) -> list[bytes]:
        # A CR at the end of a chunk ends its line at once. Only the next chunk shows whether it was a CRLF, and that
        # may be a whole token later. The LF, if it comes, is dropped.
        if self._after_cr:
            chunk = chunk.removeprefix(b"\n")
        self._after_cr = chunk.endswith(b"\r")
        lines = chunk.splitlines(keepends=True)
        rest = b"" if not lines or lines[-1].endswith((b"\n", b"\r")) else lines.pop()
        if lines:
            self._partial_line.append(lines[0])
            lines[0] = b"".join(self._partial_line)
            self._partial_line = []
            self._num_partial = 0
        if rest:
            self._partial_line.append(rest)  # joined when its end arrives, because a long line comes in many pieces
            self._num_partial += len(rest)
        if self._at_start and lines:
            self._at_start = False
            lines[0] = lines[0].removeprefix(_BYTE_ORDER_MARK)
        return [line.rstrip(b"\r\n") for line in lines]

    def _field(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
            self._num_bytes += len(line)
            self._check(self._num_bytes)

    def _check(self, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            raise ProtocolError(
                f"expected events of at most connection.max_message_bytes, {self._max_bytes}, got a larger one"
            )
