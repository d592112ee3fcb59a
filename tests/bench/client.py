"""What the client costs beside the libraries it stands on, and beside Triton's own client for HTTP.

    python tests/bench/client.py [--case NAME ...] [--contender NAME ...] [--rounds N] [--output FOLDER]

One tritonserver with the simulated engine. Each run is one contender in a process of its own: its library imported, its
connections open and warm before the clock starts. Contenders come one after the other, in another order every round.
CPU time is that of the contender's process, with all its threads; chunks are counted on every side, for a response with
text is what costs, and how many there are is up to the server.

`generate` of AsyncClient and Client over HTTP is a stream underneath, so that the server sees who has left; the raw
libraries ask /generate. tritonclient.http has one public way to a text, infer(), which Triton refuses on a decoupled
model: it asks a twin of the same backend and engine that is not decoupled.

Case `import` is the time of an import in a fresh interpreter.

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
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[2] / "model_repository" / "tensorrt_llm" / "1"))
sys.path.insert(0, str(Path(__file__).parents[1]))

from bench._harness import ChildFailed, all_met, medians, verdicts
from bench._served import default_folder
from bench.client_load import imports
from bench.client_load.cases import CASES, OURS, Case
from bench.client_load.contenders import CONTENDERS
from bench.client_load.driving import run
from bench.client_load.measures import LEGEND, TABLE, Sample, beside_raw, measure
from bench.client_load.serving import serving_all

from deepseek_triton_tools.server.server_process import ServerProcess

Samples = dict[str, dict[str, list[Sample]]]
"""Case -> contender -> its runs."""

IMPORT = "import"
_IMPORTS_A_ROUND = 5
_PACKAGES = ("h11", "httpx", "grpcio", "tritonclient")


def _parse_arguments() -> argparse.Namespace:
    lines = [f"  {case.name:12} {case.title}" for case in CASES.values()]
    epilog = "\n".join(["cases:", *lines, f"  {IMPORT:12} in fresh interpreters", "", "contenders:"])
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="\n".join([epilog, *(f"  {name}" for name in CONTENDERS)]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [*CASES, IMPORT]
    parser.add_argument("--case", action="append", choices=names, metavar="NAME", help="again for more (default: all)")
    parser.add_argument(
        "--contender", action="append", choices=CONTENDERS, metavar="NAME", help="again for more (default: all)"
    )
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="of every case (default: 5)")
    parser.add_argument("--seed", type=int, default=1, help="decides the orders (default: 1)")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="a new one (default: one in ~/.cache)")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error("--rounds is to be at least 1")
    arguments.case = arguments.case or names
    arguments.output = arguments.output or default_folder("client")
    arguments.output.mkdir(parents=True)
    return arguments


def _run_cases(arguments: argparse.Namespace, chance: random.Random) -> Samples:
    cases = [case for name, case in CASES.items() if name in arguments.case]
    found: Samples = {case.name: {} for case in cases}
    if not cases:
        return found
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


def _print_medians(found: Samples, milliseconds: dict[str, float]) -> bool:
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
    if milliseconds:
        print("\nimport, in a fresh interpreter")
        print("\n".join(f"{name:29}{number:8.1f} ms" for name, number in milliseconds.items()))
        by_name = {name: {"ms": number} for name, number in milliseconds.items()}
        judged += [(f"import, {line}", met) for line, met in verdicts(imports.TARGETS, by_name)]
    print("\ntargets, by the medians")
    print("\n".join(line for line, _ in judged))
    return all_met(judged)


def main() -> int:
    arguments = _parse_arguments()
    versions = ", ".join(f"{name} {version(name)}" for name in _PACKAGES)
    print(f"Python {platform.python_version()}, {os.cpu_count()} cores; {versions}; raw samples in {arguments.output}")
    print(LEGEND, flush=True)
    chance = random.Random(arguments.seed)
    milliseconds = {}
    if IMPORT in arguments.case:
        milliseconds = imports.sample(arguments.rounds * _IMPORTS_A_ROUND, chance)
    found = _run_cases(arguments, chance)
    document = {"cases": found, "import_ms": milliseconds}
    (arguments.output / "samples.json").write_text(json.dumps(document, default=asdict, indent=1))
    print(f"\n\nmedians of {arguments.rounds} rounds")
    return 0 if _print_medians(found, {name: median(each) for name, each in milliseconds.items()}) else 1


if __name__ == "__main__":
    sys.exit(main())
