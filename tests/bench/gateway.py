"""What a chunk costs in the gateway, and how much later it comes.

    python tests/bench/gateway.py [--case NAME ...] [--rounds N] [--output FILE]

Four systems, one after the other in every round, at the same pace:

    direct    a reader at the server itself: how late a chunk is without a gateway; its CPU is a raw reader's
    bare      uvicorn with prepared chunks from nowhere: what serving costs without reading
    gateway   deepseek-triton gateway, one worker, between the server and the reader
    grpc      the same, over gRPC to the server, which is itself 0.2 ms later there

The server is one that paces tokens and writes into each when it was made (gateway_load/paced_triton.py), because a
real one would cost more than what is measured. CPU is that of the process under test for a chunk; `bound` is bare plus
direct, which a gateway can't undercut. Prints each run, then the medians with the targets: CPU at most 1.3 times the
bound, and less than 1 ms later at the median. Run by hand from the repository's root, with nothing else on the machine.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import httpx

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS))

from support.supervising import free_ports  # noqa: E402

CHAT = '{"messages":[{"role":"user","content":"hi"}],"stream":true}'
TRITON = '{"text_input":"hi","streaming":true}'
_LOAD = "bench.gateway_load"
CPU_TARGET = 1.3
LAG_TARGET_US = 1000


@dataclass(frozen=True)
class Case:
    num_streams: int
    num_chunks: int
    period_s: float
    title: str


CASES = {
    "64": Case(64, 800, 0.012, "64 streams of 83 chunks a second"),
    "512": Case(512, 240, 0.050, "512 streams of 20 chunks a second"),
    "64-flat": Case(64, 5000, 0.0, "64 streams as fast as they are read"),
}


@dataclass(frozen=True)
class Run:
    """Lags in microseconds, CPU in microseconds a chunk."""

    cpu_us: float
    first_p50_us: float
    later_p50_us: float
    later_p99_us: float
    num_chunks: int


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=CASES, metavar="NAME", help=f"{', '.join(CASES)} (all)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="rounds of each case (default: 5)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write every run as JSON")
    args = parser.parse_args()
    results = {name: _measure(CASES[name], args.rounds) for name in args.case or CASES}
    if args.output:
        args.output.write_text(json.dumps(results, default=vars, indent=1) + "\n")
    met = [_summary(CASES[name], runs) for name, runs in results.items()]
    return int(not all(met))


def _measure(case: Case, rounds: int) -> list[dict[str, Run]]:
    with ExitStack() as stack:
        triton_port, bare_port, gateway_port, grpc_port, other_port = free_ports(5)
        pace = [str(case.num_chunks), str(case.period_s)]
        stack.enter_context(_process(["-m", f"{_LOAD}.paced_triton", str(triton_port), *pace, str(grpc_port)]))
        bare = stack.enter_context(_process(["-m", f"{_LOAD}.bare_server", str(bare_port), *pace]))
        triton = f"http://127.0.0.1:{triton_port}"
        gateways = []
        for server, port in ((triton, gateway_port), (f"grpc://127.0.0.1:{grpc_port}", other_port)):
            options = ["--server", server, "--metrics-port", "none", "--port", str(port)]
            command = ["-m", "deepseek_triton_tools.cli.main", "gateway", *options]
            gateways.append(stack.enter_context(_process(command)))
            _wait_for(f"http://127.0.0.1:{port}/ready")
        _wait_for(f"{triton}/v2/health/ready")
        time.sleep(1)
        targets = {
            "direct": (None, f"{triton}/v2/models/tensorrt_llm/generate_stream", TRITON),
            "bare": (bare, f"http://127.0.0.1:{bare_port}/v1/chat/completions", CHAT),
            "gateway": (gateways[0], f"http://127.0.0.1:{gateway_port}/v1/chat/completions", CHAT),
            "grpc": (gateways[1], f"http://127.0.0.1:{other_port}/v1/chat/completions", CHAT),
        }
        runs = []
        for index in range(rounds):
            runs.append({name: _run(case, *target) for name, target in targets.items()})
            print(f"{case.title}, round {index + 1}:", flush=True)
            for name, run in runs[-1].items():
                print(
                    f"  {name:8} {run.cpu_us:6.1f} us CPU a chunk; lag of the first {run.first_p50_us:8.0f} us, "
                    f"later p50 {run.later_p50_us:6.0f}, p99 {run.later_p99_us:6.0f} us; {run.num_chunks} chunks",
                    flush=True,
                )
        return runs


def _run(case: Case, process: subprocess.Popen[str] | None, url: str, body: str) -> Run:
    before_us = _cpu_us(process) if process else 0.0
    command = [sys.executable, "-m", f"{_LOAD}.reader", url, str(case.num_streams), "1.0", body]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=_environment())
    run = Run(**json.loads(done.stdout))
    return replace(run, cpu_us=(_cpu_us(process) - before_us) / run.num_chunks) if process else run


def _summary(case: Case, runs: list[dict[str, Run]]) -> bool:
    """Print the medians beside the targets, and return whether they are met."""

    def middle(system: str, measure: str) -> float:
        return median(float(getattr(run[system], measure)) for run in runs)

    bound = median(run["direct"].cpu_us + run["bare"].cpu_us for run in runs)
    ratios = sorted(run["gateway"].cpu_us / (run["direct"].cpu_us + run["bare"].cpu_us) for run in runs)
    over_grpc = median(run["grpc"].cpu_us / run["gateway"].cpu_us for run in runs)
    print(f"{case.title}: medians of {len(runs)} rounds")
    print(f"  CPU a chunk: gateway {middle('gateway', 'cpu_us'):.1f} us, bound {bound:.1f} us;")
    print(f"    over gRPC {middle('grpc', 'cpu_us'):.1f} us, {over_grpc:.1f} times as much;")
    print(f"    ratio {median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}), target {CPU_TARGET}")
    good = median(ratios) <= CPU_TARGET
    if case.period_s:
        for measure, name in (("first_p50_us", "first chunk"), ("later_p50_us", "later chunks")):
            added = median(getattr(run["gateway"], measure) - getattr(run["direct"], measure) for run in runs)
            print(f"  {name}: {added:.0f} us later than without a gateway, target {LAG_TARGET_US}")
            good = good and added < LAG_TARGET_US
    return good


@contextmanager
def _process(arguments: list[str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, *arguments], env=_environment(), text=True, stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(TESTS)}


def _wait_for(url: str) -> None:
    for _ in range(200):
        try:
            if httpx.get(url).status_code == 200:
                return
        except httpx.TransportError:
            pass  # it is starting
        time.sleep(0.1)
    raise SystemExit(f"{url} does not answer")


def _cpu_us(process: subprocess.Popen[str]) -> float:
    """CPU time of all threads of a process, in microseconds, by the scheduler's own count of nanoseconds."""
    tasks = Path(f"/proc/{process.pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1000


if __name__ == "__main__":
    sys.exit(main())
