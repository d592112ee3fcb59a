"""One HTTP connection: a socket, blocking or asyncio's, and the conversation on it."""

from __future__ import annotations

from typing import Protocol

from deepseek_triton_client._http.http11 import Head, Headers, Http11Protocol


class Socket(Protocol):
    """Bytes to and from one server. Raises OSError."""

    async def connect(self, timeout_s: float | None) -> None:
        """The TLS handshake included. What it leaves behind where it fails needs no `close`."""
        ...

    async def write(self, data: bytes, timeout_s: float | None) -> None:
        """Not an error where the server has hung up: it may have answered before, which `read` tells."""
        ...

    async def read(self, timeout_s: float | None) -> bytes:
        """At least one byte; nothing where the server has closed its end."""
        ...

    @property
    def is_quiet(self) -> bool:
        """Connected, and nothing to read, not even the end."""
        ...

    def interrupt(self) -> None:
        """Makes what waits fail soon, and the socket useless. From any thread; never raises."""
        ...

    async def close(self) -> None:
        """At once, whatever is under way. May be called again."""
        ...


class HttpConnection:
    """One request at a time, to its end or to `close`. `timeout_s` limits each wait for the network."""

    def __init__(self, socket: Socket) -> None:
        self.is_connected = False
        self._socket = socket
        self._conversation = Http11Protocol()

    async def connect(self, timeout_s: float | None) -> None:
        """Raises OSError: nothing has been sent then."""
        await self._socket.connect(timeout_s)
        self.is_connected = True

    async def send(
        self, method: str, target: bytes, headers: Headers, body: bytes = b"", *, timeout_s: float | None = None
    ) -> Head:
        """Returns when the head of the response is there. Raises what `Http11Protocol` and `Socket` raise."""
        talk, socket = self._conversation, self._socket
        await socket.write(talk.request(method, target, headers, body), timeout_s)
        while (head := talk.head()) is None:
            talk.feed(await socket.read(timeout_s))
        return head

    async def read(self, timeout_s: float | None = None) -> bytes:
        """What there is of the body, but at least one byte; nothing at its end."""
        talk, socket = self._conversation, self._socket
        while (data := talk.body()) is None:
            talk.feed(await socket.read(timeout_s))
        return data

    @property
    def is_idle(self) -> bool:
        """The last response was read to its end, and nothing has come since, not even the end of the connection."""
        return self._conversation.is_idle and self._socket.is_quiet

    def interrupt(self) -> None:
        self._socket.interrupt()

    async def close(self) -> None:
        await self._socket.close()
