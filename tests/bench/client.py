"""What the client costs beside the libraries it stands on, and beside Triton's own client for HTTP.

    python tests/bench/client.py [--case NAME ...] [--contender NAME ...] [--rounds N] [--output FOLDER]

One tritonserver with the simulated engine. Each run is one contender in a process of its own: its library imported, its
connections open and warm before the clock starts. Contenders come one after the other, in another order every round.
CPU time is that of the contender's process, with all its threads; chunks are counted on every side, for a response with
text is what costs, and how many there are is up to the server.

`generate` of AsyncClient and Client over HTTP is a stream underneath, so that the server sees who has left; the raw
libraries ask /generate. tritonclient.http has one public way to a text, infer(), which Triton refuses on a decoupled
model: it asks a twin of the same backend and engine that is not decoupled.

Prints each run, then the medians with the targets. Exits with 1 when one is missed, or none was measured. Run by hand
from the repository's root, with nothing else on the machine. Raw samples: samples.json, and tritonserver.log.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import sys
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "model_repository" / "tensorrt_llm" / "1"))
sys.path.insert(0, str(Path(__file__).parents[1]))

from bench._harness import ChildFailed, all_met, medians, verdicts
from bench._served import default_folder
from bench.client_load.cases import CASES, OURS, Case
from bench.client_load.contenders import CONTENDERS
from bench.client_load.runs import LEGEND, TABLE, Sample, beside_raw, measure, run, serving_all

from deepseek_triton_tools.server.server_process import ServerProcess

Samples = dict[str, dict[str, list[Sample]]]
"""Case -> contender -> its runs."""

_PACKAGES = ("h11", "httpx", "grpcio", "tritonclient")


def _parse_arguments() -> argparse.Namespace:
    lines = [f"  {case.name:12} {case.title}" for case in CASES.values()]
    epilog = "\n".join(["cases:", *lines, "", "contenders:", *(f"  {name}" for name in CONTENDERS)])
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", action="append", choices=CASES, metavar="NAME", help="again for more (default: all)")
    parser.add_argument(
        "--contender", action="append", choices=CONTENDERS, metavar="NAME", help="again for more (default: all)"
    )
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="of every case (default: 5)")
    parser.add_argument("--seed", type=int, default=1, help="decides the orders (default: 1)")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="a new one (default: one in ~/.cache)")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error("--rounds is to be at least 1")
    arguments.output = arguments.output or default_folder("client")
    arguments.output.mkdir(parents=True)
    return arguments


def _run_cases(arguments: argparse.Namespace, chance: random.Random) -> Samples:
    cases = [CASES[name] for name in arguments.case or CASES]
    found: Samples = {case.name: {} for case in cases}
    with serving_all(arguments.output / "tritonserver.log") as server:
        for number in range(1, arguments.rounds + 1):
            for case in cases:
                _run_round(number, case, server, arguments, chance, found[case.name])
    return found


def _run_round(
    number: int,
    case: Case,
    server: ServerProcess,
    arguments: argparse.Namespace,
    chance: random.Random,
    found: dict[str, list[Sample]],
) -> None:
    load = ", ".join(f"{each:.2f}" for each in os.getloadavg())
    print(f"\nround {number}, {case.name}: {case.title}; load average {load}\n{TABLE.head()}", flush=True)
    contenders = [name for name in case.contenders if name in (arguments.contender or CONTENDERS)]
    for name in chance.sample(contenders, len(contenders)):
        try:
            sample = run(name, case, server)
        except ChildFailed as error:  # httpx.Client under 64 threads does now and then: a bad file descriptor
            if name in OURS:
                raise
            print(f"{name}: {error}", flush=True)
            continue
        found.setdefault(name, []).append(sample)
        print(TABLE.row(name, measure(sample)), flush=True)


def _print_medians(found: Samples) -> bool:
    """Whether all targets that were measured are met, and any was."""
    judged = []
    for case_name, samples in found.items():
        case = CASES[case_name]
        of_runs = {name: medians(list(map(measure, samples[name]))) for name in case.contenders if name in samples}
        measured = beside_raw(case, of_runs)
        print(f"\n{case.name}: {case.title}\n{TABLE.head()}")
        for name, measures in measured.items():
            print(TABLE.row(name, measures))
        judged += [(f"{case.name}, {line}", met) for line, met in verdicts(case.targets, measured)]
    print("\ntargets, by the medians")
    print("\n".join(line for line, _ in judged))
    return all_met(judged)


def main() -> int:
    arguments = _parse_arguments()
    versions = ", ".join(f"{name} {version(name)}" for name in _PACKAGES)
    print(f"Python {platform.python_version()}, {os.cpu_count()} cores; {versions}; raw samples in {arguments.output}")
    print(LEGEND, flush=True)
    found = _run_cases(arguments, random.Random(arguments.seed))
    (arguments.output / "samples.json").write_text(json.dumps(found, default=asdict, indent=1))
    print(f"\n\nmedians of {arguments.rounds} rounds")
    return 0 if _print_medians(found) else 1


if __name__ == "__main__":
    sys.exit(main())
