"""HTTP/1.1 connections: the protocol, one connection over a socket, and those that wait for their next request."""

import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple, Protocol

import h11

from deepseek_triton_client._core.client_settings import Endpoint
from deepseek_triton_client._core.exceptions import DeepseekTritonError, ProtocolError, ServerUnavailable
from deepseek_triton_client._http.http_errors import EXCHANGE_ERRORS, connect_error, exchange_error, repeatable

Headers = list[tuple[bytes, bytes]]

Head = tuple[int, Mapping[str, str]]
"""Status and headers of a response; header names are in lower case."""

Answer = tuple[int, Mapping[str, str], bytes]
"""Status, headers and body of a response."""

_ERROR_BODY_BYTES = 2**16
"""Largest number of bytes that are read of an error's body."""

SETTINGS = b"\x04\0\0\0\0\0"
"""Type, flags and stream of the frame that begins every HTTP/2 connection, behind its length of 3 bytes (RFC 9113)."""
GRPC_PORT = "it is HTTP/2, so this is a gRPC port: grpc:// instead of http://"

MOST_INFORMATIONAL = 100
"""Responses of status 1xx before the response. A server may send any number of them, and never another one."""


class Http11Protocol:
    """One request after the other on one connection. Raises h11.LocalProtocolError for a request that is not HTTP,
    h11.RemoteProtocolError for a response that is not, and ConnectionError for a response that breaks off."""

    def __init__(self) -> None:
        self._http = h11.Connection(h11.CLIENT)
        self._is_broken_off = False
        self._is_complete = False
        self._num_informational = 0

    @property
    def is_idle(self) -> bool:
        """Whether the last response was read to its end, nothing came after it, and another request may follow."""
        http = self._http
        return http.our_state is http.their_state is h11.DONE and not http.trailing_data[0]

    def request(self, method: str, target: bytes, headers: Headers, body: bytes) -> bytes:
        """Return the bytes of a request. With a body, `headers` must have a content-length."""
        if self._http.our_state is h11.DONE:
            self._http.start_next_cycle()
            self._is_complete = False
            self._num_informational = 0
        send = self._http.send
        data = send(h11.Request(method=method, target=target, headers=headers)) or b""
        if body:
            data += send(h11.Data(data=body)) or b""
        return data + (send(h11.EndOfMessage()) or b"")

    def feed(self, data: bytes) -> None:
        """Take in received bytes; no bytes mean that the server has closed its side."""
        self._is_broken_off = not data
        self._http.receive_data(data)

    def head(self) -> Head | None:
        """Return the head of the response, or None if it has not arrived."""
        while True:
            event = self._next()
            if event is h11.NEED_DATA:
                return None
            if isinstance(event, h11.Response):
                return event.status_code, {name.decode(): value.decode("latin-1") for name, value in event.headers}
            self._num_informational += 1
            if self._num_informational > MOST_INFORMATIONAL:
                raise h11.RemoteProtocolError(f"it has more than {MOST_INFORMATIONAL} informational responses")

    def body(self) -> bytes | None:
        """Return the part of the body that has arrived: None if there is none yet, b"" at its end."""
        pieces = []
        while not self._is_complete:
            event = self._next()
            if isinstance(event, h11.Data):
                pieces.append(bytes(event.data))
            elif event is h11.NEED_DATA:
                break
            else:
                self._is_complete = True
        return b"".join(pieces) if pieces or self._is_complete else None

    def _next(self) -> object:
        try:
            return self._http.next_event()
        except h11.RemoteProtocolError as exc:
            if self._http.trailing_data[0].startswith(SETTINGS, 3):
                raise h11.RemoteProtocolError(GRPC_PORT) from exc
            if self._is_broken_off:
                raise ConnectionAbortedError("the server closed it before the end of its response") from exc
            raise


class Socket(Protocol):
    """A connection that carries bytes to and from one server. Raises OSError."""

    async def connect(self, timeout_s: float | None) -> None:
        """Connect, with the TLS handshake. After a failure no `close` is needed."""
        ...

    async def write(self, data: bytes, timeout_s: float | None) -> None:
        """Send the data. A server that has hung up is no error here: `read` tells, after what came before."""
        ...

    async def read(self, timeout_s: float | None) -> bytes:
        """Return at least one byte, or b"" if the server has closed its side."""
        ...

    @property
    def is_quiet(self) -> bool:
        """Whether it is connected and has nothing to read, not even the end of the connection."""
        ...

    def interrupt(self) -> None:
        """Make a waiting call fail soon, and the socket unusable. May be called from any thread; never raises."""
        ...

    async def close(self) -> None:
        """Close at once, even while a call waits. May be called again."""
        ...


class HttpRequest(NamedTuple):
    method: str
    target: bytes
    headers: Headers
    body: bytes = b""


