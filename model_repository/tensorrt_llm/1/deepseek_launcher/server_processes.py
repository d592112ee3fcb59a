"""Notices when a launch's tritonserver, or one of its stubs, has ended while the rest goes on."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Sequence

from deepseek_launcher import process_table
from deepseek_launcher.launch_tag import SERVER_NAME, STUB_NAME, LaunchTag, members
from deepseek_launcher.process_table import Process

DEFAULT_EXIT_TIMEOUT_S = 30.0
"""tritonserver's default for --exit-timeout-secs."""
PATIENCE_S = 15
"""Seconds that a stop gets on top of the exit timeout: the server unloads its models only after the exit timeout."""
LEAVE_S = 5
"""Seconds that the processes of a command which ended with 0 get to end themselves: a stub goes within 2 s of its
server."""

_OFTEN_FOR_S = 30
_SEARCH_EVERY_S = 2
_APPEARS_WITHIN_S = 60
"""trtllm-llmapi-launch starts tritonserver in a second or two. One that ends at once, because of a wrong option, may
never be seen."""
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
        try:
            return self._look(time.monotonic())
        except OSError:  # at a limit of open files, where nobody can tell
            return False

    def _look(self, now: float) -> bool:
        if self._server is None:
            self._search(now)
            return self._is_expected and now - self._began > _APPEARS_WITHIN_S and not self._has_appeared()
        if self._starter_gone_at is None:
            if process_table.runs(self._server):
                return False
            self._looks_since_end += 1
            if self._starter is not None and process_table.runs(self._starter):
                return False
            self._starter_gone_at = now
        crashed = self._looks_since_end <= _CRASHED_LOOKS
        return now - self._starter_gone_at > (_CRASH_GRACE_S if crashed else _END_GRACE_S)

    def _has_appeared(self) -> bool:
        """Return whether a server was seen, also one that a profiler runs under another name: stubs keep theirs."""
        if self._server is None and not self._was_seen:
            self._was_seen = any(process.name.startswith("triton") for process in members(self._tag, spare=self._spare))
        return self._server is not None or self._was_seen

    def _search(self, now: float) -> None:
        often = now - self._began < _OFTEN_FOR_S
        if not often and now - self._searched_at < _SEARCH_EVERY_S:
            return
        self._searched_at = now
        servers = [process for process in members(self._tag, spare=self._spare) if process.name == SERVER_NAME]
        if servers:
            self._server = servers[0]
            self._starter = process_table.look_up(servers[0].parent)


class StubWatch:
    """Watches the stubs that ran when the models became ready: without them tritonserver may answer 200 for ever."""

    def __init__(self, tag: LaunchTag, *, spare: Collection[int] = ()) -> None:
        found = [process for process in members(tag, spare=spare) if process.name == STUB_NAME]
        servers = {process.pid for process in process_table.all_processes() if process.name == SERVER_NAME}
        self._stubs = [process for process in found if process.parent in servers]

    def gone(self) -> Process | None:
        """Return a stub that has ended; None while all run."""
        return next((stub for stub in self._stubs if not process_table.runs(stub)), None)
