"""Scripted servers on real sockets: each request is answered by the next script, a function that may do anything."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc


class QuietServer(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up in the middle is what many tests are about: no traceback for it."""


class HttpServer:
    """`script(*functions)`; afterwards `requests` holds (method, path, body) of each."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, Any]] = []
        self.gone = threading.Event()
        """Set by a script that saw the client go."""
        self.release = threading.Event()
        """Set by a test to let a waiting script go on."""
        self.num_connections = 0
        self._scripts: list[Callable[[BaseHTTPRequestHandler], None]] = []
        self._server = QuietServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def script(self, *functions: Callable[[Any], None]) -> None:
        self._scripts.extend(functions)

    def stop(self) -> None:
        self.release.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

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

    def body(self, status: int, body: bytes, content_type: str = "application/json") -> Callable[[Any], None]:
        def answer(handler: Any) -> None:
            handler.send_response(status)
            handler.send_header("Content-Type", content_type)
            handler.send_header("Content-Length", str(len(body)))
            handler.end_headers()
            handler.wfile.write(body)

        return answer

    def silence(self, handler: Any) -> None:
        """Sends nothing until the client goes."""
        assert handler.connection.recv(1) == b""
        self.gone.set()
        handler.close_connection = True

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
                super().setup()
                server.num_connections += 1

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                server.requests.append((self.command, self.path, json.loads(body) if body else None))
                server._scripts.pop(0)(self)

            do_GET = do_POST = answer

            def log_message(self, format: str, *args: Any) -> None:
                pass

        return Handler


@pytest.fixture
def http_server() -> Iterator[HttpServer]:
    server = HttpServer()
    yield server
    server.stop()


class GrpcServer(service_pb2_grpc.GRPCInferenceServiceServicer):
    """`script(*functions)`: each takes (request, context) and returns the responses. `requests` holds what came."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.gone = threading.Event()
        """Set when a call's context ends."""
        self.release = threading.Event()
        """Set by a test to let a waiting script go on."""
        self.ready = True
        self._scripts: list[Callable[[Any, Any], Any]] = []
        self._server = grpc.server(ThreadPoolExecutor(max_workers=4))
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self, self._server)
        self.url = f"grpc://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def script(self, *functions: Callable[[Any, Any], Any]) -> None:
        self._scripts.extend(functions)

    def stop(self) -> None:
        self.release.set()
        self._server.stop(grace=None).wait()

    def responses(self, *responses: Any) -> Callable[[Any, Any], Any]:
        return lambda request, context: iter(responses)

    @staticmethod
    def response(*, final: bool = False, **outputs: str | int) -> pb.ModelStreamInferResponse:
        """As Triton makes it: raw contents, and a parameter that tells the final one."""
        answer = pb.ModelStreamInferResponse()
        answer.infer_response.parameters["triton_final_response"].bool_param = final
        for name, value in outputs.items():
            datatype = "BYTES" if isinstance(value, str) else "INT32"
            answer.infer_response.outputs.add(name=name, datatype=datatype, shape=[1])
            answer.infer_response.raw_output_contents.append(serialized(value))
        return answer

    @staticmethod
    def error(message: str) -> pb.ModelStreamInferResponse:
        return pb.ModelStreamInferResponse(error_message=message)

    def ModelStreamInfer(self, request_iterator, context):
        context.add_callback(self.gone.set)
        for request in request_iterator:
            self.requests.append(request)
            yield from self._scripts.pop(0)(request, context)

    def ModelReady(self, request, context):
        self.requests.append(request)
        return pb.ModelReadyResponse(ready=self.ready)

    def ModelMetadata(self, request, context):
        self.requests.append(request)
        return self._scripts.pop(0)(request, context)


def serialized(value: str | int) -> bytes:
    if isinstance(value, int):
        return struct.pack("<i", value)
    encoded = value.encode()
    return struct.pack("<I", len(encoded)) + encoded


@pytest.fixture
def grpc_server() -> Iterator[GrpcServer]:
    server = GrpcServer()
    yield server
    server.stop()
