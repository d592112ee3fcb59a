"""Runs: when requests are due; load processes start together, tell how far they are, and give their records."""

import contextlib
import math
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait

import numpy as np

from deepseek_triton_tools.bench.load_process import JobDone, LoadJob, LoadProgress, serve_jobs
from deepseek_triton_tools.bench.result import RequestRecord
from deepseek_triton_tools.bench.targets import TargetSettings
from deepseek_triton_tools.bench.workload import Conversation, LoadPoint
from deepseek_triton_tools.tool_errors import ToolError

# Conversations of a closed loop that goes on for a time: more than it will send, so that no prompt comes twice.
_ENDLESS = 200_000
# A process can read some 30,000 chunks a second.
_STREAMS_A_PROCESS = 256
_POLL_S = 0.2
_HEAD_START_S = 0.2
"""Seconds between the last process being ready and the start of the run."""


def conversations_needed(point: LoadPoint) -> int:
    """Return how many conversations the point can send, warm-up included."""
    if point.duration_s is None or (point.rate is None and point.concurrency is None) or point.rate == math.inf:
        return point.num_warmup + point.num_requests
    if point.rate is None:
        return _ENDLESS
    mean = point.rate * point.duration_s
    return math.ceil(mean + 8 * math.sqrt(mean / point.burstiness)) + 50  # never too few, for all practical purposes


def due_times(point: LoadPoint, conversations: Sequence[Conversation], seed: int) -> list[float] | None:
    """Return seconds after the start, ascending, one for each conversation; None for a closed loop.

    The gaps are gamma-distributed, as in `vllm bench serve`: with a burstiness of 1 the arrivals are a Poisson process.
    """
    if point.rate is None:
        if point.concurrency is not None:
            return None
        # The times of a file's rows need no prompts, which take long to make.
        at_s = getattr(conversations, "at_s", lambda index: conversations[index][0].at_s or 0.0)
        return [at_s(index) for index in range(len(conversations))]
    if math.isinf(point.rate):
        return [0.0] * len(conversations)
    gaps = np.random.default_rng(seed).gamma(
        point.burstiness, 1 / (point.rate * point.burstiness), size=len(conversations)
    )
    return [float(due) for due in np.cumsum(gaps)]


def processes_for(point: LoadPoint) -> int:
    """How many processes make this load well: one for every 256 streams, on half of the machine's cores at most."""
    streams = point.concurrency or point.num_requests
    return max(1, min(-(-streams // _STREAMS_A_PROCESS), (os.cpu_count() or 1) // 2))


@dataclass(frozen=True, kw_only=True)
class LoadRun:
    records: list[RequestRecord]
    """Those of the measured requests, by their number. Ctrl-C leaves those that were sent by then."""
    delays_ms: list[float]
    """How late the processes' event loops woke up."""
    interrupted: bool = False


class LoadProcesses(contextlib.AbstractContextManager["LoadProcesses"]):
    """The load processes of a sweep. They end with the block, and with the process that made them."""

    def __init__(self, number: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        self._counter = context.Value("q")
        self._stop = context.Event()
        with ExitStack() as undo:
            undo.callback(self.close)
            for _ in range(number):
                ours, theirs = context.Pipe()
                process = context.Process(target=serve_jobs, args=(theirs, self._counter, self._stop), daemon=True)
                process.start()
                theirs.close()
                self._pipes.append(ours)
                self._processes.append(process)
            undo.pop_all()

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.terminate()
            process.join()

    def run(
        self,
        target: TargetSettings,
        point: LoadPoint,
        conversations: Sequence[Conversation],
        *,
        seed: int,
        on_progress: Callable[[LoadProgress], None],
    ) -> LoadRun:
        """Send the conversations, of which the first `point.num_warmup` are not measured.

        The first Ctrl-C ends the run early, the second raises KeyboardInterrupt. Call it in the main thread.

        :raises ToolError: when a server can't be asked at all, or a load process died. No further run is possible then.
        """
        jobs = self._jobs(target, point, conversations, seed)
        pipes = self._pipes[: len(jobs)]
        for pipe, job in zip(pipes, jobs, strict=True):
            pipe.send(job)
        if problems := [problem for problem in map(_receive, pipes) if problem]:
            raise ToolError(f"the server can't be measured: {problems[0]}")
        start = time.monotonic() + _HEAD_START_S
        for pipe in pipes:
            pipe.send(start)
        done, interrupted = self._collect(pipes, start, len(conversations), on_progress)
        records = sorted((record for each in done for record in each.records), key=lambda each: (each.index, each.turn))
        delays = [delay for each in done for delay in each.delays_ms]
        return LoadRun(records=records, delays_ms=delays, interrupted=interrupted)

    def _jobs(
        self, target: TargetSettings, point: LoadPoint, conversations: Sequence[Conversation], seed: int
    ) -> list[LoadJob]:
        """Deal the conversations and the places out to the processes in turn."""
        places = point.concurrency or len(conversations)
        number = min(len(self._pipes), places, len(conversations))
        self._counter.value = 0
        self._stop.clear()
        due = due_times(point, conversations, seed)
        chance = random.Random(seed)
        leaving = {index for index in range(len(conversations)) if chance.random() < point.leave_share}
        return [
            LoadJob(
                target=target,
                point=point,
                conversations=conversations,
                # As many as the process has places, so that all end at about the same time.
                due_s=None
                if due is None
                else {index: at for index, at in enumerate(due) if index % places % number == process},
                leaving=leaving,
                concurrency=None if point.concurrency is None else len(range(process, point.concurrency, number)),
            )
            for process in range(number)
        ]

    def _collect(
        self, pipes: list[Connection], start: float, total: int, on_progress: Callable[[LoadProgress], None]
    ) -> tuple[list[JobDone], bool]:
        done: list[JobDone] = []
        latest = dict.fromkeys(pipes, LoadProgress())
        working = set(pipes)
        with _interrupts() as count:
            while working:
                for pipe in wait(list(working), timeout=_POLL_S):
                    assert isinstance(pipe, Connection)
                    message = _receive(pipe)
                    if isinstance(message, JobDone):
                        working.remove(pipe)
                        done.append(message)
                    elif isinstance(message, LoadProgress):
                        latest[pipe] = message
                counts = ("ended", "failed", "inflight", "output_tokens")
                sums = {name: sum(getattr(part, name) for part in latest.values()) for name in counts}
                on_progress(LoadProgress(elapsed_s=max(0.0, time.monotonic() - start), total=total, **sums))
                if count() > 1:
                    raise KeyboardInterrupt
                if count():
                    self._stop.set()
        return done, self._stop.is_set()


@contextlib.contextmanager
def _interrupts() -> Iterator[Callable[[], int]]:
    """Count Ctrl-C in the block: an exception in the middle of a message would lose the rest of it."""
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    try:
        yield lambda: len(seen)
    finally:
        signal.signal(signal.SIGINT, before)


def _receive(pipe: Connection) -> object:
    try:
        return pipe.recv()
    except (EOFError, OSError) as error:
        raise ToolError("a process that sends the requests has died; is memory short?") from error
