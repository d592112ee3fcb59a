"""One Triton server: its model's answers, over a pool of connections.

Each connection has one request at a time. It is what the gateway's cost of a chunk depends on most.
"""

import asyncio
import logging
import socket
import ssl
from collections.abc import AsyncGenerator, Awaitable, Coroutine, Iterable, Mapping
from typing import TypeVar, cast
from urllib.parse import urlsplit

import httptools
import msgspec

from deepseek_triton_client._http.http_connection import GRPC_PORT, SETTINGS
from deepseek_triton_tools.gateway.triton_call import (
    MOST_ANSWER_BYTES,
    Call,
    EventReader,
    Part,
    UpstreamError,
    error_of_status,
    outputs_of,
)

CONNECT_S = 5.0
"""How long a connection may take to come about. Servers are near; one that takes longer is as good as down."""
# The server waits once this much of its answer has not been taken, because the client of the gateway is slow.
UNREAD_BYTES = 2**20
_KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 30_000}
"""A host that is gone without a word is noticed after half a minute, also while its model is silent."""

_T = TypeVar("_T")


class ConnectionFailed(Exception):
    """The connection could not be made, was lost, or carries something other than the protocol.

    unsent: surely no request has gone over it.
    """

    def __init__(self, reason: str, *, unsent: bool = False) -> None:
        super().__init__(reason)
        self.unsent = unsent


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
        self._unread = self._status = 0
        self._ended = True
        self.error: ConnectionFailed | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def usable(self) -> bool:
        """Whether the server has kept it open, and nothing is left of the last response."""
        return self.error is None and self._ended and not self._body

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
        if self._unread > UNREAD_BYTES and self._transport is not None:
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
            # Not close(), which first waits until the server has taken what was sent: a frozen one never does.
            self._transport.abort()

    def abandon(self, reason: str) -> None:
        """Close it under whoever waits for the response, who gets ConnectionFailed."""
        self.abandoned = True
        self._fail(reason)
        self._wake()
        self.close()

    async def _wait(self) -> None:
        if self.error is not None:
            raise self.error
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
            self._fail(GRPC_PORT if data.startswith(SETTINGS, 3) else "the server sent what nobody had asked for")
        else:
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserError as error:
                self._fail(f"the answer is not HTTP: {GRPC_PORT if data.startswith(SETTINGS, 3) else error}")
        if self.error is not None:
            self.close()
        elif self._unread > UNREAD_BYTES and self._transport is not None:
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(f"the connection was lost: {exc}" if exc else "the server closed the connection")
        self._wake()

    def _fail(self, reason: str, *, unsent: bool = False) -> None:
        self.error = self.error or ConnectionFailed(reason, unsent=unsent)

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
    parts, loop, connection = urlsplit(url), asyncio.get_running_loop(), TritonConnection()
    host, secure = parts.hostname or "", tls if parts.scheme == "https" else None

    async def make() -> asyncio.Transport:
        # Looked up here: of a lookup in a create_connection that is cancelled, uvloop logs the failure as an error.
        failure = OSError(f"{host} has no address")
        port = parts.port or (443 if parts.scheme == "https" else 80)
        for *_, address in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            to, name = str(address[0]), host if secure else None
            try:
                made = await loop.create_connection(lambda: connection, to, port, ssl=secure, server_hostname=name)
                return made[0]
            except (ssl.SSLError, ConnectionResetError):
                raise  # it was connected: another address would not help
            except OSError as error:
                failure = error
        raise failure

    try:
        transport = await within(CONNECT_S, make())
        sock: socket.socket | None = transport.get_extra_info("socket")
        # Where the server has closed it already, uvloop has no socket, and asyncio a dead one.
        if sock is None or sock.fileno() < 0:
            raise ConnectionResetError(str(connection.error or "the server closed the connection at once"))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):  # macOS lacks some
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    except asyncio.CancelledError:
        connection.close()  # it may have come about in the same moment
        raise
    except TimeoutError:
        connection.close()  # here too
        raise ConnectionFailed(f"no connection within {CONNECT_S:g} s") from None
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


