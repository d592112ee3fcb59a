"""A soak: many mixed requests on real tritonservers and gateways, each with a history that a program checks.

    python tests/reliability/soak.py [--jobs N | --minutes M] [--engine simulated|trtllm] [--seed S] [--out FOLDER]

A tritonserver has a gateway before it; a context and a generation server have another. Client processes ask all of
them, over HTTP, gRPC and OpenAI's API, what jobs.py makes of the seed. checker.py judges what they saw. Beside that, no
server may hold anything at the end, what the servers counted must be what the clients saw, and no process may grow
from the second quarter of the run to the last: memory, descriptors, threads, shared memory. Exits with 1 otherwise.

With the kernel's usual queues, tritonserver loses ends of HTTP streams (docs/tritonserver.md, "HTTP streams under
load"). They are made longer first, as far as this user may. With long ones a lost end is a violation, with short ones
one in 100,000 may be. The verdict names their length.

Writes the verdict to tests/reliability/records/ with --record. Raw: clients/N.jsonl.gz has every request,
resources.jsonl what the processes held, *.log the logs. Run by hand from the repository's root.
"""

import argparse
import asyncio
import gzip
import json
import multiprocessing
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "model_repository" / "tensorrt_llm" / "1"))
sys.path.insert(0, str(Path(__file__).parents[1]))

from bench._served import await_backend, await_exit, default_folder, metrics_client

from deepseek_triton_tools.server.server_process import ServerProcess
from reliability.exchanges import Exchanges
from reliability.history import NOT_ASKED, Record
from reliability.jobs import GENERATION, SERVER, Asked, Job, make_job
from reliability.run_verdict import judge
from reliability.system_under_test import SystemUnderTest, resources, running_system

_SETTLE_S = 120.0
_EXIT_S = 60.0
_SAMPLE_S = 1.0


@dataclass(frozen=True, kw_only=True)
class ClientShare:
    """What one client process does: the jobs first, first + step, and so on below `end`, until `until_s`."""

    urls: Mapping[str, str]
    grpc_address: str
    models: Mapping[str, str]
    engine: str
    seed: int
    first: int
    step: int
    end: int
    until_s: float | None
    """By time.monotonic()."""
    concurrency: int
    records: Path


def client_process(share: ClientShare, progress: Any, stop: Any) -> None:
    """`progress` is shared by all client processes: how many jobs each has begun. Once the event `stop` is set, none
    begins."""
    asyncio.run(_run_share(share, progress, stop))


async def _run_share(share: ClientShare, progress: Any, stop: Any) -> None:
    exchanges = Exchanges(share.urls, share.grpc_address, share.models)
    with gzip.open(share.records, "wt", compresslevel=1, encoding="utf-8") as records:

        async def work() -> None:
            while True:
                begun = progress[share.first]
                number = share.first + begun * share.step
                is_over = share.until_s is not None and time.monotonic() > share.until_s
                if number >= share.end or is_over or stop.is_set():
                    return
                progress[share.first] = begun + 1
                made = await run_job(exchanges, make_job(share.seed, number, share.engine))
                for record in made:
                    records.write(record.as_line() + "\n")
                if any(record.lost for record in made):  # else who is refused would ask a thousand times a second
                    await asyncio.sleep(0.2)

        await asyncio.gather(*(work() for _ in range(share.concurrency)))
    await exchanges.close()


async def run_job(exchanges: Exchanges, job: Job) -> list[Record]:
    """Make a job's requests, each after the one before, or the second while the first runs."""
    records = [Record(job=job.number, part=part) for part in range(len(job.asked))]
    if job.stops_after_s is not None:
        stopping: list[asyncio.Task[None]] = []

        async def stop() -> None:
            await asyncio.sleep(job.stops_after_s or 0)
            await exchanges.ask(job.asked[1], records[1])

        await exchanges.ask(job.asked[0], records[0], lambda: stopping.append(asyncio.create_task(stop())))
        await asyncio.gather(*(stopping or [asyncio.create_task(stop())]))
        return records
    for asked, record in zip(job.asked, records, strict=True):
        record.began_s = time.monotonic()
        if asked.target == GENERATION and not records[0].handover:
            record.lost, record.ended_s = f"{NOT_ASKED}: the context server handed nothing over", record.began_s
        else:
            await exchanges.ask(handed_on(asked, records[0]), record)
    return records


def handed_on(asked: Asked, first: Record) -> Asked:
    """Return the request with what the context server handed over, where it is the second leg."""
    if asked.target != GENERATION:
        return asked
    return replace(asked, body={**asked.body, "context_phase_params": first.handover})


@contextmanager
def client_processes(shares: Sequence[ClientShare]) -> Iterator[tuple[list[Any], Any, Any]]:
    """Yield a started process for each share, how many jobs each has begun, and an event after which none begins. Those
    that still run at the end are killed."""
    spawn = multiprocessing.get_context("spawn")
    progress, stop = spawn.Array("q", len(shares), lock=False), spawn.Event()
    processes = [spawn.Process(target=client_process, args=(share, progress, stop), daemon=True) for share in shares]
    shares[0].records.parent.mkdir(parents=True)
    for process in processes:
        process.start()
    try:
        yield processes, progress, stop
    finally:
        for process in processes:
            process.kill()
            process.join()


