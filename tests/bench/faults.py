"""How long the open requests of a real tritonserver wait when something dies, and how it ends.

    python tests/bench/faults.py [--only death unready kill-grpc kill-http sigterm] [--repetitions N] [--out FOLDER]

death      the engine dies under 64 streams, half HTTP, half gRPC; the server ends (on_fatal: exit)
unready    the same, and the server stays and refuses (on_fatal: unready)
kill-grpc  four client processes with 200 gRPC streams in all are killed (SIGKILL)
kill-http  the same with HTTP streams
sigterm    tritonserver is told to exit under 64 streams, with drain_s 1

All on the simulated engine, which keeps a pace. Prints the median, least and most of each time and counts the outcomes.
Run by hand from the repository's root. Raw samples: FAULT.jsonl has a line for each repetition with every request's
answer; FAULT.log the log of the servers.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "model_repository" / "tensorrt_llm" / "1"))
sys.path.insert(0, str(Path(__file__).parents[1]))

from bench._load import Answer, Connection, Grpc, Http, Request, ask
from bench._served import await_backend, await_exit, default_folder, exit_code, serving

from deepseek_triton_tools.server.server_process import ServerProcess

STREAMS_EACH = 32
FAIL_AFTER_TOKENS = 2 * STREAMS_EACH * 200
"""Two seconds' worth: all streams are open by then."""
KILLED_STREAMS = 200
KILLED_PROCESSES = 4
DRAIN_S = 1
METRICS_PERIOD_S = 0.1
PATIENCE_S = 60.0

_REAL_PACE = {"pace": "real"}
"""Without a preset: 100 tokens a second for each request."""
_DEPLOYMENT_PACE = {"preset": "h200x8-r1-fp8-max-throughput"}


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One repetition."""

    seconds: dict[str, float | None]
    """What was measured -> how long it took; None: longer than was waited for."""
    counts: dict[str, Counter[str]]
    """What was counted -> how often each was seen."""
    answers: list[Answer] = field(default_factory=list)


def long_stream(**more: Any) -> Request:
    return Request(fields={"text_input": "Tell me a story", "max_tokens": 8000, "streaming": True}, **more)


async def open_streams(
    connections: list[Connection], num_each: int, *, on_all_open: Callable[[], object] | None = None
) -> list[Answer]:
    """So many streams over each connection, to their ends; `on_all_open` when each has had a first response."""
    unopened = num_each * len(connections)

    def count() -> None:
        nonlocal unopened
        unopened -= 1
        if not unopened and on_all_open:
            on_all_open()

    asking = [ask(connection, long_stream(), on_first=count) for connection in connections for _ in range(num_each)]
    try:
        return list(await asyncio.gather(*asking))
    finally:
        for connection in connections:
            await connection.close()


def connect(server: ServerProcess) -> list[Connection]:
    return [Http(f"127.0.0.1:{server.http_port}"), Grpc(f"127.0.0.1:{server.grpc_port}")]


async def open_both(server: ServerProcess, on_all_open: Callable[[], object] | None = None) -> list[Answer]:
    return await open_streams(connect(server), STREAMS_EACH, on_all_open=on_all_open)


async def ask_again(server: ServerProcess) -> list[Answer]:
    connections = connect(server)
    try:
        return [await ask(connection, long_stream()) for connection in connections]
    finally:
        for connection in connections:
            await connection.close()


def outcomes(answers: list[Answer]) -> Counter[str]:
    return Counter(f"{answer.protocol} {answer.outcome}" for answer in answers)


def engine_death(log: Path, on_fatal: str) -> Sample:
    """From the engine's death, by its line in the log or the first error, whichever was seen first."""
    died: list[float] = []

    def look(line: str) -> None:
        if "the engine died after" in line:
            died.append(time.monotonic())

    options = _REAL_PACE | {"fail_after": FAIL_AFTER_TOKENS}
    with serving("simulated", log, on_line=look, on_fatal=on_fatal, engine_options=options) as server:
        answers = asyncio.run(open_both(server))
        death = min([*died, *(answer.ended_s for answer in answers)])
        seconds: dict[str, float | None] = {
            "engine's death to the last answer": max(answer.ended_s for answer in answers) - death
        }
        streams_open = sum(answer.first_s is not None and answer.first_s <= death for answer in answers)
        counts = {"open when it died": Counter([str(streams_open)]), "answers": outcomes(answers)}
        if on_fatal == "exit":
            ended = await_exit(server, PATIENCE_S)
            seconds["engine's death to tritonserver's exit"] = ended and ended - death
            counts["tritonserver's exit code"] = Counter([str(exit_code(server))])
        else:
            time.sleep(5.0)
            counts["asked 5 s later"] = outcomes(asyncio.run(ask_again(server)))
            counts["tritonserver"] = Counter(["runs" if server.returncode is None else "ended"])
    return Sample(seconds=seconds, counts=counts, answers=answers)


