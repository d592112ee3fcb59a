"""A connection to a server for one request at a time. It is what the gateway's cost of a chunk depends on most."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Coroutine, Iterable
from typing import TypeVar, cast
from urllib.parse import urlsplit

import httptools

from deepseek_triton_tools.gateway.triton_call import MOST_ANSWER_BYTES

_CONNECT_S = 5.0
"""How long a connection may take to come about. Servers are near; one that takes longer is as good as down."""
_UNREAD_BYTES = 2**20
"""The server waits once this much of its answer has not been taken, because the client of the gateway is slow."""
_KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 30_000}
"""A host that is gone without a word is noticed after half a minute, also while its model is silent."""

_T = TypeVar("_T")


class ConnectionFailed(Exception):
    """The connection could not be made, was lost, or carries something other than HTTP."""


class TritonConnection(asyncio.Protocol):
    """Sends a request, and gives the status and then the body of its response."""

    def __init__(self) -> None:
        self.keep_alive = False
        """After the end of a response: whether the connection can be used for another request."""
        self.heard = False
        """Set with each piece of the response; whoever wants to know of the next one clears it."""
        self.abandoned = False
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._body: list[bytes] = []
        self._unread = 0
        self._status = 0
        self._ended = True
        self._error: ConnectionFailed | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def usable(self) -> bool:
        """Whether the server has kept it open, and nothing is left of the last response."""
        return self._error is None and self._ended and not self._body

    def send(self, request: bytes) -> None:
        """Send a whole request, when no other is under way."""
        assert self._transport is not None
        self._parser = httptools.HttpResponseParser(self)
        self._status, self._ended, self.keep_alive, self.heard = 0, False, False, False
        self._transport.write(request)

    async def status(self) -> int:
        """Wait for the response's first line and headers."""
        while not self._status:
            await self._wait()
        return self._status

    async def read(self) -> bytes:
        """Return what has come of the body, at least one byte; b"" at its end. Raises ConnectionFailed."""
        while not self._body:
            if self._ended:
                return b""
            await self._wait()
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body.clear()
        if self._unread > _UNREAD_BYTES and self._transport is not None:
            self._transport.resume_reading()
        self._unread = 0
        return body

    async def read_all(self) -> bytes:
        """Return the rest of the body. Raises ConnectionFailed for more than MOST_ANSWER_BYTES."""
        pieces, size = [], 0
        while piece := await self.read():
            pieces.append(piece)
            size += len(piece)
            if size > MOST_ANSWER_BYTES:
                self._fail(f"the answer has more than {MOST_ANSWER_BYTES:,} bytes")
                self.close()
                await self._wait()
        return b"".join(pieces)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def abandon(self, reason: str) -> None:
        """Close it under whoever waits for the response, who gets ConnectionFailed."""
        self.abandoned = True
        self._fail(reason)
        self._wake()
        self.close()

    async def _wait(self) -> None:
        if self._error is not None:
            raise self._error
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports have the methods, not the class

    def data_received(self, data: bytes) -> None:
        self.heard = True
        if self._ended:  # else it would be taken for the beginning of the next answer
            self._fail("the server sent what nobody had asked for")
        else:
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserError as error:
                self._fail(f"the answer is not HTTP: {error}")
        if self._error is not None:
            self.close()
        elif self._unread > _UNREAD_BYTES and self._transport is not None:
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(f"the connection was lost: {exc}" if exc else "the server closed the connection")
        self._wake()

    def _fail(self, reason: str) -> None:
        self._error = self._error or ConnectionFailed(reason)

    # What httptools calls.

    def on_message_begin(self) -> None:
        if self._ended:
            self._fail("the server sent what nobody had asked for")

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._body.append(body)
        self._unread += len(body)

    def on_message_complete(self) -> None:
        self._ended = True
        self.keep_alive = self._parser.should_keep_alive()


async def connect(url: str, tls: ssl.SSLContext | None) -> TritonConnection:
    """Connect to the host and port of `url`. Raises ConnectionFailed."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    connection = TritonConnection()
    making = asyncio.get_running_loop().create_connection(
        lambda: connection, parts.hostname or "", port, ssl=tls if parts.scheme == "https" else None
    )
    try:
        transport, _ = await within(_CONNECT_S, making)
        sock: socket.socket | None = transport.get_extra_info("socket")
        # Where the server has closed it already, uvloop has no socket, and asyncio a dead one.
        if sock is None or sock.fileno() < 0:
            raise ConnectionResetError("the server closed the connection at once")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):  # macOS lacks some
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    except asyncio.CancelledError:
        connection.close()  # it may have come about in the same moment
        raise
    except TimeoutError:
        connection.close()  # here too
        raise ConnectionFailed(f"no connection within {_CONNECT_S:g} s") from None
    except ssl.SSLCertVerificationError as error:
        raise ConnectionFailed(f"can't trust its certificate (see --upstream-ca): {error.verify_message}") from error
    except (OSError, UnicodeError) as error:  # the latter for names that no host can have
        reason = str(error) or "the connection was closed at once; is it HTTPS that is served there?"
        raise ConnectionFailed(f"can't connect: {reason}") from error
    return connection


def request_head(method: str, url: str, path: str, headers: Iterable[tuple[str, str]]) -> bytes:
    """The request's lines but for Content-Length and the empty one."""
    lines = [f"{method} {urlsplit(url).path.rstrip('/')}{path} HTTP/1.1", f"Host: {urlsplit(url).netloc}"]
    lines += [f"{name}: {value}" for name, value in headers]
    return "\r\n".join(lines).encode() + b"\r\n"


async def within(seconds: float, work: Coroutine[object, object, _T]) -> _T:
    """The result of `work`. Raises TimeoutError. Before Python 3.12, asyncio.wait_for can lose a cancellation."""
    task = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
        if not done:
            raise TimeoutError
        return task.result()
    finally:
        task.cancel()
