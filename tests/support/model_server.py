"""An HTTP server on a real socket that speaks as Triton with this project's model; the test says what it answers."""

from __future__ import annotations

import itertools
import json
import select
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from deepseek_triton_client import TensorMetadata
from support.contract_metadata import METADATA

Body = Mapping[str, Any]
END = {"finish_reason": "stop", "num_input_tokens": 3, "num_cached_tokens": 0}


class Refusal(Exception):
    """Answered in place of the first response."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Wait:
    """In a list of responses: nothing more comes until the test lets it, or the client goes."""


WAIT = Wait()
Answer = Callable[[Body], Iterator[Body | Wait]]


def saying(*pieces: str, **outputs: Any) -> Answer:
    """The same answer to everything, a response for each piece."""

    def answer(_: Body) -> Iterator[Body | Wait]:
        for piece in pieces[:-1]:
            yield {"text_output": piece}
        yield {"text_output": pieces[-1], **END, "num_output_tokens": len(pieces), **outputs}

    return answer


def echo(body: Body) -> Iterator[Body | Wait]:
    """The prompt or the last message, in capitals."""
    said = json.loads(body["messages"])[-1]["content"] if "messages" in body else body["text_input"]
    yield {"text_output": said.upper(), **END, "num_output_tokens": 2}


class ModelServer:
    def __init__(self) -> None:
        self.answer: Answer = echo
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.most_at_once = 0
        self.waiting = threading.Event()
        """A response has come to a WAIT."""
        self.release = threading.Event()
        self.gone = threading.Event()
        """A client went while its response waited."""
        self._running = 0
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def stop(self) -> None:
        self.release.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _reply(self, handler: Any, body: dict[str, Any]) -> None:
        with self._lock:
            self.bodies.append(body)
            self.headers.append({name.lower(): value for name, value in handler.headers.items()})
            self._running += 1
            self.most_at_once = max(self.most_at_once, self._running)
        try:
            self._stream(handler, body)
        except OSError:
            self.gone.set()
            handler.close_connection = True
        finally:
            with self._lock:
                self._running -= 1

    def _stream(self, handler: Any, body: dict[str, Any]) -> None:
        responses = self.answer(body)
        try:
            first = next(responses)
        except Refusal as refusal:
            _send(handler, refusal.status, {"error": str(refusal)})
            return
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream; charset=utf-8")
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        for response in itertools.chain([first], responses):
            if isinstance(response, Wait):
                self._wait(handler)
            else:
                _chunk(handler, b"data: " + json.dumps(response).encode() + b"\n\n")
        _chunk(handler, b"")

    def _wait(self, handler: Any) -> None:
        self.waiting.set()
        while not self.release.wait(0.01):
            if select.select([handler.connection], [], [], 0)[0]:
                raise ConnectionResetError("the client has gone")

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_GET(self) -> None:
                _send(self, 200, _metadata() if self.path == "/v2/models/tensorrt_llm" else {})

            def do_POST(self) -> None:
                length = int(self.headers.get("content-length", 0))
                server._reply(self, json.loads(self.rfile.read(length)))

            def log_message(self, format: str, *args: Any) -> None:
                pass

        return Handler


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is what some tests are about: no traceback for it."""


def _send(handler: Any, status: int, document: Any) -> None:
    body = json.dumps(document).encode()
    handler.send_response(status)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


def _chunk(handler: Any, piece: bytes) -> None:
    handler.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))


def _metadata() -> dict[str, Any]:
    def listed(tensors: tuple[TensorMetadata, ...]) -> list[dict[str, Any]]:
        return [{"name": each.name, "datatype": each.datatype, "shape": list(each.shape)} for each in tensors]

    return {
        "name": METADATA.name,
        "versions": list(METADATA.versions),
        "platform": METADATA.platform,
        "inputs": listed(METADATA.inputs),
        "outputs": listed(METADATA.outputs),
    }
