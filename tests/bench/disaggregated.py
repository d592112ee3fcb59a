"""TTFT and inter-token latency of an aggregated pair of servers beside a context and a generation server.

    python tests/bench/disaggregated.py [--preset NAME] [--rate R] [--requests N] [--isl N] [--osl N] [--predict]

Both cases have two simulated servers at the same pace, the same prompts and the same Poisson arrivals. What the
simulated engine predicts comes first: its own scheduler and deployment model on a virtual clock, without processes,
sockets or text. Then `deepseek-triton bench` measures two tritonservers behind the gateway; --predict leaves that out.
Measured times have what a gateway, a tritonserver and a busy machine add.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import cast

import httpx
import numpy as np

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "model_repository/tensorrt_llm/1"), str(ROOT / "tests")]

from bench._served import serving  # noqa: E402

from deepseek_backend.engines.simulated.scheduler import ScheduledRow, Scheduler  # noqa: E402
from deepseek_backend.engines.simulated.simulated_options import SimulatedOptions, parse_options  # noqa: E402

CLI = [sys.executable, "-m", "deepseek_triton_tools.cli.main"]


class VirtualServer:
    """One engine on a virtual clock; its iterations follow each other while there is work."""

    def __init__(self, options: SimulatedOptions, clock: VirtualClock, moved: Callable[[ScheduledRow], None]) -> None:
        deployment = options.deployment
        if deployment is None:
            raise SystemExit("--preset: expected one that has a deployment's pace")
        self.scheduler = Scheduler(options.limits, num_ranks=deployment.num_ranks)
        self.transfer_seconds = options.transfer_seconds
        self._step_seconds = deployment.step_seconds
        self._clock = clock
        self._moved = moved
        self._busy = False

    def add(self, row: ScheduledRow) -> None:
        self.scheduler.add(row)
        self.wake()

    def wake(self) -> None:
        """Run an iteration, unless one runs; its rows move at its end."""
        if self._busy or self.scheduler.idle:
            return
        loads, moved, admitted = self.scheduler.step()
        for row in [row for row in admitted if row.fetches]:
            self._clock.after(self.transfer_seconds(row.num_input_tokens), lambda row=row: self._join(row))
        if loads:
            self._busy = True
            self._clock.after(self._step_seconds(loads), lambda: self._end(moved))

    def _join(self, row: ScheduledRow) -> None:
        self.scheduler.join(row)
        cast("FetchingRow", row).fetched()
        self.wake()

    def _end(self, moved: Sequence[ScheduledRow]) -> None:
        self._busy = False
        for row in moved:
            self._moved(row)
        self.wake()


class VirtualClock:
    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), event))

    def run(self) -> None:
        while self._events:
            self.now, _, event = heapq.heappop(self._events)
            event()


class FetchingRow(ScheduledRow):
    """A generation_only request. `fetched` frees the KV cache of its context server."""

    fetched: Callable[[], None]


def predict(given: argparse.Namespace, *, shared: bool) -> dict[str, float]:
    """Return the figures of one case, in milliseconds."""
    options = parse_options({"preset": given.preset})
    clock, times = VirtualClock(), [list[float]() for _ in range(given.requests)]
    numbers: dict[ScheduledRow, int] = {}

    def moved(row: ScheduledRow) -> None:
        times[numbers[row]].append(clock.now)
        if row.keeps_blocks:
            hand_over(row)

    def hand_over(context: ScheduledRow) -> None:
        row = FetchingRow(**size, length=given.osl, generated=1, fetches=True)
        row.fetched = lambda: (servers[0].scheduler.free(context), servers[0].wake())[1]
        numbers[row] = numbers[context]
        servers[1].add(row)

    def arrive(number: int) -> None:
        own = {"max_tokens": 1, "length": 1, "keeps_blocks": True} if shared else {"length": given.osl}
        row = ScheduledRow(**{**size, **own})
        numbers[row] = number
        servers[0 if shared else number % 2].add(row)

    size = {"num_input_tokens": given.isl, "max_tokens": given.osl}
    servers = [VirtualServer(options, clock, moved) for _ in range(2)]
    rng = random.Random(given.seed)
    arrivals = list(itertools.accumulate(rng.expovariate(given.rate) for _ in times))
    for number, arrival in enumerate(arrivals):
        clock.after(arrival, lambda number=number: arrive(number))
    clock.run()
    ttft = [of_request[0] - arrival for of_request, arrival in zip(times, arrivals, strict=True)]
    return figures(ttft, [gap for of_request in times for gap in np.diff(of_request)])


def figures(ttft_s: Sequence[float], itl_s: Sequence[float]) -> dict[str, float]:
    pairs = {"TTFT": ttft_s, "ITL": itl_s}
    return {f"{name} p{p}": 1000 * float(np.percentile(of, p)) for name, of in pairs.items() for p in (50, 99)}


def measure(given: argparse.Namespace, folder: Path, *, shared: bool) -> dict[str, float]:
    """Return the figures of one case as `deepseek-triton bench` measures them."""
    folder.mkdir()
    options = {"preset": given.preset}
    with ExitStack() as stack:
        servers = [
            stack.enter_context(serving("simulated", folder / f"{number}.log", engine_options=options))
            for number in range(2)
        ]
        roles = ["--context-server" if shared else "--server", "--server"]
        arguments = [part for role, server in zip(roles, servers, strict=True) for part in (role, server.http_url)]
        url = stack.enter_context(_gateway(arguments, folder / "gateway.log"))
        load = ["--rate", f"{given.rate:g}", "--num-prompts", f"{given.requests}", "--seed", f"{given.seed}"]
        lengths = ["--isl", f"{given.isl}", "--osl", f"{given.osl}", "--ignore-eos"]
        command = [*CLI, "bench", url, *load, *lengths, "--warmup", "2", "--output", str(folder / "bench")]
        with (folder / "bench.log").open("w") as log:
            subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT)
    (point,) = json.loads((folder / "bench" / "bench.json").read_text())["points"]
    found = point["runs"][0]["figures"]
    return {f"{name} p{p}": found[f"{name.lower()}_ms"][f"p{p}"] for name in ("TTFT", "ITL") for p in (50, 99)}


@contextmanager
def _gateway(arguments: Sequence[str], log_file: Path) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with log_file.open("w") as log:
        process = subprocess.Popen([*CLI, "gateway", *arguments, "--port", str(port)], stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 60
        while not _is_ready(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the gateway did not start; see {log_file}")
            time.sleep(0.1)
        yield f"{url}/v1"
    finally:
        process.terminate()
        process.wait()


def _is_ready(url: str) -> bool:
    try:
        models = httpx.get(f"{url}/fleet", timeout=5).json()["models"]
        return all(server["state"] == "up" for model in models for server in model["servers"])
    except httpx.TransportError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--preset", default="h200x8-r1-fp8-max-throughput")
    parser.add_argument("--rate", type=float, default=2.0, help="requests a second, of both servers together")
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--isl", type=int, default=4000)
    parser.add_argument("--osl", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--predict", action="store_true", help="measure nothing")
    parser.add_argument("--output", type=Path, help="folder for logs and bench.json (default: a temporary one)")
    given = parser.parse_args()
    folder = given.output or Path(tempfile.mkdtemp(prefix="deepseek-triton-disaggregated-"))
    folder.mkdir(parents=True, exist_ok=True)
    columns = [f"{name} p{p}" for name in ("TTFT", "ITL") for p in (50, 99)]
    print(f"{given.preset}: {given.requests} requests of {given.isl} + {given.osl} tokens, {given.rate:g}/s; ms")
    print(f"{'':34}" + "".join(f"{column:>12}" for column in columns))
    for case, shared in (("aggregated pair", False), ("context and generation", True)):
        rows = {"predicted": lambda shared=shared: predict(given, shared=shared)}
        if not given.predict:
            rows["measured"] = lambda shared=shared, case=case: measure(
                given, folder / case.replace(" ", "-"), shared=shared
            )
        for kind, run in rows.items():
            found = run()
            print(f"{f'{case}, {kind}':34}" + "".join(f"{found[column]:12.1f}" for column in columns), flush=True)


if __name__ == "__main__":
    main()
