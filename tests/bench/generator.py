"""How long the generator takes: plan and rules over the whole space, build and check of every distinct plan, one build.

    python tests/bench/generator.py [--runs 10] [--samples FILE]

The space is tests/support/space.py's. One `build` is measured as a process, from start to end, beside `python -c pass`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from support import space

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


PROGRAM = Path(sys.executable).parent / "deepseek-triton"


def plan_the_space() -> dict[str, Any]:
    started = time.perf_counter()
    answers = [space.plan_or_refusal(request) for request in space.all_requests()]
    took = time.perf_counter() - started
    accepted = [answer for answer in answers if isinstance(answer, space.Plan)]
    distinct = len(space.distinct_plans(accepted))
    return {"requests": len(answers), "accepted": len(accepted), "distinct": distinct, "plan_s": took}


def build_the_space(num_processes: int) -> dict[str, Any]:
    """Planning again is in it: each process starts from nothing."""
    script = Path(space.__file__)
    started = time.perf_counter()
    processes = [
        subprocess.Popen([sys.executable, script, "build", f"{number}/{num_processes}"], stdout=subprocess.PIPE)
        for number in range(num_processes)
    ]
    results = [json.loads(process.communicate()[0]) for process in processes]
    took = time.perf_counter() - started
    wrong = sum(len(result["wrong"]) for result in results)
    return {"processes": num_processes, "plans": sum(r["plans"] for r in results), "wrong": wrong, "build_s": took}


def one_build(runs: int) -> dict[str, list[float]]:
    """Seconds of each run, interleaved with those of an empty Python."""
    samples: dict[str, list[float]] = {"build": [], "python": []}
    with tempfile.TemporaryDirectory() as scratch:
        for run in range(runs):
            output = str(Path(scratch, str(run)))
            command = [PROGRAM, "build", "deepseek-r1", "--gpu", "h200", "--gpus", "8", "--output", output]
            samples["build"].append(_seconds(command))
            samples["python"].append(_seconds([sys.executable, "-c", "pass"]))
    return samples


def _seconds(command: list[Any]) -> float:
    started = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10, help="runs of one build (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=2, help="that build the space (default: %(default)s)")
    parser.add_argument("--samples", type=Path, help="write every figure here as JSON")
    args = parser.parse_args()
    planned, built, single = plan_the_space(), build_the_space(args.processes), one_build(args.runs)
    print(
        f"plan and rules: {planned['requests']:,} requests, {planned['accepted']:,} plans, "
        f"{planned['distinct']:,} of them distinct, in {planned['plan_s']:.1f} s"
    )
    print(f"build and check: {built['plans']:,} in {built['build_s']:.1f} s on {built['processes']} processes")
    print(f"what check finds wrong in them: {built['wrong']}")
    median = {name: statistics.median(samples) for name, samples in single.items()}
    print(f"one build: {median['build']:.3f} s, of which Python's own start {median['python']:.3f} s (median)")
    if args.samples:
        args.samples.write_text(json.dumps({"space": planned, "built": built, "one_build": single}, indent=2))


if __name__ == "__main__":
    main()
