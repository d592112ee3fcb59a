"""Many streams at once on a real tritonserver: what reaches the clients, how late, and what it costs.

    python tests/bench/streams.py [--case NAME ...] [--system NAME ...] [--rounds N] [--peer MODEL] [--output FOLDER]

Clients are processes of their own that are ready before the clock starts, and do as little as they can for a response.
The engine writes into every token's text when it was made, so that a client sees each token's lag, and that all came,
in order. Systems, one after the other in every round:

    ours                the backend on the simulated engine
    minimal-delta       a decoupled model of a page (minimal/) on the same engine: a response a token, from one thread
    minimal-cumulative  the same with the whole text so far in each response
    engine              the simulated engine consumed in its own process: no server, no client
    trtllm-1, -10       the backend on the stand-in for TensorRT-LLM, with LLM argument stream_interval 1 or 10
    peer, peer-10       --peer on the same stand-in, likewise: a model folder with config.pbtxt and a 1/model.py that
                        uses the LLM API; it takes text_input, streaming and sampling_param_max_tokens, and answers
                        text_output, each response with the new text or with all so far

Chunks are a stream's responses with text. Their number says nothing of when they came: ours cuts a late answer into
five as well. The live ones came before the stream's last token was made; on the stand-in, where a token is a byte,
before the last whole stamp was.

Prints each run, then the medians of each case (of undelivered streams, the most) with the targets; those of a system
that did not run are not measured. Exits with 1 when one is not met, or none was measured. Run by hand from the
repository's root, with nothing else on the machine.

Raw samples: CASE/SYSTEM-ROUND/N.npz of each client (times in microseconds of CLOCK_MONOTONIC: opened_us, ended_us,
outcome, num_chunks and num_stamps of each stream; chunk_us, chunk_tokens of each response; stamp_us, stamp_arrival_us
of each token), tritonserver.log beside them, and runs.json with the measures of every run.
"""

import argparse
import json
import os
import platform
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "model_repository" / "tensorrt_llm" / "1"))
sys.path.insert(0, str(Path(__file__).parents[1]))

from bench._harness import all_met, medians, verdicts
from bench._served import default_folder
from bench.streams_load.cases import CASES, PEERS, Case
from bench.streams_load.driving import run
from bench.streams_load.measures import LEGEND, TABLE, undelivered
from bench.streams_load.serving import SYSTEMS

Runs = dict[str, list[dict[str, float]]]
"""System -> its runs."""


def _parse_arguments() -> argparse.Namespace:
    cases = "\n".join(f"  {case.name:18} {case.title}: {', '.join(case.systems)}" for case in CASES.values())
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=f"cases:\n{cases}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", action="append", choices=CASES, metavar="NAME", help="again for more (default: all)")
    parser.add_argument(
        "--system", action="append", choices=SYSTEMS, metavar="NAME", help="again for more (default: the case's)"
    )
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="of every case (default: 3)")
    parser.add_argument("--clients", type=int, default=2, metavar="N", help="client processes (default: 2)")
    parser.add_argument("--peer", type=Path, metavar="MODEL", help="folder of the peer's model")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="a new one (default: one in ~/.cache)")
    arguments = parser.parse_args()
    idle = [case.name for case in _cases(arguments) if not _systems(case, arguments)]
    if idle:
        parser.error(f"no --system given is one of the systems of: {', '.join(idle)}; those of peers take --peer")
    arguments.output = arguments.output or default_folder("streams")
    arguments.output.mkdir(parents=True)
    return arguments


def _cases(arguments: argparse.Namespace) -> list[Case]:
    return [CASES[name] for name in arguments.case or CASES]


def _systems(case: Case, arguments: argparse.Namespace) -> list[str]:
    return [
        system
        for system in case.systems
        if (system not in PEERS or arguments.peer) and (not arguments.system or system in arguments.system)
    ]


def _run_round(number: int, arguments: argparse.Namespace, found: dict[str, Runs]) -> None:
    for case in _cases(arguments):
        print(f"\nround {number}, {case.name}: {case.title}\n{TABLE.head()}", flush=True)
        for system in _systems(case, arguments):
            folder = arguments.output / case.name / f"{system}-{number}"
            measures = run(system, case, folder, num_clients=arguments.clients, peer=arguments.peer)
            found.setdefault(case.name, {}).setdefault(system, []).append(measures)
            print(TABLE.row(system, measures), flush=True)
            if measures.get("undelivered"):
                print("\n".join(undelivered(sorted(folder.glob("*.npz")))), flush=True)
        (arguments.output / "runs.json").write_text(json.dumps(found, indent=1))


def _print_medians(found: dict[str, Runs]) -> bool:
    """Whether all targets that were measured are met, and any was."""
    judged = []
    for name, runs in found.items():
        measured = {system: medians(of_system, most=["undelivered"]) for system, of_system in runs.items()}
        print(f"\n{name}: {CASES[name].title}\n{TABLE.head()}")
        for system, measures in measured.items():
            print(TABLE.row(system, measures))
        judged += (of_case := verdicts(CASES[name].targets, measured))
        print("\n".join(f"  {line}" for line, _ in of_case))
    return all_met(judged)


def main() -> int:
    arguments = _parse_arguments()
    print(f"Python {platform.python_version()}, {os.cpu_count()} cores; {arguments.clients} client processes;", end=" ")
    print(f"raw samples in {arguments.output}\n{LEGEND}", flush=True)
    found: dict[str, Runs] = {}
    for number in range(1, arguments.rounds + 1):
        _run_round(number, arguments, found)
    print(f"\n\nmedians of {arguments.rounds} rounds")
    return 0 if _print_medians(found) else 1


if __name__ == "__main__":
    sys.exit(main())
