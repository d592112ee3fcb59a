"""Whether the server and its models are ready, asked over HTTP in a thread of its own."""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote

from deepseek_launcher.output import start_thread

_LOADING_EVERY_S = 0.5
_TIMEOUT_S = 5
_LONGEST_ANSWER = 1 << 16
_STATUS_LINE = re.compile(rb"HTTP/1\.[01] (\d{3})\b")


@dataclass(frozen=True)
class HealthAnswer:
    """What the server said last."""

    ready: bool
    problem: str
    """Why not, in words."""
    spoke: bool
    """It answered, be it no."""


SILENT = HealthAnswer(False, "nothing was asked yet", False)


class ServerHealth:
    """Asks until `close`. `answer` and `num_asked` may be read by anybody: each is replaced in one step."""

    def __init__(self, address: str, port: int, models: Sequence[str], *, every_s: float) -> None:
        """`models`: those that have to be ready besides the server; none where they come and go on request. `every_s`
        holds once it was ready."""
        self._every_s = every_s
        self.answer = SILENT
        self.num_asked = 0
        self._address, self._port = address, port
        names = (quote(os.fsencode(model), safe="") for model in models)
        self._paths = ["/v2/health/ready", *(f"/v2/models/{name}/ready" for name in names)]
        self._closed = threading.Event()
        start_thread("health", self._run)

    def close(self) -> None:
        self._closed.set()

    def _run(self) -> None:
        pause_s, was_ready = min(self._every_s, _LOADING_EVERY_S), False
        while not self._closed.wait(pause_s):
            self.answer = self._ask()
            self.num_asked += 1
            # One that says no comes back any moment; one that says nothing may have too much to do already.
            was_ready = was_ready or self.answer.ready
            rarely = was_ready and (self.answer.ready or not self.answer.spoke)
            pause_s = self._every_s if rarely else min(self._every_s, _LOADING_EVERY_S)

    def _ask(self) -> HealthAnswer:
        for path in self._paths:
            try:
                status = self._status(path)
            except (OSError, ValueError) as error:
                return HealthAnswer(False, f"{path}: {error}", False)
            if status != 200:
                return HealthAnswer(False, f"{path} answers {status}", True)
        return HealthAnswer(True, "", True)

    def _status(self, path: str) -> int:
        """:raises ValueError: for what is no HTTP. OSError when none comes in time.

        http.client would wait for ever for who sends a byte a second. No connection is kept: one that idles would hold
        up the server's exit.
        """
        give_up = time.monotonic() + _TIMEOUT_S
        request = f"GET {path} HTTP/1.1\r\nHost: {self._address}\r\nConnection: close\r\n\r\n"
        first = b""
        with socket.create_connection((self._address, self._port), timeout=_TIMEOUT_S) as connection:
            connection.sendall(request.encode())
            while b"\n" not in first and len(first) < _LONGEST_ANSWER:
                connection.settimeout(max(0.001, give_up - time.monotonic()))
                data = connection.recv(4096)
                if not data:
                    break
                first += data
        match = _STATUS_LINE.match(first)
        if match is None:
            raise ValueError(f"expected HTTP, got {first[:40]!r}")
        return int(match[1])
