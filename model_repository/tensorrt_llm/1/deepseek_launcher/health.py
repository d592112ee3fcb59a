"""Whether the server and its models are ready, asked over HTTP in a thread of its own."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Sequence
from dataclasses import dataclass

_LOADING_EVERY_S = 0.5
_READY_EVERY_S = 5
_TIMEOUT_S = 5


@dataclass(frozen=True)
class Answer:
    """What the server said last."""

    ready: bool
    problem: str
    """Why not, in words."""
    spoke: bool
    """It answered, be it no."""


SILENT = Answer(False, "nothing was asked yet", False)


class Health:
    """Asks until `close`. `answer` and `num_asked` may be read by anybody: each is replaced in one step."""

    def __init__(self, address: str, port: int, models: Sequence[str]) -> None:
        """`models`: those that have to be ready besides the server; none where they come and go on request."""
        self.answer = SILENT
        self.num_asked = 0
        self._address, self._port = address, port
        self._paths = ["/v2/health/ready", *(f"/v2/models/{model}/ready" for model in models)]
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="health", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def _run(self) -> None:
        pause_s, was_ready = _LOADING_EVERY_S, False
        while not self._closed.wait(pause_s):
            self.answer = self._ask()
            self.num_asked += 1
            # One that says no comes back any moment; one that says nothing may have too much to do already.
            was_ready = was_ready or self.answer.ready
            pause_s = _READY_EVERY_S if was_ready and (self.answer.ready or not self.answer.spoke) else _LOADING_EVERY_S

    def _ask(self) -> Answer:
        for path in self._paths:
            # No connection is kept: one that idles would hold up the server's exit.
            connection = http.client.HTTPConnection(self._address, self._port, timeout=_TIMEOUT_S)
            try:
                connection.request("GET", path, headers={"Connection": "close"})
                response = connection.getresponse()
                response.read()
            except (OSError, http.client.HTTPException) as error:
                return Answer(False, f"{path}: {error or type(error).__name__}", False)
            finally:
                connection.close()
            if response.status != http.client.OK:
                return Answer(False, f"{path} answers {response.status}", True)
        return Answer(True, "", True)
