"""One Triton server: its model's answers, over a pool of connections."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncGenerator, Coroutine, Mapping

import msgspec

from deepseek_triton_tools.gateway.triton_call import (
    Call,
    EventReader,
    Part,
    UpstreamError,
    error_of_status,
    outputs_of,
)
from deepseek_triton_tools.gateway.triton_connection import (
    ConnectionFailed,
    TritonConnection,
    connect,
    request_head,
    within,
)

_MAX_IDLE = 256
"""Connections that are kept for the next request. Others are closed after use."""
_STOP_S = 5.0
"""How long a request that was stopped may take to end. After that its connection is closed, which ends it too."""

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

    async def get(self, path: str) -> tuple[int, bytes]:
        """GET `path`: the status and the body. The caller limits the time. Raises UpstreamError."""
        try:
            connection, _ = await self._connection()
            try:
                connection.send(request_head("GET", self.url, path, self._headers) + b"\r\n")
                return await connection.status(), await connection.read_all()
            finally:
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
            self._close_idle()

    async def close(self) -> None:
        """Wait for requests that are being stopped, and close the connections that nobody uses."""
        if self._stopping:
            await asyncio.wait(self._stopping)
        self._close_idle()

    async def _begin(self, call: Call, *, stops: bool = False) -> tuple[TritonConnection, int]:
        """Send the request, and wait for the status of its response. Raises UpstreamError.

        stops: the model is told to stop if nobody waits any more.
        """
        body = msgspec.json.encode({"id": call.request_id, **call.inputs})
        more = "".join(f"{name}: {value}\r\n" for name, value in call.headers.items()).encode()
        request = b"%b%bContent-Length: %d\r\n\r\n%b" % (self._stream_head, more, len(body), body)
        was_sent = False
        while True:
            try:
                connection, used_before = await self._connection(fresh=was_sent)
            except ConnectionFailed as error:
                raise self._lost(error, died=was_sent) from error
            connection.send(request)
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
                    raise self._lost(error, died=True) from error

    def _lost(self, error: ConnectionFailed, *, died: bool = False) -> UpstreamError:
        return UpstreamError(f"{self.url}: {error}", unprocessed=True, died=died)

    async def _connection(self, *, fresh: bool = False) -> tuple[TritonConnection, bool]:
        """A connection, and whether it has carried a request before. Raises ConnectionFailed."""
        while self._idle and not fresh:
            connection = self._idle.pop()
            if connection.usable:
                return connection, True
            connection.close()
        return await connect(self.url, self._tls), False

    def _leave_busy(self, connection: TritonConnection) -> None:
        if connection in self._busy:
            self._busy.remove(connection)
            self._heard |= connection.heard

    def _close_idle(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

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
            if call.late is not None:
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
        if call.late is not None:
            status, parts = await connection.status(), reader.feed(body)
            call.late(parts, reader.error if status == 200 else error_of_status(status, body))

    def _in_background(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._stopping.add(task)
        task.add_done_callback(self._stopping.discard)
