"""What a client makes of the bytes it got: events, texts, stamps. Nothing here waits for anything."""

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic_ns
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from tritonclient.grpc.service_pb2 import ModelStreamInferResponse

STAMP_CHARS = 16
"""A space and 15 digits, as the simulated engine's `text: stamps` writes them."""

OK, SHORT, WRONG, REFUSED, LOST = "ok", "short", "wrong", "refused", "lost"
OUTCOMES = (OK, SHORT, WRONG, REFUSED, LOST)


class Chunk(NamedTuple):
    """One response."""

    text: str = ""
    error: str = ""


class GrpcDecoder:
    """Each piece is one serialised ModelStreamInferResponse."""

    def feed(self, data: bytes) -> list[Chunk]:
        message = ModelStreamInferResponse.FromString(data)
        if message.error_message:
            return [Chunk(error=message.error_message)]
        response = message.infer_response
        for output, raw in zip(response.outputs, response.raw_output_contents, strict=True):
            if output.name == "text_output":
                return [Chunk(raw[4:].decode())]  # behind its length: the tensor has one text
        return [Chunk()]


class HttpDecoder:
    """Pieces of an HTTP response cut anywhere: chunked server-sent events, or a body that is an error."""

    def __init__(self) -> None:
        self._raw = b""
        self._events = b""
        self._in_body = False

    def feed(self, data: bytes) -> list[Chunk]:
        self._raw += data
        if not self._in_body:
            head, separator, body = self._raw.partition(b"\r\n\r\n")
            if not separator:
                return []
            if b"chunked" not in head.lower():
                return [Chunk(error=body.decode(errors="replace") or head.decode(errors="replace"))]
            self._raw, self._in_body = body, True
        self._dechunk()
        *events, self._events = self._events.split(b"\n\n")
        return [_from_event(event) for event in events]

    def _dechunk(self) -> None:
        while True:
            size, separator, rest = self._raw.partition(b"\r\n")
            if not separator or len(rest) < (length := int(size, 16)) + 2:
                return
            self._events += rest[:length]
            self._raw = rest[length + 2 :]


def _from_event(event: bytes) -> Chunk:
    document = json.loads(event.removeprefix(b"data: "))
    return Chunk(error=document["error"]) if "error" in document else Chunk(document.get("text_output", ""))


class Record:
    """What came of one stream, with when it came.

    Increments are kept as they come and read in the end, so that reading takes no time from the streams. Of whole texts
    that would be gigabytes: they are read at once, and what is new is kept.
    """

    def __init__(self, make_decoder: Callable[[], GrpcDecoder | HttpDecoder], *, cumulative: bool) -> None:
        self.opened_ns = 0
        self.ended_ns = 0
        self.lost = ""
        """Why the connection or the call ended, where it wasn't the server's answer."""
        self.rewritten = False
        """A whole text did not begin with the one before it."""
        self._decoder = make_decoder()
        self._pieces: list[tuple[int, bytes]] = []
        self._chunks: list[tuple[int, Chunk]] = []
        self._text = ""
        self.arrived = self._read if cumulative else self._keep

    def _keep(self, data: bytes) -> None:
        self._pieces.append((monotonic_ns(), data))

    def _read(self, data: bytes) -> None:
        now = monotonic_ns()
        for text, error in self._decoder.feed(data):
            self._chunks.append((now, Chunk(text[len(self._text) :], error)))
            if text:  # what ends a stream may have none
                self.rewritten |= not text.startswith(self._text)
                self._text = text

    def chunks(self) -> list[tuple[int, Chunk]]:
        """All of it; to be called once, at the end."""
        read = [(arrived_ns, chunk) for arrived_ns, data in self._pieces for chunk in self._decoder.feed(data)]
        return read + self._chunks


def is_cumulative(texts: Sequence[str]) -> bool:
    """Whether each response has the text of those before it. One alone may be either."""
    return len(texts) > 1 and all(after.startswith(before) for before, after in itertools.pairwise(texts))


@dataclass(frozen=True, kw_only=True)
class StreamSample:
    """One stream as its client saw it; times in microseconds of the monotonic clock."""

    outcome: str
    detail: str
    opened_us: int
    ended_us: int
    chunk_us: npt.NDArray[np.int64]
    """When each response with text came."""
    chunk_tokens: npt.NDArray[np.int64]
    stamp_us: npt.NDArray[np.int64]
    """When tokens were made: all of them, or those that begin a stamp."""
    stamp_arrival_us: npt.NDArray[np.int64]


def sample_of(record: Record, *, num_tokens: int, chars_per_token: int) -> StreamSample:
    """What the record says of a stream that should have had `num_tokens`."""
    chunks = record.chunks()
    error = next((chunk.error for _, chunk in chunks if chunk.error), "")
    with_text = [(arrived_ns, chunk.text) for arrived_ns, chunk in chunks if chunk.text]
    chunk_us = np.array([arrived_ns // 1000 for arrived_ns, _ in with_text], dtype=np.int64)
    num_chars = np.array([len(text) for _, text in with_text], dtype=np.int64)
    stamps = read_stamps("".join(text for _, text in with_text))
    outcome, detail = OK, record.lost or error
    if record.lost:
        outcome = LOST
    elif error:
        outcome = REFUSED
    elif record.rewritten or stamps is None or num_chars.sum() > num_tokens * chars_per_token:
        outcome = WRONG
    elif num_chars.sum() < num_tokens * chars_per_token:
        outcome = SHORT
    stamp_us = np.zeros(0, dtype=np.int64) if stamps is None else stamps
    # The response with the character that a stamp begins with.
    carriers = np.searchsorted(np.cumsum(num_chars), STAMP_CHARS * np.arange(len(stamp_us)), side="right")
    return StreamSample(
        outcome=outcome,
        detail=detail,
        opened_us=record.opened_ns // 1000,
        ended_us=record.ended_ns // 1000,
        chunk_us=chunk_us,
        chunk_tokens=num_chars // chars_per_token,
        stamp_us=stamp_us,
        stamp_arrival_us=chunk_us[carriers],
    )


def read_stamps(text: str) -> npt.NDArray[np.int64] | None:
    """The stamps of a text, without a last one that is cut; None where something else is there, or one is not in order.

    Two tokens of a stream never have the same one, so that as many of them as there should be, in order, are all.
    """
    if not text.isascii():
        return None
    num_whole, num_of_cut = divmod(len(text), STAMP_CHARS)
    if num_of_cut:
        text += "9" * (STAMP_CHARS - num_of_cut)  # the highest that it could have become: in order, too
    table = np.frombuffer(text.encode(), dtype=np.uint8).reshape(-1, STAMP_CHARS)
    digits = table[:, 1:].astype(np.int64) - ord("0")
    if (table[:, 0] != ord(" ")).any() or (digits < 0).any() or (digits > 9).any():
        return None
    stamps: npt.NDArray[np.int64] = digits @ (10 ** np.arange(STAMP_CHARS - 2, -1, -1, dtype=np.int64))
    return stamps[:num_whole] if (np.diff(stamps) > 0).all() else None
