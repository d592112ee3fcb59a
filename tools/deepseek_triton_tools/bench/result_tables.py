"""Tables of a result: the figures of each load, how sure they are, and the servers' metrics; and two results side by
side, with which of their differences are more than noise."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import NormalDist, fmean, stdev
from typing import Any, Literal

from deepseek_triton_tools.bench.result import BenchPoint, BenchResult, MetricSummary
from deepseek_triton_tools.bench.workload import LoadPoint
from deepseek_triton_tools.terminal.tables import Table
from deepseek_triton_tools.tool_errors import ToolError


@dataclass(frozen=True, slots=True, kw_only=True)
class MainFigure:
    name: str
    """The path of the figure, as `Figures.value` takes it."""
    heading: str
    more_is_better: bool = False
    is_latency: bool = False

    def of_runs(self, point: BenchPoint) -> list[float]:
        """Its value in each counted run that has one."""
        values = (run.figures.value(self.name) for run in point.counted_runs)
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


def result_tables(result: BenchResult) -> Iterator[Table]:
    """A table of throughputs and one of latencies, each with the figures that at least one point has."""
    about = f"{result.served_model}, {result.dataset}" + (f", {result.gpus} GPUs" if result.gpus else "")
    for title, is_latency in ((f"Throughput: {about}", False), ("Latencies in ms", True)):
        shown = [
            figure
            for figure in MAIN_FIGURES
            if figure.is_latency == is_latency and any(map(figure.of_runs, result.points))
        ]
        yield Table(
            title=title,
            headings=("load", *(figure.heading for figure in shown)),
            rows=[
                [
                    point.label,
                    *(estimate_text(estimate(of)) if (of := figure.of_runs(point)) else "-" for figure in shown),
                ]
                for point in result.points
            ],
            is_grid=True,
        )


def result_note(result: BenchResult) -> str:
    """Return a line for below the tables: how sure the numbers are."""
    if any(len(point.counted_runs) > 1 for point in result.points):
        note = "± is the 95 % interval of the mean over the runs of a point."
    else:
        note = "Each point was run once, so there is no interval; --repeat 5 gives one."
    if any(len(point.whole_runs) < len(point.runs) for point in result.points):
        note += " An interrupted run is in no figure of a point that has a whole one."
    return note


def number_text(value: float, places: int | None = None) -> str:
    """Return a number with as many decimal places as its size deserves, or with `places`.

    >>> number_text(43146.2), number_text(171.54), number_text(0.13412), number_text(3.0)
    ('43,146', '171.5', '0.134', '3')
    """
    return f"{value:,.{_places(value) if places is None else places}f}"


def _places(value: float) -> int:
    if value == int(value) or abs(value) >= 1000:
        return 0
    return 1 if abs(value) >= 100 else 2 if abs(value) >= 1 else 3


def estimate_text(value: Estimate) -> str:
    text = number_text(value.mean)
    return text if value.half_width is None else f"{text} ± {number_text(value.half_width, _places(value.mean))}"


GAUGES = (
    "deepseek_triton_inflight_sequences",
    "deepseek_triton_engine_running_requests",
    "deepseek_triton_engine_waiting_requests",
    "deepseek_triton_kv_cache_used_blocks",
    "deepseek_triton_kv_cache_capacity_blocks",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "nv_gpu_utilization",
    "nv_gpu_memory_used_bytes",
    "nv_gpu_power_usage",
    "DCGM_FI_DEV_GPU_UTIL",
    "DCGM_FI_DEV_FB_USED",
    "DCGM_FI_DEV_POWER_USAGE",
    "DCGM_FI_DEV_SM_CLOCK",
    "DCGM_FI_DEV_GPU_TEMP",
)
COUNTERS = (
    "deepseek_triton_prompt_tokens_total",
    "deepseek_triton_cached_prompt_tokens_total",
    "deepseek_triton_generated_tokens_total",
    "deepseek_triton_draft_tokens_proposed_total",
    "deepseek_triton_draft_tokens_accepted_total",
    "deepseek_triton_requests_refused_total",
    "deepseek_triton_aborts_total",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:prefix_cache_hits_total",
    "vllm:num_preemptions_total",
    "vllm:spec_decode_num_draft_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_total",
    "nv_energy_consumption",
    "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION",
)


def metrics_table(metrics: Mapping[str, MetricSummary], run: str) -> Table | None:
    """Return a row for each metric that was not zero all the time, over all its series; None where there was none.

    :param run: for the title.
    """
    rows = []
    for name in GAUGES + COUNTERS:
        series = [each for key, each in metrics.items() if key.partition("{")[0] == name]
        increase = sum(each.increase for each in series)
        most = max((each.max for each in series), default=0.0)
        if name in COUNTERS and increase:
            rows.append((name, str(len(series)), "-", "-", number_text(increase)))
        elif name in GAUGES and most:
            mean = sum(each.mean for each in series) / len(series)
            rows.append((name, str(len(series)), number_text(mean), number_text(most), "-"))
    headings = ("metric", "series", "mean", "max", "increase")
    return Table(title=f"Servers and GPUs during {run}", headings=headings, rows=rows, is_grid=True) if rows else None


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
    if not (pairs := [(point, in_b[key]) for key, point in _whole_points(a).items() if key in in_b]):
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
                    {"name": each.figure.name, "change_percent": each.change_percent, "verdict": each.verdict}
                    | {part: asdict(getattr(each, part)) for part in ("a", "b", "change")}
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
        first, second = (str(getattr(result, name) or "") or "none" for result in (a, b))
        if first != second:
            yield f"{name} differs: {first} and {second}"
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
