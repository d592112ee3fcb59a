"""One answer as it comes."""

from __future__ import annotations

import time
from collections.abc import Iterator

from deepseek_triton_client._errors import (
    Cancelled,
    DeadlineExceeded,
    DeepseekTritonError,
    ProtocolError,
    belonging_to,
)
from deepseek_triton_client._models import Chunk, Completion
from deepseek_triton_client._timeouts import Watchdog
from deepseek_triton_client._transport import ResponseStream
from deepseek_triton_client._wire import GenerateRequest


class Stream:
    """Iterate for chunks, once and from one thread; `completion()` reads what is left and sums up.

    Any error of the package can come between two chunks; it ends the stream.
    """

    def __init__(self, request: GenerateRequest, responses: ResponseStream, *, started: float) -> None:
        self.request_id = request.request_id
        self._request = request
        self._responses = responses
        self._chunks = iter(responses)
        self._started = started
        self._watchdog = Watchdog(request.timeouts, started=started, interrupt=responses.interrupt)
        self._closed = False
        self._received: list[Chunk] = []
        self._last: Chunk | None = None
        self._first_s = 0.0
        self._last_s = 0.0

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        with belonging_to(self.request_id):
            chunk = self._next()
        if chunk is None:
            raise StopIteration
        return chunk

    def completion(self) -> Completion:
        """The whole answer, chunks already taken included. Raises what reading it raises."""
        for _ in self:
            pass
        last = self._last
        assert last is not None, "a stream that ends without a finish_reason raises"
        assert last.finish_reason is not None
        if last.num_input_tokens is None or last.num_output_tokens is None:
            raise ProtocolError("the final response came without token counts", request_id=self.request_id)
        return Completion(
            text="".join(chunk.text for chunk in self._received),
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
            num_input_tokens=last.num_input_tokens,
            num_output_tokens=sum(chunk.num_output_tokens or 0 for chunk in self._received),
            request_id=self.request_id,
            time_to_first_token_s=self._first_s if self._request.streaming else None,
            total_s=self._last_s,
        )

    def close(self) -> None:
        """Cancels the request unless it has ended. May be called again."""
        if not self._closed:
            self._closed = True
            self._watchdog.stop()  # first: an interrupt must not hit a connection that serves the next request
            self._responses.close()

    def _next(self) -> Chunk | None:
        """None at the end."""
        chunk = None if self._closed else self._wait()
        if chunk is not None:
            self._note(chunk)
        elif self._last is None and self._closed:
            raise Cancelled("the stream was closed before its end")
        elif self._last is None:
            raise ProtocolError("the stream ended without a finish_reason")
        return chunk

    def _wait(self) -> Chunk | None:
        self._watchdog.expect(first=not self._received)
        try:
            chunk = next(self._chunks, None)
        except DeepseekTritonError as exc:
            self._raise_if_expired(exc)
            raise
        if chunk is None:
            self._raise_if_expired(None)
        self._watchdog.relax()
        return chunk

    def _raise_if_expired(self, cause: Exception | None) -> None:
        limit = self._watchdog.expired
        if limit is not None:
            seconds = getattr(self._request.timeouts, limit)
            raise DeadlineExceeded(f"timeouts.{limit} of {seconds:g} s ran out") from cause

    def _note(self, chunk: Chunk) -> None:
        self._last_s = time.monotonic() - self._started
        if not self._received:
            self._first_s = self._last_s
        self._received.append(chunk)
        if chunk.finish_reason is not None:
            self._last = chunk
            self._watchdog.stop()  # before the end is read, which gives the connection back for the next request
