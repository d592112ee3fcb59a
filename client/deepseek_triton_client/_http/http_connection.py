"""One HTTP connection: the protocol over a socket, which is blocking or asyncio's."""

from __future__ import annotations

from typing import Protocol

from deepseek_triton_client._http.http11 import Head, Headers, Http11Protocol


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


class HttpConnection:
    """One request at a time, until its response has ended or `close`. `timeout_s` limits each wait for the network."""

    def __init__(self, socket: Socket) -> None:
        self.is_connected = False
        self._socket = socket
        self._protocol = Http11Protocol()

    async def connect(self, timeout_s: float | None) -> None:
        """Connect. Raises OSError; nothing has been sent then."""
        await self._socket.connect(timeout_s)
        self.is_connected = True

    async def send(
        self, method: str, target: bytes, headers: Headers, body: bytes = b"", *, timeout_s: float | None = None
    ) -> Head:
        """Send a request and return the head of its response. Raises what `Http11Protocol` and `Socket` raise."""
        protocol, socket = self._protocol, self._socket
        await socket.write(protocol.request(method, target, headers, body), timeout_s)
        while (head := protocol.head()) is None:
            protocol.feed(await socket.read(timeout_s))
        return head

    async def read(self, timeout_s: float | None = None) -> bytes:
        """Return at least one byte of the body, or b"" at its end."""
        protocol, socket = self._protocol, self._socket
        while (data := protocol.body()) is None:
            protocol.feed(await socket.read(timeout_s))
        return data

    @property
    def is_idle(self) -> bool:
        """Whether the last response was read to its end, and nothing came since, not even the connection's end."""
        return self._protocol.is_idle and self._socket.is_quiet

    def interrupt(self) -> None:
        self._socket.interrupt()

    async def close(self) -> None:
        await self._socket.close()
