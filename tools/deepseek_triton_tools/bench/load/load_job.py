"""One load process's share of a run, and what it tells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from deepseek_triton_tools.bench.load.bench_target import TargetSettings
from deepseek_triton_tools.bench.measuring.request_record import RequestRecord
from deepseek_triton_tools.bench.workload.bench_request import Conversation


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadJob:
    """One process's share of a run."""

    target: TargetSettings
    conversations: Sequence[Conversation]
    """All of the run."""
    due_s: Mapping[int, float] | None
    """This process's conversations by number, and when each begins in seconds after the start, ascending. None in a
    closed loop, where all processes draw the next number from one counter."""
    num_warmup: int
    """Conversations with a smaller number are not measured."""
    leaving: Set[int]
    """Numbers of the conversations whose user leaves in the first turn."""
    leave_after_s: float
    concurrency: int | None
    duration_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRun:
    """The run begins at `at` by time.monotonic(), which all processes of a machine share."""

    at: float


@dataclass(frozen=True, slots=True)
class StopRun:
    """Send nothing more, and leave what is under way."""


@dataclass(frozen=True, slots=True)
class JobReady:
    """The process has its job, and its server answers; `problem` says why not."""

    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobProgress:
    ended: int = 0
    """Conversations."""
    failed: int = 0
    """Requests."""
    inflight: int = 0
    output_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDone:
    records: Sequence[RequestRecord]
    """Those of the requests that are measured."""
    last: JobProgress = JobProgress()
    delays_ms: Sequence[float] = field(default_factory=list)
    """How late the process's event loop woke up, measured all the time: the noise in all its times."""
