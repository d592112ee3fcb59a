"""What the programs here share: processes with a pipe, orders, medians, a table of them, and targets with verdicts."""

import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_spawn = multiprocessing.get_context("spawn")

Measures = Mapping[str, float]
"""By name; a measure that a contender has no number of is NaN, or not there."""


def turned(names: Sequence[str], number: int) -> list[str]:
    """The names in the order of a round: each is first in turn."""
    first = number % len(names)
    return [*names[first:], *names[:first]]


def medians(runs: Sequence[Measures], *, most: Sequence[str] = ()) -> dict[str, float]:
    """Measure by measure; of those in `most` the largest, where a good round makes up for no bad one."""
    return {name: (max if name in most else statistics.median)([run[name] for run in runs]) for name in runs[0]}


def cpu_s(pid: int) -> float:
    """What a process has used so far, with all its threads. Raises OSError when it has ended."""
    columns = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(columns[11]) + int(columns[12])) / _TICKS_PER_S  # utime and stime, by proc(5)


# --- The table and its targets ---


@dataclass(frozen=True)
class Table:
    """Columns of measures: the title, the measure and its format."""

    columns: Sequence[tuple[str, str, str]]
    name_width: int

    def head(self) -> str:
        return " " * self.name_width + " ".join(title.rjust(_width(title)) for title, _, _ in self.columns)

    def row(self, name: str, measures: Measures) -> str:
        cells = [_cell(measures.get(key, math.nan), form).rjust(_width(title)) for title, key, form in self.columns]
        return name.ljust(self.name_width) + " ".join(cells)


def _width(title: str) -> int:
    return max(7, len(title))


def _cell(number: float, form: str) -> str:
    return "-" if math.isnan(number) else format(number, form)


@dataclass(frozen=True, kw_only=True)
class Target:
    """What the median of one contender must keep to: itself, or over another's."""

    who: str
    measure: str
    versus: str = ""
    at_least: float | None = None
    at_most: float | None = None


Verdict = tuple[str, bool | None]
"""A line, and whether the target is met; None where one of the two did not run."""


def verdicts(targets: Sequence[Target], measured: Mapping[str, Measures]) -> list[Verdict]:
    return [_verdict(target, measured) for target in targets]


def all_met(found: Sequence[Verdict]) -> bool:
    """Whether all targets that were measured are met, and any was."""
    met = [each for _, each in found if each is not None]
    return bool(met) and all(met)


def _verdict(target: Target, measured: Mapping[str, Measures]) -> Verdict:
    what = f"{target.who}: {target.measure}"
    if target.versus:
        what += f" / {target.versus}'s"
    (limit,) = (each for each in (target.at_least, target.at_most) if each is not None)
    wanted = f"target at {'most' if target.at_least is None else 'least'} {limit:,g}"
    if any(name not in measured for name in (target.who, target.versus) if name):
        return f"{what}, {wanted}: not measured", None
    number, other = measured[target.who].get(target.measure, math.nan), measured.get(target.versus, {})
    if target.versus:
        number /= other[target.measure]
    line = f"{what} is {number:,.4g}, {wanted}"
    if other.get("undelivered", 0) > 0:
        return f"{line}: NOT MET, for {target.versus} did not deliver all", False
    met = number <= limit if target.at_least is None else number >= limit
    return f"{line}: {'met' if met else 'NOT MET'}", met


# --- Processes ---


class ChildFailed(SystemExit):
    """A process ended without its word, or took too long."""


@contextmanager
def children(target: Callable[..., None], arguments: Sequence[Any]) -> Iterator[list[Connection]]:
    """The pipes of processes that run `target(argument, pipe)`. Those that still run at the end are ended."""
    pipes: list[Connection] = []
    processes = []
    try:
        for argument in arguments:
            here, there = _spawn.Pipe()
            process = _spawn.Process(target=target, args=(argument, there), daemon=True)
            process.start()
            there.close()  # or nobody would hear of its end
            pipes.append(here)
            processes.append(process)
        yield pipes
    finally:
        for process in processes:
            process.kill()
            process.join()


def send(pipes: Sequence[Connection], word: Any) -> None:
    for pipe in pipes:
        pipe.send(word)


def receive(pipes: Sequence[Connection], within_s: float) -> list[Any]:
    """A word of each, in the order of the pipes; one that ends instead is told of at once. Raises ChildFailed."""
    words: dict[Connection, Any] = {}
    deadline = time.monotonic() + within_s
    while len(words) < len(pipes):
        waiting = [pipe for pipe in pipes if pipe not in words]
        ready = wait(waiting, max(0.0, deadline - time.monotonic()))
        if not ready:
            raise ChildFailed(f"a child process said nothing for {within_s:.0f} s")
        for pipe in ready:
            try:
                words[pipe] = pipe.recv()
            except (EOFError, ConnectionResetError):
                raise ChildFailed("a child process failed: what it said is above") from None
    return [words[pipe] for pipe in pipes]
