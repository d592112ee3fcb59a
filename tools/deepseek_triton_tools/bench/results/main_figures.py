"""The figures that tables and comparisons show, and how sure they are after repeated runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev

from deepseek_triton_tools.bench.measuring.figures import Distribution, Figures
from deepseek_triton_tools.bench.results.bench_result import BenchPoint


@dataclass(frozen=True, slots=True, kw_only=True)
class MainFigure:
    name: str
    """Its path in Figures: "ttft_ms.p99"."""
    heading: str
    more_is_better: bool = False
    is_latency: bool = False

    def of(self, figures: Figures) -> float | None:
        """Return None where nothing was measured."""
        head, _, statistic = self.name.partition(".")
        value: Distribution | float | None = getattr(figures, head)
        if isinstance(value, Distribution):
            return float(getattr(value, statistic)) if value.count else None
        return value

    def of_runs(self, point: BenchPoint) -> list[float]:
        """Its value in each counted run that has one."""
        values = (self.of(run.figures) for run in point.counted_runs)
        return [value for value in values if value is not None]


MAIN_FIGURES = (
    MainFigure(name="request_throughput", heading="req/s", more_is_better=True),
    MainFigure(name="output_throughput", heading="tok/s", more_is_better=True),
    MainFigure(name="output_throughput_per_gpu", heading="tok/s/GPU", more_is_better=True),
    MainFigure(name="user_throughput", heading="tok/s/user", more_is_better=True),
    MainFigure(name="decode_speed.mean", heading="decode tok/s/user", more_is_better=True),
    MainFigure(name="goodput", heading="goodput req/s", more_is_better=True),
    MainFigure(name="failed", heading="failed"),
    MainFigure(name="ttft_ms.p50", heading="TTFT p50", is_latency=True),
    MainFigure(name="ttft_ms.p99", heading="TTFT p99", is_latency=True),
    MainFigure(name="tpot_ms.p50", heading="TPOT p50", is_latency=True),
    MainFigure(name="tpot_ms.p99", heading="TPOT p99", is_latency=True),
    MainFigure(name="itl_ms.p99", heading="ITL p99", is_latency=True),
    MainFigure(name="e2el_ms.p50", heading="E2EL p50", is_latency=True),
    MainFigure(name="e2el_ms.p99", heading="E2EL p99", is_latency=True),
    MainFigure(name="lag_ms.p99", heading="lag p99", is_latency=True),
)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure after repeated runs."""

    mean: float
    half_width: float | None
    """The mean of many more runs is in mean ± half_width, with 95 % confidence; None after a single run."""


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean and its 95 % interval by Student's t distribution.

    :param values: one for each run, at least one.
    """
    if len(values) == 1:
        return Estimate(values[0], None)
    error = stdev(values) / math.sqrt(len(values))
    return Estimate(fmean(values), t_quantile(len(values) - 1) * error)


def difference(a: Sequence[float], b: Sequence[float]) -> Estimate:
    """Return mean(b) - mean(a) with its 95 % interval by Welch: the runs of both may scatter differently."""
    change = fmean(b) - fmean(a)
    if len(a) == 1 or len(b) == 1:
        return Estimate(change, None)
    errors = [stdev(values) ** 2 / len(values) for values in (a, b)]
    if not (total := sum(errors)):
        return Estimate(change, 0.0)
    freedom = 1 / sum((error / total) ** 2 / (len(values) - 1) for error, values in zip(errors, (a, b), strict=True))
    return Estimate(change, t_quantile(math.floor(freedom + _ROUNDING)) * math.sqrt(total))


_ROUNDING = 1e-9
_T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""0.975 quantiles of Student's t distribution with 1 to 10 degrees of freedom."""
_Z = NormalDist().inv_cdf(0.975)


def t_quantile(freedom: int) -> float:
    """Return the 0.975 quantile of Student's t distribution with that many degrees of freedom, from 1; within 0.003."""
    if freedom <= len(_T_QUANTILES):
        return _T_QUANTILES[freedom - 1]
    # The first two terms of the expansion around the normal distribution: Abramowitz and Stegun, 26.7.5.
    return _Z + (_Z**3 + _Z) / (4 * freedom) + (5 * _Z**5 + 16 * _Z**3 + 3 * _Z) / (96 * freedom**2)
