"""Two results side by side, and which of their differences are more than noise."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from deepseek_triton_tools.bench.result import BenchPoint, BenchResult
from deepseek_triton_tools.bench.result_tables import (
    MAIN_FIGURES,
    Estimate,
    MainFigure,
    difference,
    estimate,
    estimate_text,
)
from deepseek_triton_tools.bench.workload import LoadPoint
from deepseek_triton_tools.terminal.tables import Table
from deepseek_triton_tools.tool_errors import ToolError

SCHEMA = "deepseek-triton/bench-compare/1"
_IDENTITY = ("model", "dataset", "endpoint", "gpus", "slo", "preset")

Verdict = Literal["better", "worse", "noise", "can't say"]
"""can't say: one of the two has a single run, so that nobody knows how much its figures scatter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureComparison:
    figure: MainFigure
    a: Estimate
    b: Estimate
    change: Estimate
    """b - a."""
    verdict: Verdict

    @property
    def change_percent(self) -> float | None:
        """None where A is 0."""
        return 100 * self.change.mean / self.a.mean if self.a.mean else None

    def is_worse_by(self, percent: float) -> bool:
        """Whether B is worse by more than that, and not by noise. A single run's change counts as it is."""
        loss = -self.change.mean if self.figure.more_is_better else self.change.mean
        return self.verdict in ("worse", "can't say") and loss > abs(self.a.mean) * percent / 100


@dataclass(frozen=True, slots=True, kw_only=True)
class PointComparison:
    load: LoadPoint
    figures: tuple[FigureComparison, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    differences: tuple[str, ...]
    """Lines about what differs between the two but for the figures."""
    points: tuple[PointComparison, ...]
    """Those that both have, in A's order."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines for below the tables."""
        verdicts = {each.verdict for point in self.points for each in point.figures}
        notes = ["noise: the 95 % interval of the difference includes zero."] if "noise" in verdicts else []
        if "can't say" in verdicts:
            notes.append("can't say: a single run doesn't show how much its figures scatter; use --repeat 5 for both.")
        return tuple(notes)

    def worse_by(self, percent: float) -> list[str]:
        """Lines about the figures that are worse by more than that."""
        return [
            f"{point.load.label}: {each.figure.heading} {estimate_text(each.a)} -> {estimate_text(each.b)}"
            for point in self.points
            for each in point.figures
            if each.is_worse_by(percent)
        ]


def compare(a: BenchResult, b: BenchResult) -> Comparison:
    """Compare the points of the same load; the numbers of requests may differ, unless all
    are sent at once. Interrupted runs are left out. Raises ToolError if there are none."""
    in_b = _whole_points(b)
    pairs = [(point, in_b[key]) for key, point in _whole_points(a).items() if key in in_b]
    if not pairs:
        loads = ["; ".join(point.label for point in result.points) or "none" for result in (a, b)]
        raise ToolError(f"the results have no load in common: A has {loads[0]}, B has {loads[1]}")
    return Comparison(
        differences=tuple(_differences(a, b, pairs)),
        points=tuple(PointComparison(load=ours.load, figures=tuple(_figures(ours, theirs))) for ours, theirs in pairs),
    )


def comparison_tables(comparison: Comparison) -> Iterator[Table]:
    for point in comparison.points:
        rows = [
            (
                each.figure.heading + (" ms" if each.figure.is_latency else ""),
                estimate_text(each.a),
                estimate_text(each.b),
                "-" if each.change_percent is None else f"{each.change_percent:+.1f} %",
                each.verdict,
            )
            for each in point.figures
        ]
        yield Table(title=point.load.label, headings=("figure", "A", "B", "change", "verdict"), rows=rows, is_grid=True)


def comparison_document(comparison: Comparison) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "differences": list(comparison.differences),
        "points": [
            {
                "load": point.load.label,
                "figures": [
                    {
                        "name": each.figure.name,
                        "a": asdict(each.a),
                        "b": asdict(each.b),
                        "change": asdict(each.change),
                        "change_percent": each.change_percent,
                        "verdict": each.verdict,
                    }
                    for each in point.figures
                ],
            }
            for point in comparison.points
        ],
    }


def _whole_points(result: BenchResult) -> dict[LoadPoint, BenchPoint]:
    """The points with a run that was not interrupted, by everything of the load but its length."""
    # The number of requests that are sent at once is no length.
    return {
        replace(load, num_requests=load.num_requests if load.at_once else 0, num_warmup=0): point
        for point in result.points
        if point.whole_runs
        for load in (point.load,)
    }


def _figures(ours: BenchPoint, theirs: BenchPoint) -> Iterator[FigureComparison]:
    for figure in MAIN_FIGURES:
        a, b = figure.of_runs(ours), figure.of_runs(theirs)
        if a and b and (any(a) or any(b)):
            change = difference(a, b)
            verdict: Verdict = "better" if (change.mean > 0) == figure.more_is_better else "worse"
            if change.half_width is None:
                verdict = "can't say"
            elif abs(change.mean) <= change.half_width:
                verdict = "noise"
            yield FigureComparison(figure=figure, a=estimate(a), b=estimate(b), change=change, verdict=verdict)


def _differences(a: BenchResult, b: BenchResult, pairs: Sequence[tuple[BenchPoint, BenchPoint]]) -> Iterator[str]:
    for name in _IDENTITY:
        if getattr(a, name) != getattr(b, name):
            yield f"{name} differs: {getattr(a, name)!r} and {getattr(b, name)!r}"
    for name in sorted({*a.server, *b.server}):
        if a.server.get(name) != b.server.get(name):
            yield f"the server's {name} differs: {a.server.get(name)!r:.100} and {b.server.get(name)!r:.100}"
    for ours, theirs in pairs:
        if ours.load.num_requests != theirs.load.num_requests:
            yield f"{ours.load.label}: {ours.load.num_requests} requests in A, {theirs.load.num_requests} in B"
    for name, result, other in (("A", a, b), ("B", b, a)):
        theirs_too = _whole_points(other)
        for key, point in _whole_points(result).items():
            if key not in theirs_too:
                yield f"only {name} has {point.load.label}"
        for point in result.points:
            if len(point.whole_runs) < len(point.runs):
                yield f"{point.load.label}: a run of {name} was interrupted, and is left out"
