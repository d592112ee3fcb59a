"""Requests opened and left at random, by the thousand, in the client's four corners: nothing stays behind.

    python tests/bench/abandon.py [--streams N] [--corner NAME ...] [--output FOLDER]

Each corner (AsyncClient and Client, over gRPC and HTTP) is a process of its own, and they come one after the other on
one real tritonserver. Requests are left before their first chunk, after some, by an exception, by a
cancellation or an interrupt at any moment, by a time limit, by forgetting the stream; some are read to their end. Those
that are left would run for minutes.

Afterwards the backend must have nothing in flight, and the process no object of a request, no descriptor but those of
idle connections, no thread and no memory that grows from the second quarter of the requests to the last; and once
the client is closed, no descriptor and no thread more than before. Exits with 1 when one of these doesn't hold. Run by
hand from the repository's root. Raw samples: findings.json, and tritonserver.log.
"""

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "model_repository" / "tensorrt_llm" / "1"))
sys.path.insert(0, str(Path(__file__).parents[1]))

from bench._harness import children, receive
from bench._served import Backend, await_backend, default_folder, serving
from bench.abandon_load.leaving import Findings, Plan, leaving_process
from bench.abandon_load.stayed import Limits, problems, table

from deepseek_triton_tools.server.server_process import ServerProcess
from support.servers import url

CORNERS = {f"{scheme} {face}": (scheme, face) for scheme in ("grpc", "http") for face in ("async", "sync")}
TOKENS_PER_S = 100
"""Of each request: the simulator's pace without a preset."""
INTERRUPTS = 200
SETTLE_S = 30.0
PATIENCE_S = 3600.0


def leave(plans: list[Plan], within_s: float) -> list[Findings]:
    """What each found, all at once, each in a process of its own. Raises ChildFailed."""
    with children(leaving_process, plans) as pipes:
        return receive(pipes, within_s)


def num_interrupts(scheme: str, face: str, wanted: int) -> int:
    """None over gRPC: a signal's exception can come between a lock of grpcio's own and its `with` block, and then the
    whole channel stands still (grpcio 1.85)."""
    return wanted if (scheme, face) == ("http", "sync") else 0


def settled(server: ServerProcess) -> Backend:
    """The backend's numbers once it has nothing left, or after SETTLE_S."""
    return await_backend(server, lambda backend: backend.left == 0, SETTLE_S)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=10_000, metavar="N", help="of each corner (default: 10,000)")
    parser.add_argument("--corner", action="append", choices=CORNERS, metavar="NAME", help=f"of {', '.join(CORNERS)}")
    parser.add_argument("--concurrency", type=int, default=64, metavar="N", help="requests at a time (default: 64)")
    parser.add_argument("--seed", type=int, default=1, help="decides every request (default: 1)")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="a new one (default: one in ~/.cache)")
    arguments = parser.parse_args()
    arguments.output = arguments.output or default_folder("abandon")
    arguments.output.mkdir(parents=True)
    return arguments


def _run_corner(name: str, server: ServerProcess, arguments: argparse.Namespace) -> tuple[Findings, list[str]]:
    scheme, face = CORNERS[name]
    plan = Plan(
        url=url(server, scheme),
        face=face,
        num_streams=arguments.streams,
        concurrency=arguments.concurrency,
        seed=arguments.seed,
        num_interrupts=num_interrupts(scheme, face, INTERRUPTS),
        metrics_url=server.metrics_url,
        traced=True,
    )
    (found,) = leave([plan], PATIENCE_S)
    numbers = settled(server)
    print(f"\n{name}: {sum(found.outcomes.values()):,} requests\n{table(found)}")
    print(f"backend: accepted {numbers.accepted:,.0f}, finished {numbers.finished:,.0f}, left {numbers.left:.0f}")
    wrong = problems(found, Limits(idle_connections=arguments.concurrency))
    if numbers.left:
        wrong.append(f"the backend has {numbers.left:.0f} requests left")
    print("\n".join(f"  NOT OK: {each}" for each in wrong) or "  ok", flush=True)
    return found, wrong


def main() -> int:
    arguments = _parse_arguments()
    print(
        f"{arguments.streams:,} requests a corner, {arguments.concurrency} at a time, seed {arguments.seed};", end=" "
    )
    print(f"raw samples in {arguments.output}", flush=True)
    found = {}
    wrong = []
    log = arguments.output / "tritonserver.log"
    with serving("simulated", log, engine_options={"pace": "real"}) as server:
        # Of the clients: with many threads glibc has many heaps, and each of them grows to what it once needed.
        os.environ["MALLOC_ARENA_MAX"] = "1"
        for name in arguments.corner or CORNERS:
            found[name], of_corner = _run_corner(name, server, arguments)
            wrong += of_corner
            (arguments.output / "findings.json").write_text(json.dumps(found, default=asdict, indent=1))
    print(f"\n{'FAILED' if wrong else 'ok: nothing stays behind'}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
