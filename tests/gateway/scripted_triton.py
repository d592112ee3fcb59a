"""A Triton server whose every answer is written by the test, and the gateway's application in front of it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from starlette.testclient import TestClient

from deepseek_triton_tools.gateway.app.application import create_app
from deepseek_triton_tools.gateway.settings import GatewaySettings, ModelSettings

_INFO = json.dumps({"name": "tiny", "max_seq_len": 4096})


class ScriptedTriton:
    """Answers after `wait_s` with `events`, each a response of the model, and waits `pause_s` before all but the first.

    `asked` has the JSON of the requests, the last one last.
    """

    def __init__(self) -> None:
        self.events: Sequence[dict[str, Any]] = ()
        self.status = 200
        self.pause_s = 0.0
        self.wait_s = 0.0
        self.asked: list[dict[str, Any]] = []

    def answer_to(self, asked: dict[str, Any]) -> Sequence[dict[str, Any]]:
        if asked.get("task") == "describe":
            return [{"model_info": _INFO}]
        if asked.get("stop"):
            return [{"error": "[E_CANCELLED] stopped"}]
        self.asked.append(asked)
        return self.events


@contextmanager
def gateway_of(triton: ScriptedTriton, **settings: Any) -> Iterator[TestClient]:
    """The gateway in front of the server. settings: other ones of GatewaySettings."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._respond(200, b"")

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            events = triton.answer_to(asked)
            time.sleep(0 if asked.get("task") == "describe" else triton.wait_s)
            if triton.status == 200 or asked.get("task") == "describe":
                self._respond(200, *(b"data: %b\n\n" % json.dumps(event).encode() for event in events))
            else:
                self._respond(triton.status, json.dumps(events[0]).encode())

        def _respond(self, status: int, *pieces: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(sum(map(len, pieces))))
            self.end_headers()
            for number, piece in enumerate(pieces):
                time.sleep(triton.pause_s if number else 0)
                self.wfile.write(piece)

        def log_message(self, format: str, *arguments: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            model = ModelSettings((f"http://127.0.0.1:{server.server_port}",))
            with TestClient(create_app(GatewaySettings((model,), **settings))) as client:
                yield client
        finally:
            server.shutdown()
            thread.join()
