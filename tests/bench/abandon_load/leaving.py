"""Ways to leave a request, and a process that leaves thousands of them and looks at what stays behind.

A `Plan` is one of the client's four corners. Requests that are left would run on for minutes, so one that the server
does not know to be gone shows.
"""

import asyncio
import contextlib
import gc
import itertools
import os
import random
import signal
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench._served import await_backend

from deepseek_triton_client import AsyncClient, Client, DeadlineExceeded, Timeouts

PROMPT = "Prove that the square root of two is irrational, in one paragraph."
ENDLESS = 30_000
"""Tokens of an answer that is left: five minutes at 100 tokens/s."""
SHORT = 8
"""Of one that is read to its end."""
NUM_QUARTERS = 4
_SETTLE_S = 0.5
"""For sockets closed just now, and what the loop or gRPC's own threads still do for them."""
_PATIENCE_S = 60.0
"""So long a machine that stalls may take for it."""
_CANCEL_WITHIN_S = 0.3
_MOST_CHUNKS = 12


class Interrupt(BaseException):
    """As KeyboardInterrupt, which would end an event loop."""


class _OwnError(Exception):
    """Of the code that reads the stream."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    url: str
    face: str
    """sync or async."""
    num_streams: int
    concurrency: int
    seed: int
    num_interrupts: int = 0
    """Besides, so many requests of the main thread are interrupted by a signal; sync only."""
    metrics_url: str = ""
    """Of the server, where no other process asks it: what it still has is looked at while the client is open."""
    traced: bool = False
    """Count memory with tracemalloc, which takes about twice the time."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Of the process when nothing is under way."""

    when: str
    descriptors: int
    threads: int
    under_way: int
    """Live objects that belong to a request: exchanges, response streams, gRPC calls, tasks."""
    objects: int
    """All that the garbage collector knows of."""
    left: float
    """Requests that the backend still had after _PATIENCE_S."""
    traced_kib: float
    rss_mib: float


@dataclass(frozen=True, kw_only=True)
class Findings:
    samples: list[Sample]
    """before, warm, quarter 1 to 4, closed."""
    outcomes: dict[str, int]
    """How the requests ended."""
    unexpected: list[str]
    """What should not have been raised."""


def leaving_process(plan: Plan, parent: Any) -> None:
    """Sends its Findings."""
    if plan.traced:
        tracemalloc.start()
    parent.send(asyncio.run(_leave_async(plan)) if plan.face == "async" else _run_sync(plan))


