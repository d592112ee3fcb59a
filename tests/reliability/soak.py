"""A soak: many mixed requests on real tritonservers and gateways, each with a history that a program checks.

    python tests/reliability/soak.py [--jobs N | --minutes M] [--engine simulated|trtllm] [--seed S] [--out FOLDER]

A tritonserver has a gateway before it; a context and a generation server have another. Client processes ask all of
them, over HTTP, gRPC and OpenAI's API, what jobs.py makes of the seed. checker.py judges what they saw. Beside that, no
server may hold anything at the end, what the servers counted must be what the clients saw, and no process may grow
from the second quarter of the run to the last: memory, descriptors, threads, shared memory. Exits with 1 otherwise.

Writes the verdict to tests/reliability/records/ with --record. Raw: clients/N.jsonl.gz has every request,
resources.jsonl what the processes held, *.log the logs. Run by hand from the repository's root.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "model_repository" / "tensorrt_llm" / "1"))
sys.path.insert(0, str(Path(__file__).parents[1]))

from bench._served import Backend, await_backend, await_exit, default_folder, exit_code, metrics_client
from reliability.checker import Verdict, check_history
from reliability.exchanges import Exchanges
from reliability.history import Record, read_records
from reliability.jobs import GENERATION, SERVER, Asked, Job, make_job
from reliability.run_record import write_run_record
from reliability.system_under_test import SystemUnderTest, resources, running_system

from deepseek_triton_tools.server.server_process import ServerProcess

_SETTLE_S = 120.0
_EXIT_S = 60.0
_SAMPLE_S = 1.0
_MOST_REFUSED = 0.2
_WARM_S = 120.0
"""A shorter run says nothing about growth."""
_GROWTH = {"anonymous": 8.0, "threads": 4.0, "descriptors": 16.0, "shared": 1.0}
"""Largest growth of a process from the second quarter of the run to the last: MiB, or a number."""


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


def client_process(share: ClientShare, progress: Any, stop: Any = None) -> None:
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
                if number >= share.end or is_over or (stop is not None and stop.is_set()):
                    return
                progress[share.first] = begun + 1
                made = await run_job(exchanges, make_job(share.seed, number, share.engine))
                for record in made:
                    records.write(record.as_line() + "\n")
                if any(
                    record.lost for record in made
                ):  # who is refused a connection would ask a thousand times a second
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
            record.lost, record.ended_s = "not asked: the context server handed nothing over", record.began_s
        else:
            await exchanges.ask(handed_on(asked, records[0]), record)
    return records


def handed_on(asked: Asked, first: Record) -> Asked:
    """Return the request with what the context server handed over, where it is the second leg."""
    if asked.target != GENERATION:
        return asked
    return replace(asked, body={**asked.body, "context_phase_params": first.handover})


@contextmanager
def clients(
    arguments: argparse.Namespace, system: SystemUnderTest, until_s: float | None
) -> Iterator[tuple[list[Any], Any]]:
    """Yield the client processes, started, and their progress. Those that still run at the end are killed."""
    spawn = multiprocessing.get_context("spawn")
    progress = spawn.Array("q", arguments.clients, lock=False)
    folder = arguments.out / "clients"
    folder.mkdir(parents=True)
    processes = []
    for first in range(arguments.clients):
        share = ClientShare(
            urls=system.urls,
            grpc_address=system.grpc_address,
            models=system.models,
            engine=arguments.engine,
            seed=arguments.seed,
            first=first,
            step=arguments.clients,
            end=arguments.jobs,
            until_s=until_s,
            concurrency=arguments.concurrency,
            records=folder / f"{first}.jsonl.gz",
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


def watch(arguments: argparse.Namespace, system: SystemUnderTest) -> tuple[list[dict[str, Any]], int]:
    """Run the clients to their end. Return the samples of what the processes held, and the number of jobs done."""
    began = time.monotonic()
    until_s = None if arguments.minutes is None else began + 60 * arguments.minutes
    samples: list[dict[str, Any]] = []
    with (
        clients(arguments, system, until_s) as (processes, progress),
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
    # Where time ends the run, the clients stop at different jobs; those without a gap count.
    return samples, sum(progress)


def _show_progress(sample: Mapping[str, Any], arguments: argparse.Namespace, number: int) -> None:
    line = f"{sample['done']:9,} jobs  {sample['seconds']:6.0f} s  {sample['done'] / sample['seconds']:6.0f} /s"
    if sys.stdout.isatty():
        print(f"\r{line}", end="", flush=True)
    elif number % 30 == 0:
        print(line, flush=True)


def growth(samples: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, dict[str, float]]:
    """Return how much each process grew from the second quarter of the run's time to the last; nothing for a run that
    is too short to tell."""
    end = samples[-1]["seconds"]
    if end < _WARM_S:
        return {}
    second = [sample for sample in samples if 0.25 * end <= sample["seconds"] < 0.5 * end]
    last = [sample for sample in samples if sample["seconds"] >= 0.75 * end]
    found = {}
    for name in names:
        found[name] = {
            what: mean(sample[name][what] for sample in last) - mean(sample[name][what] for sample in second)
            for what in _GROWTH
        }
    return found


def settled(servers: Mapping[str, ServerProcess]) -> dict[str, Backend]:
    """Return each server's numbers once it has nothing left, or after a while."""
    time.sleep(2.5)  # what is published at first may be from before the last answer
    return {
        name: await_backend(server, lambda numbers: numbers.left == 0, _SETTLE_S) for name, server in servers.items()
    }


