"""A scripted HTTP server on a real socket: each request is answered by the next script, which may do anything."""

from __future__ import annotations

import json
import socket
import ssl
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class QuietServer(ThreadingHTTPServer):
    request_queue_size = 128

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.num_closed = 0
        self.closed = threading.Condition()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up in the middle is what many tests are about: no traceback for it."""

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)
        with self.closed:
            self.num_closed += 1
            self.closed.notify_all()


class HttpServer:
    """`script(*functions)`; afterwards `requests` holds (method, path, body) of each, and `headers` theirs."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.requests: list[tuple[str, str, Any]] = []
        self.headers: list[dict[str, str]] = []
        """With names in lower case."""
        self.asked = threading.Event()
        """Set when a request has come."""
        self.gone = threading.Event()
        """Set by a script that saw the client go."""
        self.release = threading.Event()
        """Set by a test to let a waiting script go on."""
        self.num_connections = 0
        self._tls = tls
        self._scripts: list[Callable[[BaseHTTPRequestHandler], None]] = []
        self._server = QuietServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        self.url = f"{'http' if tls is None else 'https'}://127.0.0.1:{self._server.server_port}"

    def script(self, *functions: Callable[[Any], None]) -> None:
        self._scripts.extend(functions)

    def stop(self) -> None:
        self.release.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def await_closed(self, number: int) -> None:
        """Until so many connections have been closed on this side."""
        with self._server.closed:
            assert self._server.closed.wait_for(lambda: self._server.num_closed >= number, 30)

    def events(self, *payloads: Any, status: int = 200) -> Callable[[Any], None]:
        """Answers with these objects as server-sent events, each in a piece of its own."""
        return self.pieces(*(b"data: " + json.dumps(payload).encode() + b"\n\n" for payload in payloads), status=status)

    def pieces(
        self, *pieces: bytes, status: int = 200, content_type: str = "text/event-stream; charset=utf-8"
    ) -> Callable[[Any], None]:
        """Answers with a chunked body made of these."""

        def answer(handler: Any) -> None:
            self.start(handler, status, content_type)
            for piece in pieces:
                self.send(handler, piece)
            self.send(handler, b"")

        return answer

    def body(
        self, status: int, body: bytes, content_type: str = "application/json", **headers: str
    ) -> Callable[[Any], None]:
        def answer(handler: Any) -> None:
            handler.send_response(status)
            handler.send_header("Content-Type", content_type)
            handler.send_header("Content-Length", str(len(body)))
            for name, value in headers.items():
                handler.send_header(name, value)
            handler.end_headers()
            handler.wfile.write(body)

        return answer

    def raw(self, *pieces: bytes) -> Callable[[Any], None]:
        """Answers with these bytes, whatever they are, and hangs up."""

        def answer(handler: Any) -> None:
            for piece in pieces:
                handler.wfile.write(piece)
            handler.close_connection = True

        return answer

    def silence(self, handler: Any) -> None:
        """Sends nothing until the client goes."""
        with suppress(ConnectionResetError):  # it may leave with something unread
            assert handler.connection.recv(1) == b""
        self.gone.set()
        handler.close_connection = True

    def endless(self, *payloads: Any) -> Callable[[Any], None]:
        """Answers with these events, and then with nothing until the client goes."""

        def answer(handler: Any) -> None:
            self.start(handler)
            for payload in payloads:
                self.send(handler, b"data: " + json.dumps(payload).encode() + b"\n\n")
            self.silence(handler)

        return answer

    @staticmethod
    def start(handler: Any, status: int = 200, content_type: str = "text/event-stream; charset=utf-8") -> None:
        handler.send_response(status)
        handler.send_header("Content-Type", content_type)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()

    @staticmethod
    def send(handler: Any, piece: bytes) -> None:
        """One chunk of a chunked body; an empty one ends it."""
        handler.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))

    @staticmethod
    def reset(handler: Any) -> None:
        """Makes the end of the connection, which comes next, a TCP reset."""
        handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        handler.close_connection = True

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            # Headers and each piece leave at once, and Nagle's algorithm must not hold the small ones back.
            disable_nagle_algorithm = True

            def setup(self) -> None:
                server.num_connections += 1
                if server._tls is not None:
                    self.request = _secured(self.request, server._tls)
                super().setup()

            def finish(self) -> None:
                super().finish()
                if server._tls is not None:
                    self.connection.close()

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                server.requests.append((self.command, self.path, json.loads(body) if body else None))
                server.headers.append({name.lower(): value for name, value in self.headers.items()})
                server.asked.set()
                server._scripts.pop(0)(self)

            do_GET = do_POST = answer

            def log_message(self, format: str, *args: Any) -> None:
                pass

        return Handler


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
