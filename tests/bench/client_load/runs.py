"""Runs: a contender in a process of its own, warm before the clock starts, on the one server that all ask."""

from __future__ import annotations

import asyncio
import math
import os
import resource
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench._harness import Measures, Table, children, cpu_s, receive, send
from bench._served import repository, serving_repository
from bench.client_load.cases import FLAT, PACED, PAIRS, TOKENS_PER_S, TWIN, Case
from bench.client_load.contenders import CONTENDERS, Ask, Asked, AsyncAsk, Driver

from deepseek_backend.engines.simulated.simulated_engine import NEUTRAL_STEP_S
from deepseek_triton_tools.host.process_sessions import session_members
from deepseek_triton_tools.server.server_process import ServerProcess
from support.servers import change_yaml

TABLE = Table(
    (
        ("requests/s", "requests_per_s", ",.0f"),
        ("chunks/request", "chunks_per_request", ",.1f"),
        ("CPU ms/request", "cpu_ms_per_request", ",.3f"),
        ("CPU ms/1,000 chunks", "cpu_ms_per_1000_chunks", ",.1f"),
        ("cores", "cores", ".2f"),
        ("others", "others", ".2f"),
        ("CPU / raw", "cpu_over_raw", ".2f"),
    ),
    name_width=27,
)
LEGEND = (
    "chunks: responses with text; CPU: of the client's whole process; cores: that over wall time, and others: likewise "
    "what ran on the machine besides client and server, which is best near 0"
)


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One run of one contender, as its own process saw it."""

    num_requests: int
    num_chunks: int
    """With text."""
    wall_s: float
    cpu_s: float
    """Of the whole process, all threads, from the first request after the warm-up to the last answer."""
    num_threads: int
    """Alive at the end."""
    others_cpu_s: float = 0.0
    """What the machine's processors did meanwhile for neither the client nor the server."""


def measure(sample: Sample) -> dict[str, float]:
    return {
        "requests_per_s": sample.num_requests / sample.wall_s,
        "chunks_per_request": sample.num_chunks / sample.num_requests,
        "cpu_ms_per_request": sample.cpu_s * 1e3 / sample.num_requests,
        "cpu_ms_per_1000_chunks": sample.cpu_s * 1e6 / sample.num_chunks if sample.num_chunks else math.nan,
        "cores": sample.cpu_s / sample.wall_s,
        "others": sample.others_cpu_s / sample.wall_s,
    }


def beside_raw(case: Case, measured: Mapping[str, Measures]) -> dict[str, Measures]:
    """With CPU over that of the library by itself: per chunk of streams, per request of whole answers."""
    of = "cpu_ms_per_1000_chunks" if case.verb == "stream" else "cpu_ms_per_request"
    raw = {name: measured.get(library, {}).get(of, math.nan) for name, library in PAIRS}
    return {name: {**each, "cpu_over_raw": each[of] / raw.get(name, math.nan)} for name, each in measured.items()}


# --- The server ---

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_IDLE = (3, 4)
"""Columns of /proc/stat's first line: idle and iowait."""


@contextmanager
def serving_all(log_file: Path) -> Iterator[ServerProcess]:
    """A tritonserver with the three models."""
    with TemporaryDirectory(prefix="deepseek-triton-bench-") as folder:
        made = repository(Path(folder) / "repository", "simulated", engine_options={})
        pace = {"pace": "real", "speed": TOKENS_PER_S * NEUTRAL_STEP_S}
        change_yaml(_copy(made, PACED) / "1/model.yaml", engine_options=pace)
        _make_whole(_copy(made, TWIN))
        with serving_repository(made, log_file) as server:
            yield server


def _copy(made: Path, name: str) -> Path:
    """Of the first model, under another name."""
    model = made / name
    shutil.copytree(made / FLAT, model)
    _change(model / "config.pbtxt", f'name: "{FLAT}"', f'name: "{name}"')
    return model


def _make_whole(model: Path) -> None:
    """Not decoupled: one response to each request."""
    _change(model / "config.pbtxt", "decoupled: true", "decoupled: false")
    change_yaml(model / "1/model.yaml", decoupled=False)


def _change(file: Path, old: str, new: str) -> None:
    text = file.read_text(encoding="utf-8")
    if text.count(old) != 1:
        raise SystemExit(f"{file.name}: expected {old!r} once")
    file.write_text(text.replace(old, new), encoding="utf-8")


def server_cpu_s(server: ServerProcess) -> float:
    """Of Triton and its stubs so far."""
    return sum(cpu_s(pid) for pid in {server.pid, *session_members(server.pid)})


def machine_cpu_s() -> float:
    """What all processors have worked so far."""
    first = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]  # guests' time is in user time already
    return sum(int(ticks) for place, ticks in enumerate(first) if place not in _IDLE) / _TICKS_PER_S


# --- A run ---

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
