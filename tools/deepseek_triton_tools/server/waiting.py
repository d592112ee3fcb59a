"""Waiting for a server that loads: its answers and its log say how far it is, and whether it will have the model."""

import asyncio
import os
import re
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from deepseek_triton_client import AsyncClient, DeadlineExceeded, ModelNotFound, Readiness
from deepseek_triton_tools.server.server_log import HOPELESS, dead_engine, failure_cause, parse_log_line
from deepseek_triton_tools.terminal.status_line import StatusLine, clock
from deepseek_triton_tools.tool_errors import ServerFailedError

# Bytes read of a log that exists already: enough to tell the phase.
_TAIL_BYTES = 64 * 2**10
# Most bytes read at once.
_STEP_BYTES = 2**20
_KEPT_LINES = 2000

# Phase -> a pattern of the line that begins it, in the usual order. The lines are of Triton 2.51, TensorRT-LLM 1.1 and
# this project's backend. Where another release words a line differently, the phase stays as it is.
_PHASES = (
    ("starting", re.compile(r"pinned_memory_manager\.cc")),
    ("loading", re.compile(r"model_lifecycle\.cc.* \"?loading: |deepseek_backend INFO: loading ")),
    ("prefetching the checkpoint", re.compile(r"[Pp]refetching .*(checkpoint files|to memory)")),
    ("loading weights", re.compile(r"Loading (safetensors |bin )?weights( in parallel)?:|GB for model weights")),
    ("allocating the KV cache", re.compile(r"Allocated .* in paged KV cache")),
    ("autotuning", re.compile(r"Autotuning process starts")),
    ("capturing CUDA graphs", re.compile(r"Creating CUDA graph instances|CUDA graph warmup")),
    ("warming up", re.compile(r"deepseek_backend \w+: warm-up ")),
    ("opening its ports", re.compile(r"model_lifecycle\.cc.* \"?successfully loaded ")),
)


_BACKEND_ERROR = re.compile(r"deepseek_backend (?:ERROR|CRITICAL): (.+)")
# Number of times that a failed server's log is read for the reason, within a second.
_LOOKS = 10


class LogFollower:
    """Follows a log file, which may not exist yet, and may be rotated or emptied."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._inode: int | None = None
        self._offset = 0
        self._rest = b""
        self.lines: deque[str] = deque(maxlen=_KEPT_LINES)
        """The lines that came since the follower was made."""
        self.phase = ""
        """The phase of the load; empty where no line has told it."""
        self.last_message = ""
        self.is_there = False
        for line in self._new_lines(tail_only=True):
            self._note(line)

    def read(self) -> None:
        """Take the lines that have come. A file that can't be read counts as missing."""
        for line in self._new_lines():
            self.lines.append(line)
            self._note(line)

    def _new_lines(self, *, tail_only: bool = False) -> list[str]:
        try:
            with self.path.open("rb") as file:
                stat = os.fstat(file.fileno())
                if stat.st_ino != self._inode or stat.st_size < self._offset:  # rotated or emptied
                    self._inode, self._offset, self._rest = stat.st_ino, 0, b""
                if tail_only:
                    self._offset = max(0, stat.st_size - _TAIL_BYTES)
                file.seek(self._offset)
                data = file.read(_STEP_BYTES)
        except OSError:
            self.is_there = False
            return []
        self.is_there = True
        self._offset += len(data)
        # Progress bars end their lines with a carriage return.
        *whole, self._rest = re.split(rb"[\r\n]", self._rest + data)
        return [line.decode("utf-8", "replace") for line in whole if line.strip()]

    def _note(self, text: str) -> None:
        line = parse_log_line(text)
        if line.message.strip() and not line.is_table:
            self.last_message = " ".join(line.message.split())
        self.phase = next((name for name, pattern in _PHASES if pattern.search(text)), self.phase)

    def failure(self, model_name: str) -> str:
        """Say why the server can't become ready, in its own words; empty where the log doesn't say."""
        signs = f"failed to load '{model_name}'", f"failed to load model '{model_name}'", HOPELESS
        if any(sign in line for line in self.lines for sign in signs):
            return failure_cause(self.lines)
        return dead_engine(self.lines)

    async def last_error(self, model_name: str) -> str:
        """Say why a server failed that had been ready; empty where the log doesn't say so within a second."""
        for _ in range(_LOOKS):
            self.read()
            errors = [match[1] for line in self.lines if (match := _BACKEND_ERROR.search(line))]
            if words := self.failure(model_name) or (errors[-1] if errors else ""):
                return words
            await asyncio.sleep(1 / _LOOKS)
        return ""


@dataclass
class Waiting:
    """Shows and measures the phases of a wait. `see` gets what `AsyncClient.wait_until_ready` reports."""

    model_name: str
    line: StatusLine
    log: LogFollower | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    """Phase -> how many seconds it was seen."""
    _phase: str = ""
    _since: float = field(default_factory=time.monotonic)

    def see(self, readiness: Readiness) -> None:
        """Take a report. Raises ServerFailedError when the log says that the server won't become ready."""
        if self.log is not None:
            self.log.read()
            cause = "" if readiness.state == "ready" else self.log.failure(self.model_name)
            if cause:
                raise ServerFailedError(f"{readiness.url} can't become ready: {cause}")
        now, log = time.monotonic(), self.log
        # Triton opens its ports only when the models are loaded. Until then only the log tells what happens.
        phase = log.phase if log is not None and log.phase and readiness.state != "ready" else readiness.state
        past = self._phase or phase
        if past != "ready":
            self.seconds[past] = self.seconds.get(past, 0.0) + now - self._since
        if phase != "ready":
            text = f"waiting for {readiness.url}, {clock(readiness.waited_s)}: {phase}"
            if log is not None:
                text += "" if log.is_there else f" (there is no log {log.path})"
                text += f"  {log.last_message}" if log.last_message else ""
            if phase != self._phase:
                self.line.say(text)
            else:
                self.line.show(lambda: text)
        self._phase, self._since = phase, now


async def wait_for_server(client: AsyncClient, waiting: Waiting, wait_s: float | None) -> None:
    """Return when the server is ready. Raises ServerFailedError when it isn't within `wait_s`, when its log says that
    it won't be, or when it has no such model; ProtocolError when it is no Triton."""
    try:
        await client.wait_until_ready(wait_s, waiting.see)
    except ModelNotFound as error:
        raise ServerFailedError(str(error)) from error
    except DeadlineExceeded as error:
        words = f"; its log says last: {waiting.log.last_message}" if waiting.log and waiting.log.last_message else ""
        raise ServerFailedError(f"{error}{words}") from error