def streaming_client(kind: type[Http] | type[Grpc], host_and_port: str, opened: Any) -> None:
    """A process to be killed."""

    async def stream() -> None:
        await open_streams([kind(host_and_port)], KILLED_STREAMS // KILLED_PROCESSES, on_all_open=opened.set)

    asyncio.run(stream())


@contextlib.contextmanager
def streaming_clients(kind: type[Http] | type[Grpc], host_and_port: str) -> Iterator[list[Any]]:
    """The processes, once every stream has had a first response."""
    spawn = multiprocessing.get_context("spawn")
    opened = [spawn.Event() for _ in range(KILLED_PROCESSES)]
    processes = [
        spawn.Process(target=streaming_client, args=(kind, host_and_port, event), daemon=True) for event in opened
    ]
    for process in processes:
        process.start()
    try:
        if not all(event.wait(PATIENCE_S) for event in opened):
            raise SystemExit("the streams did not begin")
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.join()


def killed_clients(server: ServerProcess, kind: type[Http] | type[Grpc]) -> Sample:
    """From the first SIGKILL until /metrics, which is written every METRICS_PERIOD_S, says that nothing is left."""
    host_and_port = f"127.0.0.1:{server.http_port if kind is Http else server.grpc_port}"
    with streaming_clients(kind, host_and_port) as processes:
        before = await_backend(server, lambda numbers: numbers.inflight == KILLED_STREAMS, PATIENCE_S)
        began = time.monotonic()
        for process in processes:
            process.kill()
        after = await_backend(server, lambda numbers: not numbers.inflight and not numbers.in_engine, PATIENCE_S)
        seconds = time.monotonic() - began
    counts = {
        "in flight before": Counter([f"{before.inflight:.0f}"]),
        "left in the end": Counter([f"{after.left:.0f}"]),
    }
    name = "SIGKILL of the clients to an empty engine and backend"
    return Sample(seconds={name: None if after.left else seconds}, counts=counts)


def told_to_exit(log: Path) -> Sample:
    """From SIGTERM."""
    told: list[float] = []
    with serving("simulated", log, drain_s=DRAIN_S, engine_options=_REAL_PACE) as server:

        def tell() -> None:
            told.append(time.monotonic())
            server.request_stop()

        answers = asyncio.run(open_both(server, tell))
        ended = await_exit(server, PATIENCE_S)
        code = exit_code(server)
    seconds = {
        "SIGTERM to the last answer": max(answer.ended_s for answer in answers) - told[0],
        "SIGTERM to tritonserver's exit": ended and ended - told[0],
    }
    with_text = sum(answer.num_chars > 0 for answer in answers)
    counts = {
        "answers": outcomes(answers),
        "of them with text": Counter([str(with_text)]),
        "tritonserver's exit code": Counter([str(code)]),
    }
    return Sample(seconds=seconds, counts=counts, answers=answers)


def repeated(fault: Callable[[Path], Sample]) -> Callable[[Path, int], Iterator[Sample]]:
    """With a server of its own for each repetition."""

    def samples(log: Path, repetitions: int) -> Iterator[Sample]:
        for _ in range(repetitions):
            yield fault(log)

    return samples


def killed_repeatedly(kind: type[Http] | type[Grpc]) -> Callable[[Path, int], Iterator[Sample]]:
    """All on one server: what one repetition left would show in the next."""

    def samples(log: Path, repetitions: int) -> Iterator[Sample]:
        with serving("simulated", log, engine_options=_DEPLOYMENT_PACE, metrics_period_s=METRICS_PERIOD_S) as server:
            for _ in range(repetitions):
                yield killed_clients(server, kind)
            began = time.monotonic()
            server.request_stop()
            ended = await_exit(server, PATIENCE_S)
            seconds = {"SIGTERM afterwards to tritonserver's exit": ended and ended - began}
            yield Sample(seconds=seconds, counts={"tritonserver's exit code": Counter([str(exit_code(server))])})

    return samples


FAULTS = {
    "death": repeated(lambda log: engine_death(log, "exit")),
    "unready": repeated(lambda log: engine_death(log, "unready")),
    "kill-grpc": killed_repeatedly(Grpc),
    "kill-http": killed_repeatedly(Http),
    "sigterm": repeated(told_to_exit),
}


def measure(name: str, arguments: argparse.Namespace) -> list[Sample]:
    samples = []
    with (arguments.out / f"{name}.jsonl").open("w", encoding="utf-8") as file:
        for sample in FAULTS[name](arguments.out / f"{name}.log", arguments.repetitions):
            samples.append(sample)
            file.write(json.dumps(sample, default=vars) + "\n")
            file.flush()
    return samples


def print_table(name: str, samples: list[Sample]) -> None:
    print(f"\n{name:56} {'median':>8} {'least':>8} {'most':>8} {'times':>6}")
    for label in dict.fromkeys(label for sample in samples for label in sample.seconds):
        values = [sample.seconds[label] for sample in samples if label in sample.seconds]
        known = [value for value in values if value is not None]
        times = "".join(f" {of(known):6.2f} s" for of in (median, min, max)) if known else " " * 27
        print(f"  {label:54}{times} {len(known):6}" + (f"  and {len(values) - len(known)} never" * (known != values)))
    for label in dict.fromkeys(label for sample in samples for label in sample.counts):
        total = sum((sample.counts.get(label, Counter()) for sample in samples), Counter[str]())
        print(f"  {label:54} " + ", ".join(f"{value} ({count}x)" for value, count in total.most_common()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=FAULTS, default=list(FAULTS), metavar="FAULT")
    parser.add_argument("--repetitions", type=int, default=5, metavar="N", help="of each fault (default: 5)")
    parser.add_argument("--out", type=Path, help="a new folder for raw samples (default: one in ~/.cache)")
    arguments = parser.parse_args()
    arguments.out = arguments.out or default_folder("faults")
    arguments.out.mkdir(parents=True)
    print(f"{arguments.repetitions} repetitions; raw samples in {arguments.out}", flush=True)
    for name in arguments.only:
        print_table(name, measure(name, arguments))


if __name__ == "__main__":
    main()
