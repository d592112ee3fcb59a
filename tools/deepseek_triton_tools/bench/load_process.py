"""A process that loads servers: it gets jobs through a pipe, runs them, tells how far it is, and sends the records."""

from __future__ import annotations

import asyncio
import gc
import signal
import time
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, TypeAlias

import uvloop

from deepseek_triton_tools.bench.figures import RequestRecord
from deepseek_triton_tools.bench.targets import BenchAnswer, BenchPrompt, BenchTarget, TargetSettings, TritonTarget
from deepseek_triton_tools.bench.workload import Conversation
from deepseek_triton_tools.host.processes import allow_open_files

if TYPE_CHECKING:
    from multiprocessing.sharedctypes import Synchronized

SharedCounter: TypeAlias = "Synchronized[int]"

_GC_THRESHOLD = (50_000, 20, 1_000)
"""A collection of all objects would be a gap in every stream."""
_OPEN_FILES = 256
"""Files and connections beside those of the streams."""
_PROGRESS_S = 0.25
_TICK_S = 0.01
"""How often the delay of the event loop is measured."""
_AFTER_FAILURE_S = 0.1
"""A user waits so long after a failure, because a server that is down refuses thousands of requests a second."""
_TRIAL_S = 120
_TRIAL_TOKENS = 8
"""Longest prompt of the request that tries the server out, so that no prefix cache knows the real ones."""


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

    @classmethod
    def together(cls, parts: Sequence[LoadProgress], elapsed_s: float, total: int) -> LoadProgress:
        return cls(
            ended=sum(part.ended for part in parts),
            failed=sum(part.failed for part in parts),
            inflight=sum(part.inflight for part in parts),
            output_tokens=sum(part.output_tokens for part in parts),
            elapsed_s=max(0.0, elapsed_s),
            total=total,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDone:
    records: Sequence[RequestRecord]
    """Those of the requests that are measured."""
    last: LoadProgress = LoadProgress()
    delays_ms: Sequence[float] = field(default_factory=list)
    """How late the process's event loop woke up, measured all the time: the noise in all its times."""


def serve_jobs(pipe: Connection, counter: SharedCounter) -> None:
    """Run the jobs that come through `pipe` until its other end is closed.

    :param counter: the next conversation of a closed loop, for all processes together.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the main process's, which sends StopRun
    gc.set_threshold(*_GC_THRESHOLD)
    while True:
        try:
            job = pipe.recv()
            if isinstance(job, LoadJob):  # a StopRun may come after the end
                allow_open_files(_OPEN_FILES + (job.concurrency or len(job.conversations)))
                uvloop.run(_JobRun(job, pipe, counter).run())
        except (EOFError, BrokenPipeError):
            return


class _JobRun:
    def __init__(self, job: LoadJob, pipe: Connection, counter: SharedCounter) -> None:
        self._job = job
        self._pipe = pipe
        self._counter = counter
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
            from deepseek_triton_tools.bench.openai_target import OpenAITarget  # here, because aiohttp loads slowly

            self._targets = [OpenAITarget(settings, url, self._now) for url in settings.urls]
        else:
            self._targets = [TritonTarget(settings, url, self._now) for url in settings.urls]
        try:
            problem = await self._trial()
            self._pipe.send(JobReady(problem))
            if problem:
                return
            message = await asyncio.to_thread(self._pipe.recv)
            if not isinstance(message, StartRun):
                return
            self._start = message.at
            delays = await self._load()
            self._pipe.send(JobDone(records=self._records, last=self._progress(), delays_ms=delays))
        finally:
            for target in self._targets:
                await target.close()

    async def _trial(self) -> str:
        """Ask each server for one token. Returns what is wrong."""
        request = self._job.conversations[0][0]
        fields: dict[str, Any] = {**(request.fields or {}), "max_tokens": 1}
        if "min_tokens" in {*fields, *self._job.target.fields}:
            fields["min_tokens"] = 0
        prompt = _History(chat=self._job.target.chat).with_prompt(request.prompt[:_TRIAL_TOKENS])
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
            tasks = [work, stopping, *helpers]
            for task in tasks:
                if not task.done():
                    task.cancel()
            await asyncio.wait(tasks)
        if not work.cancelled():
            work.result()  # raises what is a bug here
        return delays

    async def _tell(self) -> None:
        """Tell how far the run is, and look whether it is to stop; also when the main process has gone."""
        while True:
            await asyncio.sleep(_PROGRESS_S)
            try:
                self._pipe.send(self._progress())
                if self._pipe.poll() and isinstance(self._pipe.recv(), StopRun):
                    self._stopped.set()
            except (EOFError, OSError):
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
        while self._job.duration_s is None or self._now() < self._job.duration_s:
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
        tasks: set[asyncio.Task[bool]] = set()
        try:
            for number, due_s in due.items():
                if self._job.duration_s is not None and due_s >= self._job.duration_s:
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
            if tasks:
                await asyncio.wait(tasks)
            for task in tasks:
                task.result()
        finally:
            await _cancel(tasks)

    async def _converse(self, index: int, due_s: float | None) -> bool:
        """Send turn after turn. A conversation ends early with a turn that failed; then the result is False."""
        conversation = self._job.conversations[index]
        target = self._targets[index % len(self._targets)]
        history = _History(chat=self._job.target.chat)
        for turn, request in enumerate(conversation):
            if turn:
                await asyncio.sleep(request.wait_s)
            record = RequestRecord(index=index, turn=turn, due_s=due_s if turn == 0 else None)
            if self._job.target.fields.get("ignore_eos"):
                record.asked_tokens = request.output_tokens
            if index >= self._job.num_warmup:
                self._records.append(record)
            has_next = turn + 1 < len(conversation)
            fields = {} if request.output_tokens is None else {"max_tokens": request.output_tokens}
            fields |= request.fields or {}
            asking = target.ask(history.with_prompt(request.prompt), fields, record, keep_ids=has_next)
            self._active[id(record)] = record
            try:
                limit_s = self._job.leave_after_s if index in self._job.leaving and turn == 0 else None
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
            if has_next:
                history.add(request.prompt, answer)
        self._ended += 1
        return True


class _History:
    """The conversation so far, in the form of its prompts."""

    def __init__(self, *, chat: bool) -> None:
        self._chat = chat
        self._messages: list[dict[str, str]] = []
        self._text = ""
        self._ids: list[int] = []

    def with_prompt(self, prompt: Any) -> BenchPrompt:
        if self._chat:
            return [*self._messages, {"role": "user", "content": prompt}]
        if isinstance(prompt, str):
            return self._text + prompt
        return [*self._ids, *prompt]

    def add(self, prompt: Any, answer: BenchAnswer) -> None:
        if self._chat:
            reply = {"role": "assistant", "content": answer.text}
            self._messages += [{"role": "user", "content": prompt}, reply]
        elif isinstance(prompt, str):
            self._text += prompt + answer.text
        else:
            self._ids += [*prompt, *answer.token_ids]


async def _cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """End the tasks that still run, and wait for them."""
    left = [task for task in tasks if not task.done()]
    for task in left:
        task.cancel()
    if left:
        await asyncio.wait(left)
