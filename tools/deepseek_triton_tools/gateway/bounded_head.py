"""uvicorn's HTTP over httptools, with the limits that both lack: how large a request's head may be, and how slow."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MOST_HEAD_BYTES = 2**16
"""Bytes of a request's line and headers, or of what follows its last byte of body, beyond those that come in the first
piece, which is at most 256 KiB."""
HEAD_S = 60.0
"""Seconds from a connection's beginning, or a request's first byte, to the end of the request's headers."""


class BoundedHeadProtocol(HttpToolsProtocol):
    """Ends a connection, with 431 or 408, whose request has no end of its headers, or of the trailers behind a body."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._in_head = self._in_request = True
        self._num_bytes = -1
        """Bytes of the head, or behind the body, beyond the first piece with them; -1 before that."""
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._in_request or self.transport.is_closing():
            return
        self._num_bytes = 0 if self._num_bytes < 0 else self._num_bytes + len(data)
        if self._num_bytes > MOST_HEAD_BYTES:
            self._refuse(b"431 Request Header Fields Too Large")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = self._in_request = True
        self._num_bytes = -1
        self._wait()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Drop trailers: uvicorn would keep all of them, and nobody reads them."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head, self._num_bytes = False, -1
        self._stop_waiting()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_bytes = -1
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_request, self._num_bytes = False, -1
        super().on_message_complete()

    def _wait(self) -> None:
        if self._deadline is None:
            self._deadline = asyncio.get_running_loop().call_later(HEAD_S, self._refuse, b"408 Request Timeout")

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _refuse(self, status: bytes) -> None:
        self._stop_waiting()
        if not self.transport.is_closing():
            if self._in_head or not self.cycle.response_started:
                self.transport.write(b"HTTP/1.1 %b\r\nconnection: close\r\ncontent-length: 0\r\n\r\n" % status)
            self.transport.close()