class HttpConnection:
    """One request at a time, until its response has ended or `close`. Raises only errors of this package."""

    _request: HttpRequest

    def __init__(self, socket: Socket, endpoint: Endpoint) -> None:
        self._socket = socket
        self._endpoint = endpoint
        self._protocol = Http11Protocol()
        self._is_connected = False
        self._timeout_s: float | None = None

    @property
    def what(self) -> str:
        """The request, for error messages. Without the query, which may hold a secret."""
        path = self._request.target.decode().partition("?")[0]
        return f"{self._request.method} {self._endpoint.scheme}://{self._endpoint.address}{path}"

    async def send(self, request: HttpRequest, *, connect_s: float | None, timeout_s: float | None = None) -> Head:
        """Connect if need be, and send the request. Returns the head of the response.

        `timeout_s` limits each wait for the network once there is a connection, in `read` too.
        """
        self._request, self._timeout_s = request, timeout_s
        protocol, socket = self._protocol, self._socket
        if not self._is_connected:
            try:
                await socket.connect(connect_s)
            except OSError as exc:
                raise connect_error(exc, str(self._endpoint), connect_s) from exc
            self._is_connected = True
        try:
            await socket.write(protocol.request(*request), timeout_s)
            while (head := protocol.head()) is None:
                protocol.feed(await socket.read(timeout_s))
        except EXCHANGE_ERRORS as exc:
            raise exchange_error(exc, self.what, timeout_s) from exc
        return head

    async def read(self) -> bytes:
        """Return at least one byte of the body, or b"" at its end."""
        protocol = self._protocol
        try:
            while (data := protocol.body()) is None:
                protocol.feed(await self._socket.read(self._timeout_s))
        except EXCHANGE_ERRORS as exc:
            raise exchange_error(exc, self.what, self._timeout_s) from exc
        return data

    async def read_error(self) -> bytes:
        """Return the beginning of an error's body, and only what came of it if the connection breaks off."""
        body = bytearray()
        with suppress(ServerUnavailable, ProtocolError):  # the status already tells that something is wrong
            while len(body) < _ERROR_BODY_BYTES and (data := await self.read()):
                body += data
        return bytes(body[:_ERROR_BODY_BYTES])

    async def fetch(self, request: HttpRequest, timeout_s: float | None, limit: int | None) -> Answer:
        """Send a request that generates nothing, so that it is safe to send it again, and read the whole answer.

        :param limit: the largest size of a body, in bytes. Of an error's body only the beginning is read.
        """
        try:
            status, headers = await self.send(request, connect_s=timeout_s, timeout_s=timeout_s)
            if status != 200:
                return status, headers, await self.read_error()
            body = bytearray()
            while data := await self.read():
                body += data
                if limit is not None and len(body) > limit:
                    expected = f"expected at most connection.max_message_bytes, {limit}"
                    raise ProtocolError(f"{self.what}: {expected}, got a larger response")
            return status, headers, bytes(body)
        except DeepseekTritonError as exc:
            repeatable(exc)
            raise

    @property
    def is_idle(self) -> bool:
        """Whether the last response was read to its end, and nothing came since, not even the connection's end."""
        return self._protocol.is_idle and self._socket.is_quiet

    def interrupt(self) -> None:
        self._socket.interrupt()

    async def close(self) -> None:
        await self._socket.close()


class Pool:
    """Idle connections, the last one used first, so that the others can grow old. Threads may share the pool.

    Their number is not limited: the server says when requests are too many, and a pool that queues would hide it.
    """

    def __init__(self, keepalive_s: float) -> None:
        self._keepalive_s = keepalive_s
        # (moment when it was given back, connection), oldest first.
        self._idle: deque[tuple[float, HttpConnection]] = deque()
        self._lock = threading.Lock()
        self.closed = False

    async def take(self) -> HttpConnection | None:
        """Return an idle connection, or None."""
        while True:
            with self._lock:
                if not self._idle:
                    return None
                since, connection = self._idle.pop()
            if self._is_fresh(since) and connection.is_idle:
                return connection
            await connection.close()

    async def give_back(self, connection: HttpConnection) -> None:
        """Keep the connection if it can serve another request. Closes connections that have waited too long."""
        to_close = []
        is_idle = connection.is_idle
        with self._lock:
            if is_idle and not self.closed:
                self._idle.append((time.monotonic(), connection))
            else:
                to_close.append(connection)
            while self._idle and not self._is_fresh(self._idle[0][0]):
                to_close.append(self._idle.popleft()[1])
        for each in to_close:
            await each.close()

    async def close(self) -> None:
        """Close all connections; none is kept from now on."""
        with self._lock:
            self.closed = True
            to_close = [connection for _, connection in self._idle]
            self._idle.clear()
        for each in to_close:
            await each.close()

    def _is_fresh(self, since: float) -> bool:
        return time.monotonic() - since < self._keepalive_s
