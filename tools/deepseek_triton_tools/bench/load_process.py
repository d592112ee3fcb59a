"""A process that sends requests of a run.

The main process and a load process talk through a pipe: a job there, "" or a problem back, the start of the run there
(by time.monotonic(), which all processes of a machine share), then `LoadProgress` again and again, and `JobDone`.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import time
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import uvloop

from deepseek_triton_tools.bench.result import RequestRecord
from deepseek_triton_tools.bench.targets import BenchAnswer, BenchPrompt, BenchTarget, TargetSettings, TritonTarget
from deepseek_triton_tools.bench.workload import Conversation, LoadPoint
from deepseek_triton_tools.host.processes import allow_open_files

if TYPE_CHECKING:
    from multiprocessing.sharedctypes import Synchronized
    from multiprocessing.synchronize import Event

# A collection of all objects would be a gap in every stream.
_GC_THRESHOLD = (50_000, 20, 1_000)
_OPEN_FILES = 256
"""Files and connections beside those of the streams."""
_PROGRESS_S = 0.25
_TICK_S = 0.01
"""How often the delay of the event loop is measured."""
# A user waits so long after a failure, because a server that is down refuses thousands of requests a second.
_AFTER_FAILURE_S = 0.1
_TRIAL_S = 120
# Longest prompt of the request that tries the server out, so that no prefix cache knows the real ones.
_TRIAL_TOKENS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadJob:
    """One process's share of a run."""

    target: TargetSettings
    point: LoadPoint
    conversations: Sequence[Conversation]
    """All of the run."""
    due_s: Mapping[int, float] | None
    """This process's conversations by number, and when each begins in seconds after the start, ascending. None in a
    closed loop, where all processes draw the next number from one counter."""
    leaving: Set[int]
    """Numbers of the conversations whose user leaves in the first turn."""
    concurrency: int | None
    """This process's share of the point's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadProgress:
    """A run under way: one process's share of it, or all together, which have a time and a total, too."""

    ended: int = 0
    """Conversations."""
    failed: int = 0
    """Requests."""
    inflight: int = 0
    output_tokens: int = 0
    elapsed_s: float = 0.0
    total: int = 0
    """Conversations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDone:
    records: Sequence[RequestRecord]
    """Those of the requests that are measured."""
    delays_ms: Sequence[float] = field(default_factory=list)
    """How late the process's event loop woke up, measured all the time: the noise in all its times."""


