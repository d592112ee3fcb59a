"""One run: a contender in a process of its own, warm before the clock starts."""

from __future__ import annotations

import asyncio
import resource
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from bench._harness import children, receive, send
from bench.client_load.cases import Case
from bench.client_load.contenders import CONTENDERS, Ask, Asked, AsyncAsk, Driver
from bench.client_load.measures import Sample
from bench.client_load.serving import machine_cpu_s, server_cpu_s

from deepseek_triton_tools.server.server_process import ServerProcess

_WARM_UP_TOKENS = 4
_WARM_UP_ROUNDS = 2
_PATIENCE_S = 300.0


def run(contender: str, case: Case, server: ServerProcess) -> Sample:
    """In a process of its own. Raises ChildFailed."""
    asked = Asked(
        verb=case.verb,
        model=case.model,
        concurrency=case.concurrency,
        http=f"127.0.0.1:{server.http_port}",
        grpc=f"127.0.0.1:{server.grpc_port}",
    )
    with children(_child, [(contender, asked, case)]) as pipes:
        receive(pipes, _PATIENCE_S)  # it is warm
        before = machine_cpu_s() - server_cpu_s(server)
        send(pipes, "begin")
        (sample,) = receive(pipes, _PATIENCE_S)
        others_s = machine_cpu_s() - server_cpu_s(server) - before - sample.cpu_s
        return replace(sample, others_cpu_s=max(0.0, others_s))


def _child(job: tuple[str, Asked, Case], parent: Connection) -> None:
    contender, asked, case = job
    driver, opened = CONTENDERS[contender]
    sample = _DRIVERS[driver](opened(asked), case, _Clock(parent, case.num_requests))
    parent.send(sample)
    parent.recv()  # until it is killed: nothing of its exit falls into another's run


class _Clock:
    """Measures this process from when it is warm."""

    def __init__(self, parent: Connection, num_requests: int) -> None:
        self._parent = parent
        self._num_requests = num_requests
        self._wall_s = self._cpu_s = 0.0

    def start(self) -> None:
        self._parent.send("warm")
        self._parent.recv()
        self._wall_s, self._cpu_s = time.perf_counter(), _cpu_s()

    def stop(self, num_chunks: int) -> Sample:
        return Sample(
            num_requests=self._num_requests,
            num_chunks=num_chunks,
            wall_s=time.perf_counter() - self._wall_s,
            cpu_s=_cpu_s() - self._cpu_s,
            num_threads=threading.active_count(),
        )


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _warm_up(case: Case) -> Iterator[int]:
    """Tokens of each request: every connection that the case needs is opened, and used again."""
    return iter([_WARM_UP_TOKENS] * (case.concurrency * _WARM_UP_ROUNDS))


def _load(case: Case) -> Iterator[int]:
    return iter([case.num_tokens] * case.num_requests)


def _on_asyncio(opened: Any, case: Case, clock: _Clock) -> Sample:
    async def work(ask: AsyncAsk, requests: Iterator[int]) -> int:
        return sum([await ask(num_tokens) for num_tokens in requests])

    async def all_of(ask: AsyncAsk, requests: Iterator[int]) -> int:
        return sum(await asyncio.gather(*(work(ask, requests) for _ in range(case.concurrency))))

    async def main() -> Sample:
        async with opened as ask:
            await all_of(ask, _warm_up(case))
            clock.start()
            return clock.stop(await all_of(ask, _load(case)))

    return asyncio.run(main())


def _work(ask: Ask, requests: Iterator[int]) -> int:
    return sum(ask(num_tokens) for num_tokens in requests)


def _on_threads(opened: Any, case: Case, clock: _Clock) -> Sample:
    with opened as ask, ThreadPoolExecutor(case.concurrency) as pool:
        together = threading.Barrier(case.concurrency)

        def begin(requests: Iterator[int]) -> int:
            together.wait()  # or the first threads would do the work of the last ones too
            return _work(ask, requests)

        def all_of(requests: Iterator[int]) -> int:
            return sum(pool.map(begin, [requests] * case.concurrency))

        all_of(_warm_up(case))
        clock.start()
        return clock.stop(all_of(_load(case)))


def _on_greenlets(opened: Any, case: Case, clock: _Clock) -> Sample:
    import gevent

    def all_of(ask: Ask, requests: Iterator[int]) -> int:
        greenlets = [gevent.spawn(_work, ask, requests) for _ in range(case.concurrency)]
        return sum(greenlet.get() for greenlet in greenlets)

    with opened as ask:
        all_of(ask, _warm_up(case))
        clock.start()
        return clock.stop(all_of(ask, _load(case)))


_DRIVERS: dict[Driver, Callable[[Any, Case, _Clock], Sample]] = {
    "asyncio": _on_asyncio,
    "threads": _on_threads,
    "greenlets": _on_greenlets,
}
