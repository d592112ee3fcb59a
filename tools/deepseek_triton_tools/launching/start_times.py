"""How long a server may take to become ready, and which part gives up when."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from deepseek_triton_build.arithmetic import load_s
from deepseek_triton_tools.launching.stop_times import StopTimes
from deepseek_triton_tools.tool_errors import ToolError

GATHER_S = 1800
"""Seconds for the pods of a group to find nodes and to pull the image: its 14 GB at 20 MB/s are 700 s, and a node may
have to be added before. An assumption."""
PERIOD_S = 10
"""Seconds between two requests of a startup probe."""
SPARE_S = 60
"""Seconds between the end of the supervisor and the end of the probe. An assumption."""
_MEASURED_SHARE = 0.5
"""Share of the bytes that must have been read from storage; with less, the rate is not the storage's but memory's."""


@dataclass(frozen=True, kw_only=True)
class StartTimes:
    """Deadlines in seconds, counted from the container's start unless their docstring says otherwise."""

    size: int
    """Size of the weights in bytes."""
    rate: int
    """Bytes per second that the storage delivers."""
    ready_within_s: int
    """start.sh's READY_WITHIN: the supervisor's deadline, counted from its own start."""
    num_nodes: int = 1
    stop: StopTimes

    @property
    def load_s(self) -> int:
        """Time to read all of the weights once."""
        return load_s(self.size, self.rate)

    @property
    def gather_s(self) -> int:
        """How long the leader waits for the other pods, before the supervisor starts."""
        return GATHER_S if self.num_nodes > 1 else 0

    @property
    def failure_threshold(self) -> int:
        """Failed requests until the startup probe gives up, after the supervisor, which can name the missing rank."""
        needed = self.gather_s + self.ready_within_s + self.stop.supervisor_kill_s + SPARE_S
        return math.ceil(needed / PERIOD_S)

    @property
    def window_s(self) -> int:
        """Time until the startup probe gives up."""
        return self.failure_threshold * PERIOD_S

    @property
    def progress_deadline_s(self) -> int:
        """A Deployment's deadline since the last change of its pods: the probe's window and time for node and image."""
        return self.window_s + GATHER_S


def measured_rate(file: Path) -> int:
    """Return the bytes per second that a warm-up read from storage, by the document of `warm files --json`.

    :raises ToolError: when the file is no such document, or most bytes were in memory already.
    """
    expected = f"expected the document of deepseek-triton warm files --json in {file}"
    try:
        document = json.loads(file.read_text("utf-8"))
    except OSError as error:
        raise ToolError(f"{expected}: {error.strerror}", exit_code=2) from None
    except (ValueError, RecursionError) as error:  # not JSON, or not UTF-8
        raise ToolError(f"{expected}, got {error}", exit_code=2) from None
    result = document.get("result") if isinstance(document, dict) else None
    if not isinstance(result, dict) or not str(document.get("schema")).startswith("deepseek-triton/warm/"):
        raise ToolError(f"{expected}, got something else", exit_code=2)
    rate, read, done = (result.get(key) for key in ("read_bytes_per_s", "read_bytes", "done_bytes"))
    if not (isinstance(rate, int) and isinstance(read, int) and isinstance(done, int) and rate > 0):
        raise ToolError(f"{expected} with a rate, got one in which nothing was read", exit_code=2)
    if read < _MEASURED_SHARE * done:
        raise ToolError(
            f"{file}: only {read:,} of {done:,} bytes were read from storage, the others were in memory: measure after "
            "deepseek-triton warm evict",
            exit_code=2,
        )
    return rate