def generated_tokens(server: ServerProcess) -> float:
    with metrics_client() as client:
        text = client.get(server.metrics_url).text
    lines = [line for line in text.splitlines() if line.startswith("deepseek_triton_generated_tokens_total")]
    return sum(float(line.split()[-1]) for line in lines)


def judge(
    verdict: Verdict, backends: Mapping[str, Backend], grown: Mapping[str, Mapping[str, float]], tokens: float
) -> None:
    """Add to the verdict what the servers themselves show."""
    for name, backend in backends.items():
        if backend.left:
            verdict.add(f"{name}: {backend.left:.0f} requests are left in it")
    for name, parts in grown.items():
        for what, limit in _GROWTH.items():
            if parts[what] > limit:
                verdict.add(f"{name}: {what} grew by {parts[what]:.1f}, at most {limit:g} is allowed")
    if verdict.refused_share > _MOST_REFUSED:
        verdict.add(f"{verdict.refused_share:.0%} of the requests were refusals, at most {_MOST_REFUSED:.0%} count")
    if not verdict.server_tokens <= tokens:
        verdict.add(f"{SERVER}: it counted {tokens:,.0f} tokens, its answers have {verdict.server_tokens:,}")


def stop_servers(system: SystemUnderTest, verdict: Verdict) -> None:
    system.stop_gateways()
    for server in system.servers.values():
        server.request_stop()
    for name, server in system.servers.items():
        if await_exit(server, _EXIT_S) is None or exit_code(server) != 0:
            verdict.add(f"{name}: tritonserver ended with {exit_code(server)} after SIGTERM, expected 0")


def run(arguments: argparse.Namespace) -> int:
    began = time.monotonic()
    with running_system(arguments.engine, arguments.out) as system:
        samples, num_jobs = watch(arguments, system)
        (arguments.out / "run.json").write_text(
            json.dumps({"seed": arguments.seed, "engine": arguments.engine, "jobs": num_jobs}) + "\n"
        )
        seconds = samples[-1]["seconds"]
        print(f"\n{num_jobs:,} jobs in {seconds:.0f} s; checking", flush=True)
        verdict = check_history(read_records(arguments.out / "clients"), arguments.seed, arguments.engine, num_jobs)
        backends = settled(system.servers)
        grown = growth(samples, list(system.pids))
        judge(verdict, backends, grown, generated_tokens(system.servers[SERVER]))
        stop_servers(system, verdict)
    for name in system.urls:
        log = (arguments.out / f"{name}.log").read_text(errors="replace")
        if found := log.count("Traceback (most recent call last)"):
            verdict.add(f"{name}: its log has {found} tracebacks")
    print(verdict.table())
    _print_growth(samples, grown)
    print(
        f"{verdict.num_requests:,} requests, {verdict.refused_share:.1%} refused, {verdict.num_violations} violations"
    )
    for violation in verdict.violations:
        print(f"  {violation}")
    if arguments.record:
        write_run_record(
            "soak",
            {
                "engine": arguments.engine,
                "seed": arguments.seed,
                "jobs": num_jobs,
                "requests": verdict.num_requests,
                "refused": verdict.num_refused,
                "seconds": round(seconds),
                "seconds_with_checks": round(time.monotonic() - began),
                "violations": verdict.num_violations,
                "first_violations": verdict.violations,
                "outcomes": _outcomes(verdict),
                "growth": {name: {what: round(by, 2) for what, by in parts.items()} for name, parts in grown.items()},
            },
        )
    return int(verdict.num_violations > 0)


def _outcomes(verdict: Verdict) -> dict[str, dict[str, int]]:
    by_kind: dict[str, Counter[str]] = {}
    for (kind, protocol, outcome), count in sorted(verdict.outcomes.items()):
        by_kind.setdefault(f"{kind}, {protocol}", Counter())[outcome] += count
    return {kind: dict(counts) for kind, counts in by_kind.items()}


def _print_growth(samples: Sequence[Mapping[str, Any]], grown: Mapping[str, Mapping[str, float]]) -> None:
    if not grown:
        print("\ntoo short a run to say anything about growth")
        return
    print(f"\n{'growth, 2nd to last quarter':28} {'anonymous':>12} {'threads':>9} {'descriptors':>12} {'shared':>11}")
    for name, parts in grown.items():
        print(
            f"{name:28} {parts['anonymous']:8.2f} MiB {parts['threads']:9.1f} {parts['descriptors']:12.1f} "
            f"{parts['shared']:7.2f} MiB   of {samples[-1][name]['anonymous']:.0f} MiB"
        )


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
