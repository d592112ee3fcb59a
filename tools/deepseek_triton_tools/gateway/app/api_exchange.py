"""One HTTP request and its response, on bare ASGI: no other layer lies between a chunk and the socket."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable
from contextlib import suppress

from starlette.types import Message, Receive, Scope, Send

from deepseek_triton_tools.gateway.app.handled_request import HandledRequest
from deepseek_triton_tools.gateway.protocol.openai_errors import OpenAIError
from deepseek_triton_tools.gateway.settings import GatewaySettings
from deepseek_triton_tools.gateway.triton.triton_connection import within

Headers = Iterable[tuple[bytes, bytes]]
JSON = b"application/json"
_EVENTS = b"text/event-stream; charset=utf-8"
_KEEP_ALIVE = b": keep-alive\n\n"
"""A comment of server-sent events. Proxies close connections on which nothing comes for a minute or so."""


class ClientLeft(Exception):
    """The client has closed the connection. There is nobody to answer."""


class ApiExchange:
    """headers: of every response, beside those of its kind."""

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, record: HandledRequest, settings: GatewaySettings
    ) -> None:
        self.record = record
        self.headers: list[tuple[bytes, bytes]] = [(b"x-request-id", record.request_id.encode())]
        self.request_headers: list[tuple[bytes, bytes]] = scope["headers"]
        self.path_parameters: dict[str, str] = scope.get("path_params", {})
        self.begun = False
        """A response has begun, so that there can be no other one."""
        self.has_events = False
        """A stream has begun, and not only with comments."""
        self._receive = receive
        self._sends = send
        self._settings = settings
        self._body_until_s = asyncio.get_running_loop().time() + settings.body_timeout_s
        self._body_ended = not any(
            name == b"transfer-encoding" or (name == b"content-length" and value != b"0")
            for name, value in self.request_headers
        )
        self._silent: asyncio.Task[None] | None = None
        self._sent_at_s = 0.0

    async def body(self) -> bytes:
        """The whole of it. Raises OpenAIError 408 and 413, and ClientLeft."""
        pieces: list[bytes] = []
        timeout_s = self._settings.body_timeout_s
        try:
            await within(timeout_s, self._read_body(pieces, self._settings.max_body_bytes))
        except TimeoutError:
            got = sum(map(len, pieces))
            text = f"the request's body: expected all of it within {timeout_s:g} s, got {got} bytes. Send it faster."
            raise OpenAIError(408, text, code="request_timeout") from None
        return b"".join(pieces)

    async def _read_body(self, pieces: list[bytes], max_bytes: int) -> None:
        size = 0
        while True:
            message = await self._next()
            if message["type"] == "http.disconnect":
                raise self.left()
            piece = message.get("body", b"")
            size += len(piece)
            if size > max_bytes:
                raise OpenAIError(413, f"the request's body has more than {max_bytes} bytes", code="request_too_large")
            pieces.append(piece)
            if self._body_ended:
                return

    async def _send(self, message: Message) -> None:
        try:
            await self._sends(message)
        except RuntimeError as error:
            # uvicorn closes the connection when bytes behind the request are no HTTP, and uvloop refuses to write then.
            if "closed" not in str(error):
                raise
            raise self.left() from error

    async def _drop_body(self) -> None:
        while not self._body_ended and (await self._next())["type"] != "http.disconnect":
            pass

    async def _next(self) -> Message:
        message = await self._receive()
        self._body_ended |= message["type"] == "http.request" and not message.get("more_body", False)
        return message

    def left(self) -> ClientLeft:
        """To be raised where the client has gone before the response was complete."""
        self.record.client_left = True
        return ClientLeft()

    async def client_leaves(self) -> None:
        """Wait until the client closes the connection; it may be after the response."""
        while (await self._next())["type"] != "http.disconnect":
            pass

    async def respond(
        self, status: int, body: bytes, *, media_type: bytes = JSON, headers: Headers = (), more: bool = False
    ) -> None:
        """Send the whole response. more: the connection stays open until `end_stream`."""
        self.close()  # no comment may come into it
        length = (b"content-length", b"%d" % len(body))
        await self._start(status, [(b"content-type", media_type), length, *headers])
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

    def expect_stream(self) -> None:
        """Begin the stream with comments, should the first event be long in coming: the model may be busy.

        After that a refusal is an event too.
        """
        self._sent_at_s = asyncio.get_running_loop().time()
        self._silent = asyncio.ensure_future(self._keep_alive())

    async def start_stream(self) -> None:
        """Begin a stream of server-sent events, which `send_events` and `end_stream` go on with."""
        self.has_events = True
        await self._start_events()

    async def send_events(self, events: bytes) -> None:
        self._sent_at_s = asyncio.get_running_loop().time()
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def end_stream(self, events: bytes = b"") -> None:
        if self._silent is not None:
            self._silent.cancel()
        await self._send({"type": "http.response.body", "body": events})

    async def refuse(self, error: OpenAIError) -> None:
        """Tell the error: as the response, or as the last event of a stream that has begun."""
        self.record.error_code = error.code or error.kind
        if self.begun:
            await self.end_stream(b"data: %b\n\n" % error.body())
            return
        headers = list(error.headers)
        if error.retry_after_s is not None:
            headers.append((b"retry-after", b"%d" % math.ceil(error.retry_after_s)))
        unread = not self._body_ended
        await self.respond(error.status, error.body(), headers=headers, more=unread)
        if unread:
            # A connection that is closed before its bytes are read is reset, and the client may never see the response.
            rest_s = max(0.0, self._body_until_s - asyncio.get_running_loop().time())
            with suppress(TimeoutError, asyncio.CancelledError):  # the latter comes from uvicorn when it stops
                await within(rest_s, self._drop_body())
            await self.end_stream()

    def close(self) -> None:
        """Nothing more will be sent."""
        if self._silent is not None:
            self._silent.cancel()

    async def _start(self, status: int, headers: Headers) -> None:
        self.begun = True
        self.record.status = status
        # Whoever sends the rest of a body slowly would hold the connection.
        closing = () if self._body_ended else ((b"connection", b"close"),)
        told = [*headers, *self.headers, *closing]
        await self._send({"type": "http.response.start", "status": status, "headers": told})

    async def _start_events(self) -> None:
        if not self.begun:
            # nginx holds events back unless it is told not to.
            await self._start(
                200, [(b"content-type", _EVENTS), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
            )

    async def _keep_alive(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            rest_s = self._sent_at_s + self._settings.keep_alive_s - loop.time()
            if rest_s > 0:
                await asyncio.sleep(rest_s)
            else:
                await self._start_events()
                await self.send_events(_KEEP_ALIVE)
