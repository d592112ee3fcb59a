"""A soak: many mixed requests from several client processes on a real tritonserver, every one accounted for.

    python tests/bench/soak.py [--requests N] [--engine simulated|trtllm] [--out FOLDER]

Half over HTTP, half over gRPC: whole answers and streams, short and long, several prompts and n, stop strings, stopped
by another request's word, left by the client (HTTP after a chunk, gRPC at any time), deadlines, logprobs, chats and bad
input; which is decided by --seed. Each must have one end as its client sees it, nothing may be left in the backend, and
the memory of the stub, the process that runs the backend, must not grow from the second quarter of the requests to the
last. Exits with 1 when one of these doesn't hold. Run by hand from the repository's root.

Raw samples: clients/N.jsonl has every request, memory.jsonl the sampled memory, tritonserver.log the server's log.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "model_repository" / "tensorrt_llm" / "1"))
sys.path.insert(0, str(Path(__file__).parents[1]))

from bench._jobs import EXPECTED, LEAVING, STOPPED, make_request, stop_request
from bench._load import UNANSWERED, Answer, Connection, Grpc, Http, Request, ask
from bench._served import Backend, await_backend, await_exit, default_folder, exit_code, memory_mib, serving, stub_pid

from deepseek_triton_tools.server.server_process import ServerProcess

TOKENS_PER_S = 100
"""Of each request: the simulator's pace without a preset."""
SETTLE_S = 60.0
METRICS_PERIOD_S = 1.0
EXIT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one client process does: the jobs first, first + step, and so on below `end`."""

    http: str
    grpc: str
    seed: int
    first: int
    step: int
    end: int
    concurrency: int
    samples: Path


def client_process(share: Share, progress: Any) -> None:
    """`progress` is shared by all client processes, a number for each."""
    asyncio.run(_run_share(share, progress))


async def _run_share(share: Share, progress: Any) -> None:
    connections = (Http(share.http), Grpc(share.grpc))
    numbers = iter(range(share.first, share.end, share.step))
    with share.samples.open("w", encoding="utf-8") as samples:

        async def work() -> None:
            for number in numbers:
                for answer in await _do(share.seed, number, connections):
                    samples.write(answer.as_json() + "\n")
                progress[share.first] += 1

        await asyncio.gather(*(work() for _ in range(share.concurrency)))
    for connection in connections:
        await connection.close()


async def _do(seed: int, number: int, connections: Sequence[Connection]) -> list[Answer]:
    """One job: a request, or two where one stops the other."""
    request, chance = make_request(seed, number)
    connection = chance.choice(connections)
    if request.kind == LEAVING and connection.protocol == "gRPC" and chance.random() < 0.7:
        request = replace(request, leave_after_chunks=None, leave_after_s=chance.choice((0.001, chance.random())))
    if request.kind != STOPPED:
        return [await ask(connection, request)]
    stopper: list[asyncio.Task[Answer]] = []

    def stop_it() -> None:
        stopper.append(asyncio.create_task(_stop(chance.choice(connections), request, chance)))

    answer = await ask(connection, request, on_first=stop_it)
    return [answer, *await asyncio.gather(*stopper)]


async def _stop(connection: Connection, request: Request, chance: random.Random) -> Answer:
    await asyncio.sleep(chance.random())
    return await ask(connection, stop_request(request.request_id))


@contextmanager
def _clients(arguments: argparse.Namespace, server: ServerProcess) -> Iterator[tuple[list[Any], Any]]:
    """The client processes, started, and their progress. Those that still run at the end are ended."""
    spawn = multiprocessing.get_context("spawn")
    progress = spawn.Array("q", arguments.clients, lock=False)
    folder = arguments.out / "clients"
    folder.mkdir(parents=True)
    processes = []
    for first in range(arguments.clients):
        share = Share(
            http=f"127.0.0.1:{server.http_port}",
            grpc=f"127.0.0.1:{server.grpc_port}",
            seed=arguments.seed,
            first=first,
            step=arguments.clients,
            end=arguments.requests,
            concurrency=arguments.concurrency,
            samples=folder / f"{first}.jsonl",
        )
        processes.append(spawn.Process(target=client_process, args=(share, progress), daemon=True))
    for process in processes:
        process.start()
    try:
        yield processes, progress
    finally:
        for process in processes:
            process.kill()
            process.join()


def _watch(arguments: argparse.Namespace, server: ServerProcess) -> list[dict[str, Any]]:
    """Until the clients are done: sample memory every half second, and show how far they are."""
    assert server.pid is not None
    stub, began, samples = stub_pid(server), time.monotonic(), []
    with (
        _clients(arguments, server) as (processes, progress),
        (arguments.out / "memory.jsonl").open("w", encoding="utf-8") as file,
    ):
        while running := [process for process in processes if process.is_alive()]:
            running[0].join(0.5)
            done, seconds = sum(progress), time.monotonic() - began
            try:
                sample = {"seconds": seconds, "done": done, "stub": memory_mib(stub), "server": memory_mib(server.pid)}
            except (OSError, KeyError):
                raise SystemExit(f"\ntritonserver or its stub has ended: see {server.options.log_file}") from None
            samples.append(sample)
            file.write(json.dumps(sample) + "\n")
            _show_progress(sample, arguments.requests)
        codes = [process.exitcode for process in processes]
    print(f"\n{arguments.requests:,} jobs in {time.monotonic() - began:.0f} s", flush=True)
    if any(codes):
        raise SystemExit(f"client processes failed, exit codes {codes}")
    return samples


def _show_progress(sample: dict[str, Any], num_jobs: int) -> None:
    line = (
        f"{sample['done']:7,} of {num_jobs:,} jobs  {sample['seconds']:5.0f} s  stub {sample['stub']['rss']:6.1f} MiB"
    )
    if sys.stdout.isatty():
        print(f"\r{line}", end="", flush=True)
    elif int(2 * sample["seconds"]) % 60 == 0:  # about every half minute, into a file
        print(line, flush=True)


def _answers(folder: Path) -> list[dict[str, Any]]:
    lines = [line for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().splitlines()]
    return [json.loads(line) for line in lines]


def _print_outcomes(answers: list[dict[str, Any]]) -> tuple[int, int]:
    """The table; how many are unanswered, and how many ended as none of their kind should."""
    print(f"\n{'kind':22} {'HTTP':>7} {'gRPC':>7}  outcomes")
    unexpected = 0
    for kind, expected in EXPECTED.items():
        those = [answer for answer in answers if answer["kind"] == kind]
        protocols = Counter(answer["protocol"] for answer in those)
        outcomes = Counter(answer["outcome"] for answer in those)
        unexpected += sum(count for outcome, count in outcomes.items() if outcome not in expected)
        shown = ", ".join(
            f"{outcome} {count:,}{'' if outcome in expected else ' (!)'}" for outcome, count in outcomes.most_common()
        )
        print(f"{kind:22} {protocols['HTTP']:7,} {protocols['gRPC']:7,}  {shown}")
    unanswered = sum(answer["outcome"] in UNANSWERED for answer in answers)
    print(f"{len(answers):,} requests, {sum(answer['num_responses'] for answer in answers):,} responses;", end=" ")
    print(f"unanswered: {unanswered}; with an outcome that is not one of their kind's: {unexpected}")
    return unanswered, unexpected


def _settled(server: ServerProcess) -> Backend:
    """The backend's numbers once it has nothing left, or after SETTLE_S."""
    time.sleep(2 * METRICS_PERIOD_S)  # what is there at first may be from before the last answer
    numbers = await_backend(server, lambda backend: backend.left == 0, SETTLE_S)
    print(
        f"backend: accepted {numbers.accepted:,.0f}, finished {numbers.finished:,.0f}, refused {numbers.refused:,.0f}, "
        f"in flight {numbers.inflight:.0f}, in the engine {numbers.in_engine:.0f}; left: {numbers.left:.0f}"
    )
    return numbers


