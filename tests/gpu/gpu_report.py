"""Makes Markdown tables of the measurements: `python gpu_report.py runs.jsonl [--beside vllm_backend] > tables.md`.

A figure is the median over a system's rounds, with the smallest and the largest. Ratios compare the medians of `ours`
with those of the system given by --beside (default: engine); below 1.00x is less.
"""

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

COLUMNS = {
    "tokens/s": lambda run: run["tokens_per_second"],
    "TTFT p50 ms": lambda run: run["ttft_ms"]["p50"],
    "TTFT p99 ms": lambda run: run["ttft_ms"]["p99"],
    "ITL p50 ms": lambda run: run["itl_ms"]["p50"],
    "ITL p99 ms": lambda run: run["itl_ms"]["p99"],
    "TPOT p50 ms": lambda run: run["tpot_ms"]["p50"],
    "TPOT p99 ms": lambda run: run["tpot_ms"]["p99"],
    "CPU us/token": lambda run: front_cpu(run["cpu_us_per_token"]),
    "responses/token": lambda run: run["responses_per_token"],
}
RATIOS = ("tokens/s", "TTFT p50 ms", "ITL p50 ms", "ITL p99 ms", "TPOT p50 ms", "TPOT p99 ms", "CPU us/token")


def front_cpu(by_role: dict[str, float]) -> float:
    """CPU of what stands before the engine core: tritonserver and the stub, or the process with AsyncLLM."""
    return by_role["alone"] if "alone" in by_role else by_role["server"] + by_role["stub"]


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def _cell(values: Sequence[float]) -> str:
    middle = _number(median(values))
    return middle if len(values) == 1 else f"{middle} ({_number(min(values))}-{_number(max(values))})"


def _loads(runs: Iterable[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(run["load"] for run in runs))


def tables(runs: Sequence[dict[str, Any]]) -> Iterable[str]:
    """Yield the lines of a table for each load."""
    for load in _loads(runs):
        at_load = [run for run in runs if run["load"] == load]
        yield f"\n{load}:\n"
        yield f"| system | rounds | {' | '.join(COLUMNS)} |"
        yield f"| --- |{' ---: |' * (len(COLUMNS) + 1)}"
        for system in dict.fromkeys(run["system"] for run in at_load):
            of_system = [run for run in at_load if run["system"] == system]
            cells = [_cell([read(run) for run in of_system]) for read in COLUMNS.values()]
            errors = {error for run in of_system for error in run["errors"]}
            name = f"{system} (errors: {', '.join(sorted(errors))})" if errors else system
            yield f"| {name} | {len(of_system)} | {' | '.join(cells)} |"


def ratios(runs: Sequence[dict[str, Any]], ours: str, other: str) -> Iterable[str]:
    """Yield the lines of a table with a row for each load that both systems have."""
    yield f"\n{ours} / {other}:\n"
    yield f"| load | {' | '.join(RATIOS)} |"
    yield f"| --- |{' ---: |' * len(RATIOS)}"
    for load in _loads(runs):
        found = {
            system: [run for run in runs if run["load"] == load and run["system"] == system] for system in (ours, other)
        }
        if all(found.values()):
            cells = []
            for column in RATIOS:
                mine, its = (median(map(COLUMNS[column], found[system])) for system in (ours, other))
                cells.append(f"{mine / its:.2f}x" if its else "-")
            yield f"| {load} | {' | '.join(cells)} |"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Make Markdown tables of measurements.")
    parser.add_argument("runs", type=Path, metavar="FILE", help="runs.jsonl")
    parser.add_argument("--beside", action="append", metavar="SYSTEM", help="again for more (default: all others)")
    arguments = parser.parse_args(argv)
    runs = [json.loads(line) for line in arguments.runs.read_text(encoding="utf-8").splitlines()]
    systems = list(dict.fromkeys(run["system"] for run in runs))
    print("\n".join(tables(runs)))
    for other in arguments.beside or [system for system in systems if not system.startswith("ours")]:
        print("\n".join(ratios(runs, "ours-http" if other.endswith("-http") else "ours", other)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