async def within(seconds: float, work: Awaitable[_T]) -> _T:
    """The result of `work`. Raises TimeoutError. Before Python 3.12, asyncio.wait_for can lose a cancellation."""
    task = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
        if not done:
            raise TimeoutError(f"no answer within {seconds:g} s")
        return task.result()
    finally:
        task.cancel()


_MAX_IDLE = 256
"""Connections that are kept for the next request. Others are closed after use."""
# How long a request that was stopped may take to end. After that its connection is closed, which ends it too.
_STOP_S = 5.0

_log = logging.getLogger(__name__)


class TritonServer:
    """Asks the server at `url` for `model`, with `headers` on every request."""

    def __init__(
        self, url: str, model: str, *, headers: Mapping[str, str] | None = None, tls: ssl.SSLContext | None = None
    ) -> None:
        self.url = url.rstrip("/")
        self._tls = tls
        self._headers = tuple((headers or {}).items())
        json_headers = (("Content-Type", "application/json"), *self._headers)
        self._stream_head = request_head("POST", self.url, f"/v2/models/{model}/generate_stream", json_headers)
        self._keeps_idle = True
        self._idle: list[TritonConnection] = []
        self._busy: set[TritonConnection] = set()
        """Those on which an answer to a Call is awaited."""
        self._heard = False
        """Whether one that has left them got a piece of its answer since `heard` was asked."""
        self._stopping: set[asyncio.Task[None]] = set()

    async def generate(self, call: Call) -> AsyncGenerator[list[Part], None]:
        """The answer as it comes, a list for each response. Closing the generator stops the work on the server.

        :raises UpstreamError: when the server refuses or fails it, or is lost
        """
        connection, status = await self._begin(call, stops=True)
        ended = False
        reader = EventReader()
        try:
            if status != 200:
                body = await connection.read_all()
                ended = True
                raise error_of_status(status, body)
            last: list[Part] = []
            while data := await connection.read():
                if parts := reader.feed(data):
                    last = parts
                    yield parts
                if reader.error is not None:
                    raise reader.error
            ended = True
            # Triton loses ends of streams under load. Nothing more that comes on such a connection is to be trusted.
            connection.keep_alive &= any(part.finish_reason for part in last)
        except ConnectionFailed as error:
            ended = True
            raise self._lost(error, died=True) from error
        except UpstreamError:
            ended = True  # the model's last word; closing the connection stops whatever goes on all the same
            raise
        finally:
            if ended:
                self._give_back(connection)
            else:
                self._leave_busy(connection)
                self._in_background(self._stop(call, connection, reader))

    async def ask(self, call: Call) -> dict[str, object]:
        """The outputs of a task that generates nothing, such as `task`: tokenize. Raises UpstreamError."""
        connection, status = await self._begin(call)
        try:
            body = await connection.read_all()
        except ConnectionFailed as error:
            raise self._lost(error, died=True) from error
        finally:
            self._give_back(connection)
        if status != 200:
            raise error_of_status(status, body)
        return outputs_of(body)

    async def get(self, path: str, *, fresh: bool = False) -> tuple[int, bytes]:
        """GET `path`: the status and the body. The caller limits the time. Raises UpstreamError.

        fresh: over a connection of its own. A server that exits says on the others that it is ready, and takes no more.
        """
        try:
            connection, _ = await self._connection(fresh=fresh)
            try:
                connection.send(request_head("GET", self.url, path, self._headers) + b"\r\n")
                return await connection.status(), await connection.read_all()
            finally:
                connection.keep_alive &= not fresh
                self._give_back(connection)
        except ConnectionFailed as error:
            raise self._lost(error) from error

    def heard(self) -> bool:
        """Whether any request has got a piece of its answer since this was asked before."""
        heard = self._heard or any(connection.heard for connection in self._busy)
        self._heard = False
        for connection in self._busy:
            connection.heard = False
        return heard

    def abandon(self, reason: str) -> None:
        """End all requests, as if their connections were lost."""
        for connection in self._busy:
            connection.abandon(reason)

    def keep_idle(self, keep: bool) -> None:
        """Keep connections for the next request, or close them after use, and those that nobody uses now."""
        self._keeps_idle = keep
        if not keep:
            for connection in self._idle:
                connection.close()
            self._idle.clear()

    async def close(self) -> None:
        """Wait for requests that are being stopped, and close the connections that nobody uses."""
        if self._stopping:
            await asyncio.wait(self._stopping)
        self.keep_idle(False)

    async def _begin(self, call: Call, *, stops: bool = False) -> tuple[TritonConnection, int]:
        """Send the request, and wait for the status of its response. Raises UpstreamError.

        stops: the model is told to stop if nobody waits any more.
        """
        was_sent = False
        while True:
            try:
                connection, used_before = await self._send(call, fresh=was_sent)
            except ConnectionFailed as error:
                raise self._lost(error, died=was_sent) from error
            call.sent.append(self.url)
            self._busy.add(connection)
            try:
                return connection, await connection.status()
            except asyncio.CancelledError:
                self._leave_busy(connection)
                if stops:
                    self._in_background(self._stop(call, connection, EventReader()))
                else:
                    connection.close()
                raise
            except ConnectionFailed as error:
                self._give_back(connection)
                call.sent.remove(self.url)
                was_sent = True
                # A server closes connections that were idle for long, at times in the moment in which one is used.
                if connection.abandoned or not used_before:
                    raise self._lost(error, died=not error.unsent) from error

    async def _send(self, call: Call, *, fresh: bool) -> tuple[TritonConnection, bool]:
        """A connection that carries the request, and whether it has carried one before. Raises ConnectionFailed."""
        body = msgspec.json.encode({"id": call.request_id, **call.inputs})
        more = "".join(f"{name}: {value}\r\n" for name, value in call.headers.items()).encode()
        connection, used_before = await self._connection(fresh=fresh)
        connection.send(b"%b%bContent-Length: %d\r\n\r\n%b" % (self._stream_head, more, len(body), body))
        return connection, used_before

    def _lost(self, error: ConnectionFailed, *, died: bool = False) -> UpstreamError:
        return UpstreamError(f"{self.url}: {error}", unprocessed=True, died=died)

    async def _connection(self, *, fresh: bool = False) -> tuple[TritonConnection, bool]:
        """A connection, and whether it has carried a request before. Raises ConnectionFailed."""
        while self._idle and not fresh:
            # The one that was used last: servers close those that have been idle for long.
            connection = self._idle.pop()
            if connection.usable:
                return connection, True
            connection.close()
        return await connect(self.url, self._tls), False

    def _leave_busy(self, connection: TritonConnection) -> None:
        if connection in self._busy:
            self._busy.remove(connection)
            self._heard |= connection.heard

    def _give_back(self, connection: TritonConnection) -> None:
        self._leave_busy(connection)
        if self._keeps_idle and connection.usable and connection.keep_alive and len(self._idle) < _MAX_IDLE:
            self._idle.append(connection)
        else:
            connection.close()

    async def _stop(self, call: Call, connection: TritonConnection, reader: EventReader) -> None:
        """End a request that nobody wants any more.

        The model is told, and its last words are awaited, because a connection that closes tells Triton late.
        """
        try:
            await within(_STOP_S, self._stop_and_wait(call, connection, reader))
        except (UpstreamError, ConnectionFailed, TimeoutError) as error:
            _log.info("%s: request %s was stopped by closing its connection: %s", self.url, call.request_id, error)
            connection.close()
            call.late([], UpstreamError(f"{self.url}: {error!r}", unprocessed=True))
        else:
            self._give_back(connection)

    async def _stop_and_wait(self, call: Call, connection: TritonConnection, reader: EventReader) -> None:
        teller, _ = await self._begin(Call({"text_input": "", "stop": True}, call.request_id))
        try:
            await teller.read_all()
        finally:
            self._give_back(teller)
        body = await connection.read_all()
        status, parts = await connection.status(), reader.feed(body)
        call.late(parts, reader.error if status == 200 else error_of_status(status, body))

    def _in_background(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._stopping.add(task)
        task.add_done_callback(self._stopping.discard)
