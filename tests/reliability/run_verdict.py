"""Judges what a soak has left, and writes the summaries of long runs to tests/reliability/records/."""

import json
import platform
import subprocess
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from deepseek_triton_tools._version import __version__
from reliability.checker import MOST_TORN, Verdict, check_history
from reliability.front_end_queues import LONG_BYTES
from reliability.history import read_records

RECORDS = Path(__file__).parent / "records"
_MOST_REFUSED = 0.2
_WARM_S = 120.0
"""A shorter run says nothing about growth."""
_GROWTH = {"anonymous": 8.0, "threads": 4.0, "descriptors": 16.0, "shared": 1.0}
"""Largest growth of a process from the second quarter of the run to the last: MiB, or a number."""


def write_run_record(kind: str, content: Mapping[str, Any], folder: Path = RECORDS) -> Path:
    """Write the summary of a run of a kind, such as "soak", and return its path."""
    root = Path(__file__).parents[2]
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=root, capture_output=True, text=True, check=False
    )
    document = {
        "kind": kind,
        "version": __version__,
        "commit": commit.stdout.strip() or "unknown",
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        **content,
    }
    folder.mkdir(parents=True, exist_ok=True)
    engine, seed = content.get("engine", "all"), content.get("seed", 0)
    path = folder / f"{kind}-{engine}-{seed}.json"
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def growth(samples: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return how much each process grew from the second quarter of the run's time to the last; nothing for a run that
    is too short to tell."""
    end = samples[-1]["seconds"]
    if end < _WARM_S:
        return {}
    second = [sample for sample in samples if 0.25 * end <= sample["seconds"] < 0.5 * end]
    last = [sample for sample in samples if sample["seconds"] >= 0.75 * end]
    names = [name for name, held in samples[0].items() if isinstance(held, dict)]
    return {
        name: {
            what: mean(sample[name][what] for sample in last) - mean(sample[name][what] for sample in second)
            for what in _GROWTH
        }
        for name in names
    }


def _judge_servers(verdict: Verdict, facts: Mapping[str, Any]) -> None:
    """Add what the servers themselves said at the end of the run."""
    for name, number in facts["left"].items():
        if number:
            verdict.add(f"{name}: {number:.0f} requests are left in it")
    if verdict.server_tokens > facts["counted_tokens"]:
        verdict.add(f"it counted {facts['counted_tokens']:,.0f} tokens, its answers have {verdict.server_tokens:,}")
    if facts["counted_tokens"] > (most := verdict.server_tokens + verdict.server_open_tokens):
        verdict.add(f"it counted {facts['counted_tokens']:,.0f} tokens, all who asked can have had {most:,}")
    for name, code in facts["exit_codes"].items():
        # A stream whose end Triton has lost is open for Triton, which then waits for it until the exit timeout.
        if code != 0 and not (code == 1 and verdict.torn[name]):
            verdict.add(f"{name}: tritonserver ended with {code} after SIGTERM, expected 0")


def add_tracebacks(verdict: Verdict, folder: Path) -> None:
    for log in sorted(folder.glob("*.log")):
        if found := log.read_text(errors="replace").count("Traceback (most recent call last)"):
            verdict.add(f"{log.name} has {found} tracebacks")


def add_torn(verdict: Verdict, send_buffer_bytes: int) -> None:
    """Add torn streams: any where the front end's queues are long, and more than few where Triton tears some."""
    most = 0 if send_buffer_bytes >= LONG_BYTES else max(1, MOST_TORN * verdict.num_requests)
    if verdict.num_torn > most:
        verdict.add(
            f"Triton tore {verdict.num_torn} streams, with queues of {send_buffer_bytes:,} bytes {most:.0f} may be"
        )


def judge(folder: Path, *, record: bool) -> int:
    """Print the verdict. Return the exit code."""
    facts = json.loads((folder / "run.json").read_text())
    samples = [json.loads(line) for line in (folder / "resources.jsonl").read_text().splitlines()]
    jobs = [first + len(facts["jobs"]) * each for first, done in enumerate(facts["jobs"]) for each in range(done)]
    verdict = check_history(read_records(folder / "clients"), facts["seed"], facts["engine"], jobs)
    _judge_servers(verdict, facts)
    grown = growth(samples)
    for name, parts in grown.items():
        for what, limit in _GROWTH.items():
            if parts[what] > limit:
                verdict.add(f"{name}: {what} grew by {parts[what]:.1f}, at most {limit:g} is allowed")
    if verdict.refused_share > _MOST_REFUSED:
        verdict.add(f"{verdict.refused_share:.0%} of the requests were refusals, at most {_MOST_REFUSED:.0%} count")
    add_torn(verdict, facts["send_buffer_bytes"])
    add_tracebacks(verdict, folder)
    print(verdict.table())
    _print_growth(samples, grown)
    print(f"queues of tritonserver's HTTP front end: {facts['send_buffer_bytes']:,} bytes")
    print(f"{verdict.num_requests:,} requests, {verdict.refused_share:.1%} refused,", end=" ")
    print(f"{verdict.num_torn} torn by Triton, {verdict.num_violations} violations")
    for violation in verdict.violations:
        print(f"  {violation}")
    if record:
        summary = {
            **facts,
            "jobs": len(jobs),
            "requests": verdict.num_requests,
            "refused": verdict.num_refused,
            "torn_by_triton": verdict.num_torn,
            "violations": verdict.num_violations,
            "first_violations": verdict.violations,
            "outcomes": _outcomes(verdict),
            "growth": {name: {what: round(by, 2) for what, by in parts.items()} for name, parts in grown.items()},
        }
        print(f"wrote {write_run_record('soak', summary)}")
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
