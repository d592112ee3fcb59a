"""Judges what a campaign of faults has left: its history, and what each injection was met by."""

import bisect
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reliability.checker import Verdict, check_history, outcome_of
from reliability.fault_table import FAULTS, NOTHING, Fault
from reliability.history import NOT_ASKED, Record, read_records
from reliability.jobs import GENERATION, SERVER, Asked
from reliability.run_verdict import add_tracebacks, write_run_record

CLIENTS = 2
"""The first asks the victim, the second the bystander; both ask the gateways, and the bystander for generation."""
_SLACK_S = 0.5
"""A gRPC channel that was refused tries again after so long at most, and fails what is asked meanwhile."""
_MOST_TORN = 1e-4
"""Of the requests. Slow readers fill the queue in which Triton's front end loses responses."""
_LONGEST_S = 30.0
"""Of a request that met no fault, or only some after which others are not held up. Answers take less than a second."""


@dataclass(kw_only=True)
class Injection:
    """A fault, and when it began and was healed, by time.monotonic()."""

    fault: str
    began_s: float = 0.0
    healed_s: float = 0.0
    problem: str = ""


class Blame:
    """Says which outcomes a request may have because of the faults that it met, and counts what they did."""

    def __init__(self, injections: Sequence[Injection]) -> None:
        self._injections = injections
        self._faults = {fault.name: fault for fault in FAULTS}
        self._starts = [injection.began_s for injection in injections]
        self.open: Counter[str] = Counter()
        """Requests that were open while a fault lasted, by fault."""
        self.ends: defaultdict[str, Counter[str]] = defaultdict(Counter)
        """Outcomes of those that ended otherwise than their kind does, by fault; one that met two is counted twice."""
        self.num_ended = 0
        """All those, each counted once."""
        self.num_free = 0
        """Requests that met no fault at all."""
        self.held_up: list[str] = []

    def tolerated(self, asked: Asked, record: Record) -> frozenset[str]:
        outcome = outcome_of(record, asked.num_sequences)
        met = [self._faults[injection.fault] for injection in self._met(record)]
        allowed: frozenset[str] = frozenset()
        for fault in met:
            self.open[fault.name] += 1
            ends = _ends_by(fault, asked, record)
            allowed |= ends
            self.ends[fault.name][outcome] += outcome in ends - asked.outcomes
        self.num_free += not met
        self.num_ended += outcome in allowed - asked.outcomes
        seconds = record.ended_s - record.began_s
        if seconds > _LONGEST_S and all(fault.ends == NOTHING for fault in met):
            self.held_up.append(f"job {record.job} ({asked.kind}) took {seconds:.0f} s, and nothing held it up")
        return allowed

    def _met(self, record: Record) -> Iterator[Injection]:
        last = bisect.bisect_right(self._starts, record.ended_s + _SLACK_S)
        # They follow each other, so that none before the first that had healed in time was met.
        for injection in reversed(self._injections[:last]):
            if injection.healed_s + _SLACK_S < record.began_s:
                return
            yield injection


def _ends_by(fault: Fault, asked: Asked, record: Record) -> frozenset[str]:
    """Return how a request that met the fault may end because of it."""
    if asked.target not in fault.targets or fault.ends == NOTHING:
        return NOTHING
    if asked.target == GENERATION:  # of the bystander, but what it needs of the victim may be gone
        own = fault.ends if fault.strikes_all else fault.ends & {"E_CONTEXT_LOST"}
        return own | {NOT_ASKED}
    is_bystanders = asked.target == SERVER and record.job % CLIENTS == 1
    return NOTHING if is_bystanders and not fault.strikes_all else fault.ends


def judge(folder: Path, *, record: bool) -> int:
    """Print the verdict. Return the exit code."""
    facts = json.loads((folder / "run.json").read_text())
    injections = [Injection(**each) for each in facts["injections"]]
    jobs = [first + CLIENTS * each for first, done in enumerate(facts["jobs"]) for each in range(done)]
    blame = Blame(injections)
    verdict = check_history(
        read_records(folder / "clients"), facts["seed"], "simulated", jobs, tolerated=blame.tolerated
    )
    _judge_system(verdict, facts, injections)
    for held_up in blame.held_up:
        verdict.add(held_up)
    add_tracebacks(verdict, folder)
    print(_table(injections, blame))
    print(f"{len(injections)} injections, {verdict.num_requests:,} requests, {blame.num_free:,} met no fault,", end=" ")
    print(f"{blame.num_ended:,} ended because of one, {verdict.num_torn} torn by Triton,", end=" ")
    print(f"{verdict.num_violations} violations")
    for violation in verdict.violations:
        print(f"  {violation}")
    if record:
        summary = {
            "seed": facts["seed"],
            "injections": len(injections),
            "faults": dict(Counter(injection.fault for injection in injections)),
            "skipped": facts["skipped"],
            "requests": verdict.num_requests,
            "met_no_fault": blame.num_free,
            "ended_because_of_a_fault": blame.num_ended,
            "torn_by_triton": verdict.num_torn,
            "seconds": facts["seconds"],
            "ended_because_of": {name: dict(+ends) for name, ends in sorted(blame.ends.items())},
            "violations": verdict.num_violations,
            "first_violations": verdict.violations,
        }
        print(f"wrote {write_run_record('faults', summary)}")
    return int(verdict.num_violations > 0)


def _judge_system(verdict: Verdict, facts: Mapping[str, Any], injections: Sequence[Injection]) -> None:
    """Add what the campaign itself has seen."""
    for injection in injections:
        if injection.problem:
            verdict.add(f"{injection.fault}: {injection.problem}")
    for name, number in facts["left"].items():
        if number is None:
            verdict.add(f"{name}: it does not run at the end")
        elif number:
            verdict.add(f"{name}: {number:.0f} requests are left in it")
    verdict.torn["slow readers"] += facts["torn"]
    if verdict.num_torn > 1 + _MOST_TORN * verdict.num_requests:
        verdict.add(f"{verdict.num_torn} streams were torn, at most one in {1 / _MOST_TORN:,.0f} may be")


def _table(injections: Sequence[Injection], blame: Blame) -> str:
    lines = [f"{'fault':36} {'times':>6} {'open':>9}  ended because of it"]
    for name, times in Counter(injection.fault for injection in injections).items():
        shown = ", ".join(f"{outcome} {count:,}" for outcome, count in (+blame.ends[name]).most_common()) or "none"
        lines.append(f"{name:36} {times:6} {blame.open[name]:9,}  {shown}")
    return "\n".join(lines)