def _print_memory(samples: list[dict[str, Any]], num_jobs: int) -> float:
    """The table; what the stub has grown by, in MiB."""
    second = [sample for sample in samples if 0.25 * num_jobs <= sample["done"] < 0.5 * num_jobs]
    last = [sample for sample in samples if 0.75 * num_jobs <= sample["done"]]
    if not second or not last:
        raise SystemExit("too short a run to say anything about memory: ask for more --requests")
    print(f"\n{'resident memory, MiB':22} {'first':>8} {'2nd quarter':>12} {'last quarter':>13} {'growth':>8} {'%':>7}")
    growth = 0.0
    for process, part in (("server", "anon"), ("server", "rss"), ("stub", "anon"), ("stub", "rss")):  # judged: the last
        before, after = (mean(sample[process][part] for sample in those) for those in (second, last))
        growth = after - before
        first = samples[0][process][part]
        label = f"{process}, {'all' if part == 'rss' else 'anonymous'}"
        print(f"{label:22} {first:8.1f} {before:12.2f} {after:13.2f} {growth:8.2f} {100 * growth / before:7.2f}")
    return growth


def _stop_server(server: ServerProcess) -> None:
    began = time.monotonic()
    server.request_stop()
    ended = await_exit(server, EXIT_S)
    seconds = (ended or time.monotonic()) - began
    state = f"ended with {exit_code(server)}" if ended else "had not ended"
    print(f"tritonserver {state} {seconds:.1f} s after SIGTERM")


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000, help="jobs; one that stops another is not counted")
    parser.add_argument("--engine", choices=("simulated", "trtllm"), default="simulated", help="trtllm: the stand-in")
    parser.add_argument("--clients", type=int, default=4, metavar="N", help="client processes (default: 4)")
    parser.add_argument("--concurrency", type=int, default=12, metavar="N", help="jobs of each at a time (default: 12)")
    parser.add_argument("--seed", type=int, default=1, help="decides every request (default: 1)")
    parser.add_argument(
        "--max-growth-mib", type=float, default=8.0, metavar="MIB", help="most growth of the stub (default: 8)"
    )
    parser.add_argument("--out", type=Path, help="a new folder for raw samples (default: one in ~/.cache)")
    arguments = parser.parse_args()
    arguments.out = arguments.out or default_folder("soak")
    arguments.out.mkdir(parents=True)
    return arguments


def main() -> int:
    arguments = _parse_arguments()
    print(f"{arguments.engine} engine, seed {arguments.seed}, {arguments.clients} client processes with", end=" ")
    print(f"{arguments.concurrency} jobs at a time; raw samples in {arguments.out}", flush=True)
    os.environ["STANDIN_TOKENS_PER_S"] = str(TOKENS_PER_S)
    config: dict[str, Any] = {"metrics_period_s": METRICS_PERIOD_S}
    if arguments.engine == "simulated":
        config["engine_options"] = {"pace": "real"}
    log = arguments.out / "tritonserver.log"
    with serving(arguments.engine, log, **config) as server:
        samples = _watch(arguments, server)
        unanswered, unexpected = _print_outcomes(_answers(arguments.out / "clients"))
        left = _settled(server).left
        growth = _print_memory(samples, arguments.requests)
        _stop_server(server)
    print(f"tracebacks in its log: {log.read_text(errors='replace').count('Traceback')}")
    failed = unanswered or unexpected or left or growth > arguments.max_growth_mib
    print("FAILED" if failed else "ok: every request has one end, nothing is left, memory is level")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
