"""A scripted HTTP server on a real socket: each request is answered by the next script, which may do anything."""

import json
import socket
import ssl
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from deepseek_triton_client.testing import LoopbackServer, QuietServer, RequestHandler

Script = Callable[[RequestHandler], None]


class _CountingServer(QuietServer):
    """Counts the connections that were opened and closed; speaks TLS where `tls` is set."""

    tls: ssl.SSLContext | None = None

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.num_opened = self.num_closed = 0
        self.closed = threading.Condition()

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)
        with self.closed:
            self.num_closed += 1
            self.closed.notify_all()


class _CountedHandler(RequestHandler):
    server: _CountingServer

    def setup(self) -> None:
        self.server.num_opened += 1
        if self.server.tls is not None:
            self.request = _secured(self.request, self.server.tls)
        super().setup()

    def finish(self) -> None:
        super().finish()
        if self.server.tls is not None:
            self.connection.close()


class HttpServer(LoopbackServer):
    """Answers each request with the next function given to `script`."""

    server_class = _CountingServer
    handler_class = _CountedHandler
    wire = "http"

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.requests: list[tuple[str, str, Any]] = []
        """Method, path and JSON body of each request."""
        self.headers: list[dict[str, str]] = []
        """Headers of each request, with names in lower case."""
        self.asked = threading.Event()
        """Set when a request has come."""
        self.gone = threading.Event()
        """Set by a script that saw the client leave."""
        self.release = threading.Event()
        """Set by a test to let a waiting script go on."""
        self.scheme = "http" if tls is None else "https"
        self._scripts: list[Script] = []
        super().__init__()
        self._server.tls = tls

    def script(self, *functions: Script) -> None:
        self._scripts.extend(functions)

    def respond(self, handler: RequestHandler, body: bytes) -> None:
        handler.document = json.loads(body) if body else None
        self.requests.append((handler.command, handler.path, handler.document))
        self.headers.append({name.lower(): value for name, value in handler.headers.items()})
        self.asked.set()
        self._scripts.pop(0)(handler)

    def stop(self) -> None:
        self.release.set()
        self.close()

    @property
    def port(self) -> int:
        return int(self._server.server_port)

    @property
    def num_connections(self) -> int:
        return self._server.num_opened

    def await_closed(self, number: int) -> None:
        """Waits until so many connections have been closed on this side."""
        with self._server.closed:
            assert self._server.closed.wait_for(lambda: self._server.num_closed >= number, 30)

    def replies(self, *outputs: Any) -> Script:
        return self.events(*outputs)

    def says(self, message: str, *before: Any) -> Script:
        """Answers with an error, after these responses."""
        if before:
            return self.events(*before, {"error": message})
        return self.body(400, json.dumps({"error": message}).encode())

    def hangs(self, *outputs: Any) -> Script:
        """Answers with these responses, and then with nothing until the client leaves."""
        return self.endless(*outputs) if outputs else self.silence

    def events(self, *payloads: Any, status: int = 200) -> Script:
        """Answers with these objects as server-sent events, each in a piece of its own."""
        return self.pieces(*(b"data: " + json.dumps(payload).encode() + b"\n\n" for payload in payloads), status=status)

    def pieces(
        self, *pieces: bytes, status: int = 200, content_type: str = "text/event-stream; charset=utf-8"
    ) -> Script:
        """Answers with a chunked body made of these pieces."""

        def answer(handler: RequestHandler) -> None:
            handler.start_chunked(status, content_type)
            for piece in (*pieces, b""):
                handler.send_chunk(piece)

        return answer

    def body(self, status: int, body: bytes, content_type: str = "application/json", **headers: str) -> Script:
        return lambda handler: handler.send_whole(status, body, content_type, **headers)

    def raw(self, *pieces: bytes) -> Script:
        """Answers with these bytes, whatever they are, and hangs up."""

        def answer(handler: RequestHandler) -> None:
            for piece in pieces:
                handler.wfile.write(piece)
            handler.close_connection = True

        return answer

    def silence(self, handler: RequestHandler) -> None:
        """Sends nothing until the client leaves."""
        with suppress(ConnectionResetError):  # it may leave with something unread
            assert handler.connection.recv(1) == b""
        self.gone.set()
        handler.close_connection = True

    def endless(self, *payloads: Any) -> Script:
        """Answers with these events, and then with nothing until the client leaves."""

        def answer(handler: RequestHandler) -> None:
            handler.start_chunked()
            for payload in payloads:
                handler.send_event(payload)
            self.silence(handler)

        return answer

    @staticmethod
    def reset(handler: RequestHandler) -> None:
        """Makes the end of the connection, which comes next, a TCP reset."""
        handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        handler.close_connection = True


def _secured(plain: socket.socket, tls: ssl.SSLContext) -> ssl.SSLSocket:
    secured = tls.wrap_socket(plain, server_side=True, do_handshake_on_connect=False)
    try:
        secured.do_handshake()
    except OSError:
        # What the client has sent is read before closing, or a reset would overtake the alert that says why.
        with suppress(OSError):
            socket.socket.shutdown(secured, socket.SHUT_WR)
            while socket.socket.recv(secured, 4096):
                pass
        secured.close()
        raise
    return secured