class _Tally:
    """How requests ended. Threads share it. It doesn't grow with them, for memory is measured."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended: Counter[str] = Counter()
        self._unexpected: list[str] = []

    def ended(self, how: str) -> None:
        with self._lock:
            self._ended[how] += 1

    def unexpected(self, way: str, exc: BaseException) -> None:
        with self._lock:
            self._unexpected.append(f"{way}: {exc!r}")

    def findings(self, samples: list[Sample]) -> Findings:
        return Findings(samples=samples, outcomes=dict(self._ended), unexpected=self._unexpected)


def _parts(plan: Plan) -> Iterator[tuple[str, int]]:
    """What is sampled, and how many requests come before."""
    yield "warm", 2 * plan.concurrency
    for quarter in range(1, NUM_QUARTERS + 1):
        yield f"quarter {quarter}", plan.num_streams // NUM_QUARTERS


# --- asyncio ---


async def _leave_async(plan: Plan) -> Findings:
    tally, chance = _Tally(), random.Random(plan.seed)
    async with AsyncClient(plan.url) as client:  # what the first one of a process leaves behind is not asked here
        await client.generate(PROMPT, max_tokens=SHORT)
    del client
    samples = [await _sample_async("before", plan, None)]
    async with AsyncClient(plan.url) as client:
        for when, num_requests in _parts(plan):
            numbers = iter(range(num_requests))
            await asyncio.gather(*(_work_async(client, numbers, chance, tally) for _ in range(plan.concurrency)))
            samples.append(await _sample_async(when, plan, samples[0]))
    del client
    samples.append(await _sample_async("closed", plan, samples[0]))
    return tally.findings(samples)


async def _sample_async(when: str, plan: Plan, before: Sample | None) -> Sample:
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        gc.collect()
        await asyncio.sleep(_SETTLE_S)
        left = await asyncio.to_thread(_left, plan)  # the loop goes on meanwhile
        sample = _sample(when, left)
        if _is_settled(sample, before) or time.monotonic() > deadline:
            return sample


async def _work_async(client: AsyncClient, numbers: Iterator[int], chance: random.Random, tally: _Tally) -> None:
    for _ in numbers:
        name, way = chance.choice(ASYNC_WAYS)
        try:
            tally.ended(f"{name}: {await way(client, chance)}")
        except Exception as exc:
            tally.unexpected(name, exc)


async def _read(client: AsyncClient, num_chunks: int) -> None:
    async with client.stream(PROMPT, max_tokens=ENDLESS) as stream:
        await _take(stream, num_chunks)


async def _take(stream: Any, num_chunks: int) -> None:
    for _ in range(num_chunks):
        await anext(stream)


async def _leave_early(client: AsyncClient, chance: random.Random) -> str:
    await _read(client, chance.randrange(_MOST_CHUNKS))
    return "left"


async def _raise_inside(client: AsyncClient, chance: random.Random) -> str:
    exc = chance.choice((_OwnError, Interrupt))
    with contextlib.suppress(_OwnError, Interrupt):
        async with client.stream(PROMPT, max_tokens=ENDLESS) as stream:
            await _take(stream, chance.randrange(_MOST_CHUNKS))
            raise exc
    return "left"


async def _cancelled(doing: Awaitable[Any], delay_s: float) -> str:
    task = asyncio.ensure_future(doing)
    await asyncio.sleep(delay_s)
    if not task.cancel():
        await task
        return "ended before"
    try:
        await task
    except asyncio.CancelledError:
        return "cancelled"
    raise AssertionError("a cancelled task ended as if it had not been")


async def _cancel_opening(client: AsyncClient, chance: random.Random) -> str:
    return await _cancelled(_read(client, 10 * _MOST_CHUNKS), chance.choice((0, 0.001, 0.02)) * chance.random())


async def _cancel_reading(client: AsyncClient, chance: random.Random) -> str:
    return await _cancelled(_read(client, ENDLESS), _CANCEL_WITHIN_S * chance.random())


async def _cancel_generate(client: AsyncClient, chance: random.Random) -> str:
    return await _cancelled(client.generate(PROMPT, max_tokens=ENDLESS), _CANCEL_WITHIN_S * chance.random())


async def _drop(client: AsyncClient, chance: random.Random) -> str:
    """Enters the block by hand, and forgets the stream."""
    stream = client.stream(PROMPT, max_tokens=ENDLESS)
    await stream.__aenter__()
    await _take(stream, chance.randrange(_MOST_CHUNKS))
    return "dropped"


async def _leave_many(client: AsyncClient, chance: random.Random) -> str:
    num_tokens = itertools.chain([SHORT] * chance.randrange(3), itertools.repeat(ENDLESS))
    requests = ({"prompt": PROMPT, "max_tokens": each} for each in num_tokens)
    left = chance.random() * _CANCEL_WITHIN_S
    async with contextlib.aclosing(client.generate_many(requests, concurrency=3)) as answers:
        with contextlib.suppress(asyncio.TimeoutError):
            while True:
                await asyncio.wait_for(anext(answers), left)
    return "left"


async def _run_out(client: AsyncClient, chance: random.Random) -> str:
    limits = Timeouts(total=0.001 + _CANCEL_WITHIN_S * chance.random())
    try:
        if chance.random() < 0.5:
            await client.generate(PROMPT, max_tokens=ENDLESS, timeouts=limits)
        else:
            async with client.stream(PROMPT, max_tokens=ENDLESS, timeouts=limits) as stream:
                await stream.completion()
    except DeadlineExceeded:
        return "DeadlineExceeded"
    raise AssertionError("a time limit did not hold")


async def _finish(client: AsyncClient, chance: random.Random) -> str:
    if chance.random() < 0.5:
        return str((await client.generate(PROMPT, max_tokens=SHORT)).finish_reason)
    async with client.stream(PROMPT, max_tokens=SHORT) as stream:
        return str((await stream.completion()).finish_reason)


ASYNC_WAYS: tuple[tuple[str, Callable[[AsyncClient, random.Random], Awaitable[str]]], ...] = (
    ("leave early", _leave_early),
    ("raise inside", _raise_inside),
    ("cancel opening", _cancel_opening),
    ("cancel reading", _cancel_reading),
    ("cancel generate", _cancel_generate),
    ("drop", _drop),
    ("leave many", _leave_many),
    ("run out", _run_out),
    ("finish", _finish),
)


# --- threads ---


def _run_sync(plan: Plan) -> Findings:
    tally, chance = _Tally(), random.Random(plan.seed)
    with ThreadPoolExecutor(plan.concurrency) as pool:
        together = threading.Barrier(plan.concurrency)
        list(pool.map(lambda _: together.wait(), range(plan.concurrency)))  # or its threads would start later
        with Client(plan.url) as client:  # what the first one of a process leaves behind is not asked here
            client.generate(PROMPT, max_tokens=SHORT)
            list(client.generate_many([PROMPT], max_tokens=SHORT))  # the thread of all batches stays
        del client
        samples = [_sample_sync("before", plan, None)]
        with Client(plan.url) as client:
            for when, num_requests in _parts(plan):
                numbers = iter(range(num_requests))
                working = [pool.submit(_work_sync, client, numbers, chance, tally) for _ in range(plan.concurrency)]
                if when != "warm":
                    _interrupt(client, plan.num_interrupts // NUM_QUARTERS, chance, tally)
                for each in working:
                    each.result()
                samples.append(_sample_sync(when, plan, samples[0]))
        del client
        samples.append(_sample_sync("closed", plan, samples[0]))
    return tally.findings(samples)


def _sample_sync(when: str, plan: Plan, before: Sample | None) -> Sample:
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        gc.collect()
        time.sleep(_SETTLE_S)
        sample = _sample(when, _left(plan))
        if _is_settled(sample, before) or time.monotonic() > deadline:
            return sample


def _work_sync(client: Client, numbers: Iterator[int], chance: random.Random, tally: _Tally) -> None:
    for _ in numbers:
        name, way = chance.choice(SYNC_WAYS)
        try:
            tally.ended(f"{name}: {way(client, chance)}")
        except Exception as exc:
            tally.unexpected(name, exc)


def _take_sync(stream: Any, num_chunks: int) -> None:
    for _ in itertools.islice(stream, num_chunks):
        pass


def _leave_early_sync(client: Client, chance: random.Random) -> str:
    with client.stream(PROMPT, max_tokens=ENDLESS) as stream:
        _take_sync(stream, chance.randrange(_MOST_CHUNKS))
    return "left"


def _raise_inside_sync(client: Client, chance: random.Random) -> str:
    exc = chance.choice((_OwnError, Interrupt, KeyboardInterrupt))
    with (
        contextlib.suppress(_OwnError, Interrupt, KeyboardInterrupt),
        client.stream(PROMPT, max_tokens=ENDLESS) as stream,
    ):
        _take_sync(stream, chance.randrange(_MOST_CHUNKS))
        raise exc
    return "left"


def _drop_sync(client: Client, chance: random.Random) -> str:
    stream = client.stream(PROMPT, max_tokens=ENDLESS)
    stream.__enter__()
    _take_sync(stream, chance.randrange(_MOST_CHUNKS))
    return "dropped"


def _leave_many_sync(client: Client, chance: random.Random) -> str:
    """After the short answers: there is no way to leave while it waits but an interrupt."""
    num_short = chance.randrange(1, 4)
    num_tokens = itertools.chain([SHORT] * num_short, itertools.repeat(ENDLESS))
    answers = client.generate_many(({"prompt": PROMPT, "max_tokens": each} for each in num_tokens), concurrency=3)
    for _ in range(chance.randrange(1, num_short + 1)):
        next(answers)
    return "left"


def _run_out_sync(client: Client, chance: random.Random) -> str:
    limits = Timeouts(total=0.001 + _CANCEL_WITHIN_S * chance.random())
    try:
        if chance.random() < 0.5:
            client.generate(PROMPT, max_tokens=ENDLESS, timeouts=limits)
        else:
            with client.stream(PROMPT, max_tokens=ENDLESS, timeouts=limits) as stream:
                stream.completion()
    except DeadlineExceeded:
        return "DeadlineExceeded"
    raise AssertionError("a time limit did not hold")


def _finish_sync(client: Client, chance: random.Random) -> str:
    if chance.random() < 0.5:
        return str(client.generate(PROMPT, max_tokens=SHORT).finish_reason)
    with client.stream(PROMPT, max_tokens=SHORT) as stream:
        return str(stream.completion().finish_reason)


SYNC_WAYS: tuple[tuple[str, Callable[[Client, random.Random], str]], ...] = (
    ("leave early", _leave_early_sync),
    ("raise inside", _raise_inside_sync),
    ("drop", _drop_sync),
    ("leave many", _leave_many_sync),
    ("run out", _run_out_sync),
    ("finish", _finish_sync),
)


def _interrupt(client: Client, num_requests: int, chance: random.Random, tally: _Tally) -> None:
    """Ctrl-C, at a random moment of a request of the main thread."""

    def interrupt(number: int, frame: Any) -> None:
        raise Interrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(num_requests):
            name, request = chance.choice((("interrupt generate", _endless), ("interrupt stream", _endless_stream)))
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.001 + _CANCEL_WITHIN_S * chance.random())
                request(client)
            except Interrupt:
                tally.ended(f"{name}: interrupted")
            except Exception as exc:
                tally.unexpected(name, exc)
    finally:
        signal.signal(signal.SIGALRM, before)


def _endless(client: Client) -> None:
    client.generate(PROMPT, max_tokens=ENDLESS)


def _endless_stream(client: Client) -> None:
    with client.stream(PROMPT, max_tokens=ENDLESS) as stream:
        stream.completion()


# --- what stays behind ---

_OF_A_REQUEST = frozenset(
    {"Exchange", "Stream", "AsyncStream", "HttpResponseStream", "HttpExchange", "GrpcStream", "AsyncioCall"}
    | {"BlockingCall", "ThreadWatchdog", "LoopWatchdog", "UnaryStreamCall", "_SingleThreadedRendezvous"}
    | {"_MultiThreadedRendezvous"}
)
_PACKAGES = ("deepseek_triton_client", "grpc")


def _left(plan: Plan) -> float:
    if not plan.metrics_url:
        return 0
    return await_backend(plan, lambda backend: backend.left == 0, _PATIENCE_S).left


def _is_settled(sample: Sample, before: Sample | None) -> bool:
    if before is None:
        return True
    is_closed = sample.when != "closed" or sample.descriptors <= before.descriptors
    return sample.under_way <= before.under_way and is_closed


def _sample(when: str, left: float) -> Sample:
    gc.collect()
    objects = gc.get_objects()
    return Sample(
        when=when,
        descriptors=len(os.listdir("/proc/self/fd")) - 1,  # less the one that lists
        threads=len(os.listdir("/proc/self/task")),
        under_way=sum(_is_of_a_request(each) for each in objects),
        objects=len(objects),
        left=left,
        traced_kib=tracemalloc.get_traced_memory()[0] / 1024,
        rss_mib=int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20,
    )


def _is_of_a_request(thing: object) -> bool:
    kind = type(thing)
    if kind.__name__ in _OF_A_REQUEST and kind.__module__.startswith(_PACKAGES):
        return True
    return kind is _TASK and not thing.done()


_TASK = asyncio.Task