def watch(arguments: argparse.Namespace, system: SystemUnderTest) -> tuple[list[dict[str, Any]], list[int]]:
    """Run the clients to their end. Return the samples of what the processes held, and each client's number of jobs."""
    began = time.monotonic()
    until_s = None if arguments.minutes is None else began + 60 * arguments.minutes
    shares = [
        ClientShare(
            urls=system.urls, grpc_address=system.grpc_address, models=system.models, engine=arguments.engine,
            seed=arguments.seed, first=first, step=arguments.clients, end=arguments.jobs, until_s=until_s,
            concurrency=arguments.concurrency, records=arguments.out / "clients" / f"{first}.jsonl.gz",
        )
        for first in range(arguments.clients)
    ]  # fmt: skip
    samples: list[dict[str, Any]] = []
    with (
        client_processes(shares) as (processes, progress, _),
        (arguments.out / "resources.jsonl").open("w", encoding="utf-8") as file,
    ):
        while running := [process for process in processes if process.is_alive()]:
            running[0].join(_SAMPLE_S)
            sample: dict[str, Any] = {"seconds": time.monotonic() - began, "done": sum(progress)}
            try:
                sample |= {name: resources(pid) for name, pid in system.pids.items()}
            except OSError as error:
                raise SystemExit(f"\na process has ended: {error}; see the logs in {arguments.out}") from None
            samples.append(sample)
            file.write(json.dumps(sample) + "\n")
            _show_progress(sample, arguments, len(samples))
        codes = [process.exitcode for process in processes]
    if any(codes):
        raise SystemExit(f"client processes failed, exit codes {codes}")
    return samples, list(progress)


def _show_progress(sample: Mapping[str, Any], arguments: argparse.Namespace, number: int) -> None:
    line = f"{sample['done']:9,} jobs  {sample['seconds']:6.0f} s  {sample['done'] / sample['seconds']:6.0f} /s"
    if sys.stdout.isatty():
        print(f"\r{line}", end="", flush=True)
    elif number % 30 == 0:
        print(line, flush=True)


def settled(servers: Mapping[str, ServerProcess]) -> dict[str, float]:
    """Return how many requests each server has left, once that is none, or after a while."""
    time.sleep(2.5)  # what is published at first may be from before the last answer
    backends = {
        name: await_backend(server, lambda numbers: numbers.left == 0, _SETTLE_S) for name, server in servers.items()
    }
    return {name: backend.left for name, backend in backends.items()}


def generated_tokens(server: ServerProcess) -> float:
    with metrics_client() as client:
        text = client.get(server.metrics_url).text
    lines = [line for line in text.splitlines() if line.startswith("deepseek_triton_generated_tokens_total")]
    return sum(float(line.split()[-1]) for line in lines)


def stop_servers(system: SystemUnderTest) -> dict[str, int | None]:
    """Stop everything, and return the servers' exit codes as a shell has them; None for one that did not end."""
    system.stop_gateways()
    for server in system.servers.values():
        server.request_stop()
    return {
        name: None if await_exit(server, _EXIT_S) is None else server.returncode
        for name, server in system.servers.items()
    }


def run(arguments: argparse.Namespace) -> int:
    with running_system(arguments.engine, arguments.out) as system:
        samples, jobs = watch(arguments, system)
        print(f"\n{sum(jobs):,} jobs in {samples[-1]['seconds']:.0f} s; checking", flush=True)
        facts = {
            "seed": arguments.seed,
            "engine": arguments.engine,
            "jobs": jobs,
            "seconds": round(samples[-1]["seconds"]),
            "send_buffer_bytes": system.send_buffer_bytes,
            "left": settled(system.servers),
            "counted_tokens": generated_tokens(system.servers[SERVER]),
            "exit_codes": stop_servers(system),
        }
    (arguments.out / "run.json").write_text(json.dumps(facts) + "\n")
    return judge(arguments.out, record=arguments.record)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=10_000_000, help="end after so many; some are two requests")
    parser.add_argument("--minutes", type=float, help="end after so long")
    parser.add_argument("--engine", choices=("simulated", "trtllm"), default="simulated", help="trtllm: the stand-in")
    parser.add_argument("--clients", type=int, default=2, metavar="N", help="client processes (default: 2)")
    parser.add_argument("--concurrency", type=int, default=32, metavar="N", help="jobs of each at a time (default: 32)")
    parser.add_argument("--seed", type=int, default=1, help="decides every request (default: 1)")
    parser.add_argument("--record", action="store_true", help="write the verdict to tests/reliability/records/")
    parser.add_argument("--out", type=Path, help="a new folder for raw samples (default: one in ~/.cache)")
    arguments = parser.parse_args(argv)
    if arguments.minutes is None and arguments.jobs == parser.get_default("jobs"):
        arguments.jobs = 20_000
    arguments.out = arguments.out or default_folder("soak")
    arguments.out.mkdir(parents=True)
    return arguments


if __name__ == "__main__":
    parsed = parse_arguments()
    print(
        f"{parsed.engine}, seed {parsed.seed}, {parsed.clients} x {parsed.concurrency}; raw: {parsed.out}", flush=True
    )
    sys.exit(run(parsed))
