"""Blocking sockets for HTTP. The coroutines here only ever wait by blocking."""

from __future__ import annotations

import select
import socket
import ssl
from contextlib import suppress

_READ_BYTES = 2**16


class BlockingSocket:
    """See `Socket`. With `tls` None it is plain TCP."""

    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None) -> None:
        self._address = host, port
        self._tls = tls
        self._socket: socket.socket | None = None
        self._arrived = select.poll()
        self._timeout_s: float | None = None
        self._interrupted = False

    async def connect(self, timeout_s: float | None) -> None:
        self._use(socket.create_connection(self._address, timeout_s))
        sock = self._connected
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if self._tls is not None:
                # The handshake comes after `_use`, so that `interrupt` can reach the socket that it waits on.
                host, _ = self._address
                secured = self._tls.wrap_socket(sock, server_hostname=host, do_handshake_on_connect=False)
                self._use(secured)
                secured.do_handshake()
        except BaseException:
            self._connected.close()
            raise
        self._timeout_s = timeout_s
        self._arrived.register(self._connected, select.POLLIN)

    async def write(self, data: bytes, timeout_s: float | None) -> None:
        self._limit(timeout_s)
        # The server may have hung up after it had answered: `read` returns the answer, or fails too.
        with suppress(ConnectionError):
            self._connected.sendall(data)

    async def read(self, timeout_s: float | None) -> bytes:
        self._limit(timeout_s)
        return self._connected.recv(_READ_BYTES)

    @property
    def is_quiet(self) -> bool:
        sock = self._connected
        return not self._interrupted and sock.fileno() >= 0 and not self._arrived.poll(0)

    def interrupt(self) -> None:
        self._interrupted = True
        if self._socket is not None:
            # Closing a socket does not wake a thread that reads from it, but shutting it down does. TLS sockets use
            # the method of plain ones: after their own, the reading thread would take ciphertext for plain text.
            with suppress(OSError):  # already disconnected: what waited has ended by itself
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    async def close(self) -> None:
        self.interrupt()  # closing alone would not wake another thread that reads
        if self._socket is not None:
            self._socket.close()

    @property
    def _connected(self) -> socket.socket:
        assert self._socket is not None, "connect comes first"
        return self._socket

    def _use(self, sock: socket.socket) -> None:
        self._socket = sock
        # Checked once `interrupt` can see the socket: either it has shut the socket down, or its flag is seen here.
        if self._interrupted:
            sock.close()
            raise ConnectionAbortedError("interrupted")

    def _limit(self, timeout_s: float | None) -> None:
        if timeout_s != self._timeout_s:  # each change is a system call
            self._connected.settimeout(timeout_s)
            self._timeout_s = timeout_s
