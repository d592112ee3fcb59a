"""The points that both kinds of pictures show: results by name, loads, and figures over repeated runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from deepseek_triton_tools.bench.figures import Figures
from deepseek_triton_tools.bench.result import BenchPoint, BenchResult
from deepseek_triton_tools.bench.workload import LoadPoint

FigureOf: TypeAlias = Callable[[Figures], float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedResult:
    """A result as pictures name it."""

    name: str
    result: BenchResult

    @property
    def measured(self) -> list[BenchPoint]:
        """The points that can be drawn: of each, some request was completed."""
        return [point for point in self.result.points if any(run.figures.completed for run in point.counted_runs)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedPoint:
    """The figures that a recipe promises, in output tokens a second."""

    name: str
    tps_user: float
    """The mean over requests of output tokens / end-to-end latency: `Figures.user_throughput`."""
    tps_gpu: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpread:
    """A figure over the repeated runs of one load."""

    mean: float
    low: float
    high: float


def spread(point: BenchPoint, figure: FigureOf) -> RunSpread | None:
    """None where no run has the figure. Runs without a completed request have none."""
    runs = [run.figures for run in point.counted_runs if run.figures.completed]
    values = [value for figures in runs if (value := figure(figures)) is not None]
    return RunSpread(mean=math.fsum(values) / len(values), low=min(values), high=max(values)) if values else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """A latency of which there is a picture."""

    name: str
    title: str
    figure: str
    """The name of its distribution in `Figures`."""

    def percentile(self, name: str) -> FigureOf:
        """p50, p99 and so on, in milliseconds; None where nothing was measured, as TTFT is without streaming."""
        return lambda figures: figures.value(f"{self.figure}.{name}")


LATENCIES = (
    Latency(name="TTFT", title="Time to first token", figure="ttft_ms"),
    Latency(name="TPOT", title="Time per output token", figure="tpot_ms"),
    Latency(name="E2EL", title="End-to-end latency", figure="e2el_ms"),
)


def share_of(results: Collection[NamedResult]) -> str:
    """ "GPU", or "server" where a result does not say how many GPUs there were: all are then divided by servers."""
    return "server" if any(named.result.gpus is None for named in results) else "GPU"


def throughput_per(share: str, result: BenchResult) -> FigureOf:
    """Output tokens a second and GPU, or a second and server."""
    parts = len(result.urls) if share == "server" else result.gpus or 1
    return lambda figures: figures.output_throughput / parts


def short_load(load: LoadPoint) -> str:
    """A label for a point: the concurrency as a plain number, a rate as "4/s", and "16 at once"."""
    if load.rate is not None:
        return f"{load.num_requests} at once" if load.at_once else f"{load.rate:g}/s"
    return "trace" if load.concurrency is None else str(load.concurrency)


def load_order(load: LoadPoint) -> tuple[float, int, int]:
    """Loads from small to large."""
    return (load.rate or 0.0, load.concurrency or 0, load.num_requests)


def load_title(loads: Collection[LoadPoint]) -> str:
    """The title of an axis that has the short labels of `loads`."""
    if all(load.rate is None and load.concurrency is not None for load in loads):
        return "Concurrency"
    if all(load.at_once for load in loads):
        return "Requests at once"
    return "Request rate" if all(load.rate is not None for load in loads) else "Load"


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return the numbers of the points than which none is better in one coordinate and at least as good in the other,
    by rising first coordinate. Of equal points the first counts."""
    front: list[int] = []
    for number in sorted(range(len(points)), key=lambda n: (-points[n][0], -points[n][1])):
        if not front or points[number][1] > points[front[-1]][1]:
            front.append(number)
    return front[::-1]


def in_ms_or_s(values: Collection[float]) -> tuple[float, str]:
    """Return what milliseconds are divided by, and the unit, so that the largest has at most four digits."""
    return (1000, "s") if max(values, default=0) >= 10_000 else (1, "ms")


def is_wide(values: Collection[float]) -> bool:
    """Whether an axis should be logarithmic: the largest is 30 times the smallest, or more."""
    return min(values, default=0) > 0 and max(values) >= 30 * min(values)


def readable(value: float) -> str:
    """Four significant digits, and never an exponent."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