def serve_jobs(pipe: Connection, counter: Synchronized[int], stop: Event) -> None:
    """Run the jobs that come through `pipe` until its other end is closed.

    :param counter: the next conversation of a closed loop, for all processes together.
    :param stop: send nothing more, and leave what is under way.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the main process's, which sets `stop`
    gc.set_threshold(*_GC_THRESHOLD)
    while True:
        try:
            job = pipe.recv()
            allow_open_files(_OPEN_FILES + (job.concurrency or len(job.conversations)))
            uvloop.run(_JobRun(job, pipe, counter, stop).run())
        except (EOFError, BrokenPipeError):
            return


class _JobRun:
    def __init__(self, job: LoadJob, pipe: Connection, counter: Synchronized[int], stop: Event) -> None:
        self._job = job
        self._pipe = pipe
        self._counter = counter
        self._stop = stop
        self._records: list[RequestRecord] = []
        self._start = 0.0
        self._targets: list[BenchTarget] = []
        self._stopped = asyncio.Event()
        self._ended = self._failed = self._tokens = 0
        self._active: dict[int, RequestRecord] = {}

    def _now(self) -> float:
        return time.monotonic() - self._start

    async def run(self) -> None:
        settings = self._job.target
        if settings.endpoint == "openai":
            from deepseek_triton_tools.bench.servers import OpenAITarget  # here, because aiohttp loads slowly

            self._targets = [OpenAITarget(settings, url, self._now) for url in settings.urls]
        else:
            self._targets = [TritonTarget(settings, url, self._now) for url in settings.urls]
        try:
            problem = await self._trial()
            self._pipe.send(problem)
            if not problem:
                self._start = await asyncio.to_thread(self._pipe.recv)
                delays = await self._load()
                self._pipe.send(self._progress())
                self._pipe.send(JobDone(records=self._records, delays_ms=delays))
        finally:
            for target in self._targets:
                await target.close()

    async def _trial(self) -> str:
        """Ask each server for one token. Returns what is wrong."""
        request = self._job.conversations[0][0]
        fields: dict[str, Any] = {**(request.fields or {}), "max_tokens": 1}
        if "min_tokens" in {*fields, *self._job.target.fields}:
            fields["min_tokens"] = 0
        prompt = _after((), request.prompt[:_TRIAL_TOKENS], chat=self._job.target.chat)
        for target in self._targets:
            record = RequestRecord(index=0)
            try:
                await asyncio.wait_for(target.ask(prompt, fields, record, keep_ids=False), _TRIAL_S)
            except asyncio.TimeoutError:
                return f"{record.url}: no answer to a first request within {_TRIAL_S:g} s"
            if record.outcome != "completed":
                return record.error if record.url in record.error else f"{record.url}: {record.error}"
        return ""

    async def _load(self) -> list[float]:
        delays: list[float] = []
        helpers = [asyncio.create_task(self._tell()), asyncio.create_task(self._measure_delays(delays))]
        await asyncio.sleep(max(0.0, -self._now()))
        work = asyncio.create_task(self._closed() if self._job.due_s is None else self._open(self._job.due_s))
        stopping = asyncio.create_task(self._stopped.wait())
        try:
            await asyncio.wait([work, stopping], return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _cancel([work, stopping, *helpers])
        if not work.cancelled():
            work.result()  # raises what is a bug here
        return delays

    async def _tell(self) -> None:
        """Tell how far the run is, and look whether it is to stop; also when the main process has gone."""
        while True:
            await asyncio.sleep(_PROGRESS_S)
            try:
                self._pipe.send(self._progress())
            except OSError:
                self._stopped.set()
            if self._stop.is_set():
                self._stopped.set()

    def _progress(self) -> LoadProgress:
        return LoadProgress(
            ended=self._ended,
            failed=self._failed,
            inflight=len(self._active),
            output_tokens=self._tokens + sum(record.num_output_tokens for record in self._active.values()),
        )

    async def _measure_delays(self, delays: list[float]) -> None:
        while True:
            due = time.monotonic() + _TICK_S
            await asyncio.sleep(_TICK_S)
            delays.append(max(0.0, (time.monotonic() - due) * 1000))

    def _numbers(self) -> Iterator[int]:
        """The numbers of the next conversations, which no other process gets."""
        duration_s = self._job.point.duration_s
        while duration_s is None or self._now() < duration_s:
            with self._counter.get_lock():
                number = self._counter.value
                self._counter.value += 1
            if number >= len(self._job.conversations):
                return
            yield number

    async def _closed(self) -> None:
        numbers = self._numbers()

        async def user() -> None:
            for number in numbers:
                if not await self._converse(number, None):
                    await asyncio.sleep(_AFTER_FAILURE_S)

        users = [asyncio.create_task(user()) for _ in range(self._job.concurrency or 1)]
        try:
            await asyncio.gather(*users)
        finally:
            await _cancel(users)

    async def _open(self, due: Mapping[int, float]) -> None:
        places = asyncio.Semaphore(self._job.concurrency) if self._job.concurrency else None
        duration_s = self._job.point.duration_s
        tasks: set[asyncio.Task[bool]] = set()
        try:
            for number, due_s in due.items():
                if duration_s is not None and due_s >= duration_s:
                    break
                while (early_s := due_s - self._now()) > 0:  # uvloop's timers may end up to 1 ms early
                    await asyncio.sleep(early_s)
                if places is not None:
                    await places.acquire()
                    due_s = max(due_s, self._now())  # the limit makes it late, not this client
                task = asyncio.create_task(self._converse(number, due_s))
                tasks.add(task)
                if places is not None:
                    task.add_done_callback(lambda _: places.release())
            await asyncio.gather(*tasks)
        finally:
            await _cancel(tasks)

    async def _converse(self, index: int, due_s: float | None) -> bool:
        """Send turn after turn. A conversation ends early with a turn that failed; then the result is False."""
        job = self._job
        conversation = job.conversations[index]
        target = self._targets[index % len(self._targets)]
        before: list[tuple[Any, BenchAnswer]] = []
        for turn, request in enumerate(conversation):
            if turn:
                await asyncio.sleep(request.wait_s)
            record = RequestRecord(index=index, turn=turn, due_s=due_s if turn == 0 else None)
            if job.target.fields.get("ignore_eos"):
                record.asked_tokens = request.output_tokens
            if index >= job.point.num_warmup:
                self._records.append(record)
            fields = {} if request.output_tokens is None else {"max_tokens": request.output_tokens}
            prompt = _after(before, request.prompt, chat=job.target.chat)
            keep_ids = turn + 1 < len(conversation)
            asking = target.ask(prompt, {**fields, **(request.fields or {})}, record, keep_ids=keep_ids)
            self._active[id(record)] = record
            try:
                limit_s = job.point.leave_after_s if index in job.leaving and turn == 0 else None
                answer = await asyncio.wait_for(asking, limit_s) if limit_s is not None else await asking
            except asyncio.TimeoutError:
                break  # this user has left, as was asked for
            finally:
                record.chunk_s, record.chunk_tokens = array("d", record.chunk_s), array("I", record.chunk_tokens)
                del self._active[id(record)]
                self._tokens += record.num_output_tokens
                self._failed += record.outcome == "failed"
            if record.outcome != "completed":
                self._ended += 1
                return False
            before.append((request.prompt, answer))
        self._ended += 1
        return True


def _after(before: Iterable[tuple[Any, BenchAnswer]], prompt: Any, *, chat: bool) -> BenchPrompt:
    """Put a prompt behind the turns before it, each a prompt and its answer."""
    if chat:
        messages: list[dict[str, str]] = []
        for user_text, answer in before:
            messages += [{"role": "user", "content": user_text}, {"role": "assistant", "content": answer.text}]
        return [*messages, {"role": "user", "content": prompt}]
    if isinstance(prompt, str):
        return "".join(text + answer.text for text, answer in before) + prompt
    return [*(token for ids, answer in before for token in (*ids, *answer.token_ids)), *prompt]


async def _cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """End the tasks that still run, and wait for them."""
    left = [task for task in tasks if not task.done()]
    for task in left:
        task.cancel()
    if left:
        await asyncio.wait(left)
