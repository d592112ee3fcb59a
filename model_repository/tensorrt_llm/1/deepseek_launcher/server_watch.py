"""Notices that tritonserver or one of its stubs has ended, and asks over HTTP whether its models are ready."""

import os
import re
import socket
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from urllib.parse import quote

from deepseek_launcher import processes
from deepseek_launcher.launch_tag import SERVER_NAME, STUB_NAME, LaunchTag, members
from deepseek_launcher.output import start_thread
from deepseek_launcher.processes import Process

DEFAULT_EXIT_TIMEOUT_S = 30.0
"""tritonserver's default for --exit-timeout-secs."""
PATIENCE_S = 15
"""Seconds that a stop gets on top of the exit timeout: the server unloads its models only after the exit timeout."""
LEAVE_S = 5
"""Seconds that the processes of a command which ended with 0 get to end themselves: a stub goes within 2 s of its
server."""

_OFTEN_FOR_S = 30
_SEARCH_EVERY_S = 2
# trtllm-llmapi-launch starts tritonserver in a second or two. One that ends at once, because of a wrong option, may
# never be seen.
_APPEARS_WITHIN_S = 60
_CRASHED_LOOKS = 2
_CRASH_GRACE_S = 2
_END_GRACE_S = 60


class ServerWatch:
    """Notices that tritonserver has ended while what had started it goes on.

    trtllm-llmapi-launch (TensorRT-LLM 1.x, tensorrt_llm/llmapi/trtllm-llmapi-launch) runs tritonserver in a subshell
    under `set -e`, and the engine's leader beside it. When tritonserver ends with 0 the subshell tells the leader to
    stop, which takes the seconds of an import. When it ends with another code, the subshell ends too, and the leader
    and every rank stay for ever, with their GPUs. A subshell that ends together with its server has therefore failed.
    """

    def __init__(self, tag: LaunchTag, command: Sequence[str], *, spare: Collection[int] = ()) -> None:
        self._tag = tag
        self._spare = spare
        self._is_expected = any(os.path.basename(word) == SERVER_NAME for word in command)
        self._began = time.monotonic()
        self._server: Process | None = None
        self._starter: Process | None = None
        self._searched_at = float("-inf")
        self._starter_gone_at: float | None = None
        self._looks_since_end = 0
        self._was_seen = False

    def look(self) -> bool:
        """Return True when the rest of the rank has to be ended. Cheap once the server has been seen."""
        now = time.monotonic()
        try:
            if self._server is None:
                self._search(now)
        except OSError:
            # At a limit of open files, where nobody can tell.
            return False
        if self._server is None:
            return self._is_expected and now - self._began > _APPEARS_WITHIN_S and not self._was_seen
        if self._starter_gone_at is None:
            if processes.runs(self._server):
                return False
            self._looks_since_end += 1
            if self._starter is not None and processes.runs(self._starter):
                return False
            self._starter_gone_at = now
        crashed = self._looks_since_end <= _CRASHED_LOOKS
        return now - self._starter_gone_at > (_CRASH_GRACE_S if crashed else _END_GRACE_S)

    def _search(self, now: float) -> None:
        if now - self._began >= _OFTEN_FOR_S and now - self._searched_at < _SEARCH_EVERY_S:
            return
        for process in members(self._tag, spare=self._spare):
            # A profiler may run the server under another name; its stubs keep theirs.
            self._was_seen = self._was_seen or process.name.startswith("triton")
            if process.name == SERVER_NAME and self._server is None:
                self._server, self._starter = process, processes.look_up(process.parent)
        # A search that fails, as one with no file left to open, is no search.
        self._searched_at = now


class StubWatch:
    """Watches the stubs that ran when the models became ready: without them tritonserver may answer 200 for ever."""

    def __init__(self, tag: LaunchTag, *, spare: Collection[int] = ()) -> None:
        stubs = [process for process in members(tag, spare=spare) if process.name == STUB_NAME]
        servers = {process.pid for process in processes.all_processes() if process.name == SERVER_NAME}
        self._stubs = [process for process in stubs if process.parent in servers]

    def gone(self) -> Process | None:
        """Return a stub that has ended; None while all run."""
        return next((stub for stub in self._stubs if not processes.runs(stub)), None)


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
        start_thread("health", self._ask_until_closed)

    def close(self) -> None:
        self._closed.set()

    def _ask_until_closed(self) -> None:
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
