"""Asks over HTTP whether the server and its models are ready, in a thread of its own."""

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
    """The result of one health check."""

    ready: bool
    problem: str
    """Why it is not ready, in words."""
    answered: bool
    """Whether the server answered at all, be it that it is not ready."""


_NOT_ASKED = HealthAnswer(False, "nothing was asked yet", False)


class ServerHealth:
    """Asks until `close`. Every thread may read `answer` and `num_asked`: each is replaced in one step."""

    def __init__(self, address: str, port: int, models: Sequence[str], *, every_s: float) -> None:
        """Start asking.

        :param models: models that have to be ready besides the server; none where they come and go on request.
        :param every_s: pause between two checks once the server was ready.
        """
        self._every_s = every_s
        self.answer = _NOT_ASKED
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
            # A server that answers "not ready" may be ready at any moment. One that does not answer may have too much
            # to do.
            was_ready = was_ready or self.answer.ready
            seldom = was_ready and (self.answer.ready or not self.answer.answered)
            pause_s = self._every_s if seldom else min(self._every_s, _LOADING_EVERY_S)

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
        """Return the HTTP status of a GET.

        http.client would wait for ever for a server that sends a byte a second. The connection is not kept, because an
        idle connection delays the server's exit.

        :raises ValueError: when the answer is no HTTP.
        :raises OSError: when no answer comes in time.
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
