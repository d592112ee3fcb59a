"""A Triton server of which the test decides every byte: where an answer is cut, when it stalls and how it breaks."""

import json
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from socketserver import BaseRequestHandler, ThreadingTCPServer
from typing import Any, cast

from deepseek_triton_tools.gateway.application import create_app
from deepseek_triton_tools.gateway.settings import GatewaySettings, ModelSettings
from support.asgi_server import serving_app
from support.waiting import PATIENCE_S

Json = dict[str, Any]
INFO = {"name": "tiny", "checkpoint": "/models/tiny", "max_seq_len": 4096, "default_max_tokens": 256}
INFO |= {"thinking_switch": True}


def event(**outputs: object) -> bytes:
    """One response of the model, as the contract has it."""
    return b"data: %b\n\n" % json.dumps(outputs, ensure_ascii=False).encode()


class Wire:
    """The way to the gateway, for one answer."""

    def __init__(self, connection: socket.socket, triton: "RawTriton", request_id: str) -> None:
        self._connection = connection
        self._triton = triton
        self.request_id = request_id
        self.keep = True

    def head(self, status: int = 200) -> None:
        self.send(b"HTTP/1.1 %d X\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n" % status)

    def chunk(self, data: bytes) -> None:
        """A part of the body; b"" ends it."""
        self.send(b"%x\r\n%b\r\n" % (len(data), data))

    def send(self, data: bytes) -> None:
        self._connection.sendall(data)

    def close(self) -> None:
        """No other request is read from this connection."""
        self.keep = False

    def reset(self) -> None:
        """Break the connection as the death of a host does."""
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.keep = False

    def wait_for_stop(self) -> None:
        """Wait until the gateway has told the model to stop this request."""
        assert self._triton.stop_of(self.request_id).wait(PATIENCE_S), "no stop request came"


Script = Callable[[Wire], None]


def answer(*events: bytes, cuts: int = 0) -> Script:
    """Send the events, in pieces of `cuts` bytes where that is not 0."""

    def write(wire: Wire) -> None:
        body = b"".join(events)
        wire.head()
        for at in range(0, len(body), cuts or len(body) or 1):
            wire.chunk(body[at : at + (cuts or len(body))])
        wire.chunk(b"")

    return write


def refusal(status: int, error: str) -> Script:
    def write(wire: Wire) -> None:
        wire.head(status)
        wire.chunk(json.dumps({"error": error}).encode())
        wire.chunk(b"")

    return write


class RawTriton:
    """script: what answers a request that generates, or tokenizes. asked: the JSON of those requests.

    heads: their first lines and headers; all_heads: those of checks and tasks too. connections: how many there were.
    stopped: ids of stop requests. deaf: whether it leaves checks without an answer, which num_unanswered counts.
    """

    def __init__(self) -> None:
        self.script: Script = answer()
        self.info: Mapping[str, object] = INFO
        self.asked: list[Json] = []
        self.heads: list[str] = []
        self.all_heads: list[str] = []
        self.stopped: list[str] = []
        self.connections = 0
        self.deaf = False
        self.num_unanswered = 0
        self.url = ""
        self._stops: dict[str, threading.Event] = {}
        self._server = cast(ThreadingTCPServer, None)
        self._open: set[socket.socket] = set()

    def clear(self) -> None:
        for kept in (self.asked, self.heads, self.stopped, self._stops):
            kept.clear()

    def stop_of(self, request_id: str) -> threading.Event:
        return self._stops.setdefault(request_id, threading.Event())

    def respond(self, connection: socket.socket, head: str, body: bytes) -> bool:
        """Answer a request. Returns whether the connection may have another."""
        self.all_heads.append(head)
        if head.startswith("GET"):
            if self.deaf:
                self.num_unanswered += 1
                return True
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
            return True
        request: Json = json.loads(body)
        wire = Wire(connection, self, request["id"])
        if request.get("task") == "describe":
            answer(event(model_info=json.dumps(self.info)))(wire)
        elif request.get("stop"):
            self.stopped.append(request["id"])
            self.stop_of(request["id"]).set()
            answer(event(error="[E_CANCELLED] the request was stopped"))(wire)
        else:
            self.asked.append(request)
            self.heads.append(head)
            self.script(wire)
        return wire.keep

    @contextmanager
    def serving(
        self, host: str = "127.0.0.1", port: int = 0, tls: ssl.SSLContext | None = None
    ) -> "Iterator[RawTriton]":
        triton = self

        class Handler(BaseRequestHandler):
            def handle(self) -> None:
                triton.connections += 1
                triton._open.add(self.request)
                try:
                    while (request := _read_request(self.request)) and triton.respond(self.request, *request):
                        pass
                except OSError:  # the gateway has closed the connection
                    pass
                finally:
                    triton._open.discard(self.request)

        class Server(ThreadingTCPServer):
            daemon_threads = True
            request_queue_size = 128
            allow_reuse_address = True

            def finish_request(self, request: Any, client_address: Any) -> None:
                if tls is None:
                    super().finish_request(request, client_address)
                    return
                # Closing the one that is wrapped is left to this, as the server knows the other.
                with suppress(OSError), tls.wrap_socket(request, server_side=True) as secured:
                    super().finish_request(secured, client_address)

        with Server((host, port), Handler) as server:
            self._server = server
            thread = threading.Thread(target=server.serve_forever, args=(0.05,))
            thread.start()
            self.url = f"{'https' if tls else 'http'}://{host}:{server.server_address[1]}"
            try:
                yield self
            finally:
                server.shutdown()
                thread.join()

    def die(self) -> None:
        """Take no more connections, and break those that are open."""
        self._server.shutdown()
        self._server.server_close()
        for connection in tuple(self._open):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


def _read_request(connection: socket.socket) -> tuple[str, bytes] | None:
    received = b""
    while b"\r\n\r\n" not in received:
        if not (more := connection.recv(65536)):
            return None
        received += more
    head, _, body = received.partition(b"\r\n\r\n")
    fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
    length = int(fields.get(b"content-length", 0))
    while len(body) < length:
        body += connection.recv(65536)
    return head.decode("latin-1"), body


@contextmanager
def gateway_before(
    *tritons: RawTriton, urls: tuple[str, ...] = (), contexts: tuple[RawTriton, ...] = (), **settings: Any
) -> Iterator[str]:
    """The URL of the gateway's application, under uvicorn, before the servers, or before those at `urls`, and before
    context servers."""
    context_servers = tuple(triton.url for triton in contexts)
    model = ModelSettings(urls or tuple(triton.url for triton in tritons), context_servers=context_servers)
    with serving_app(create_app(GatewaySettings((model,), metrics_port=None, **settings))) as address:
        yield address.rstrip("/")
