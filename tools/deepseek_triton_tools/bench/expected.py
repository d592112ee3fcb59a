"""Lays what is expected of a benchmark beside what was measured: published figures, by a preset's name, or a plan."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, TypeAlias

from deepseek_triton_tools.bench.result import BenchPoint, BenchResult, BenchRun, MetricSummary, Slo
from deepseek_triton_tools.bench.workload import LoadPoint
from deepseek_triton_tools.terminal.tables import Table
from deepseek_triton_tools.tool_errors import ToolError, nearest

if TYPE_CHECKING:  # `bench --help` lists presets, and the generator takes longer than the rest of it
    from deepseek_triton_build import Plan, Workload

_FILE = Path(__file__).with_name("presets.yaml")
_FIGURES = {
    "request_throughput": "requests/s",
    "output_throughput": "output tokens/s",
    "total_token_throughput": "all tokens/s",
    "user_throughput": "tokens/s a user",
    "output_throughput_per_gpu": "tokens/s a GPU",
    "ttft_ms": "TTFT, ms",
    "tpot_ms": "TPOT, ms",
    "e2el_ms": "latency, ms",
}
"""The names of `Figures`, of which those of latencies are means, and their titles."""
_LOST = 0.01
"""Share of a run that the simulation may lose without a word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PresetPoint:
    load: LoadPoint
    """The published one."""
    short: LoadPoint | None = None
    """Takes its place on the simulated engine, with as many users and fewer requests."""
    published: Mapping[str, float] = field(default_factory=dict)
    """Those figures that the source has, by their names in `Figures`."""

    def describes(self, load: LoadPoint) -> bool:
        """Tell whether `load` is this point's, with however many requests, unless they are all the load there is."""
        same_pace = (load.concurrency, load.rate) == (self.load.concurrency, self.load.rate)
        return same_pace and (self.load.rate is None or load.num_requests == self.load.num_requests)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPreset:
    """A preset says what to send and how much of it, and has the figures that were published."""

    title: str
    source: str
    """The document that has the run, with its section."""
    input_tokens: int
    output_tokens: int
    points: tuple[PresetPoint, ...]
    gpus: int
    server: str
    """The options of `deepseek-triton build` that make the server of the run."""
    simulated: str | None = None
    """The simulated engine's preset that stands for that server; None: it has none."""
    note: str = ""
    """To be read before figures are compared."""

    def loads(self, *, short: bool) -> tuple[LoadPoint, ...]:
        """Return the points of the sweep, as published or shortened for the simulated engine. A point that has no
        shortened form is left out then, unless none has one."""
        shortened = tuple(point.short for point in self.points if point.short is not None)
        return shortened if short and shortened else tuple(point.load for point in self.points)


@cache
def presets() -> Mapping[str, BenchPreset]:
    import msgspec
    import yaml

    return msgspec.convert(yaml.safe_load(_FILE.read_text("utf-8")), dict[str, BenchPreset])


def preset(name: str) -> BenchPreset:
    """:raises ToolError: for an unknown name; it names all."""
    if name in presets():
        return presets()[name]
    known = nearest(name, presets()) or f"; there are {', '.join(presets())}"
    raise ToolError(f"--preset {name}: there is none of this name{known}", exit_code=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedFigure:
    """One published figure, and what was measured, in the deployment's own time."""

    load: str
    name: str
    published: float
    measured: float

    @property
    def deviation(self) -> float:
        """Share of the published figure by which the measured one is above it."""
        return self.measured / self.published - 1


def compared_figures(preset: BenchPreset, result: BenchResult) -> Iterator[ComparedFigure]:
    """Yield the figures that both have; of repeated runs the mean. Times of a simulated server that runs faster than
    its deployment are multiplied by its speed, and rates divided."""
    speed = _speed(result)
    for point in result.points:
        label, runs = point.load.label, [run.figures for run in point.counted_runs if run.figures.completed]
        for published in (each.published for each in preset.points if each.describes(point.load)):
            for name, title in _FIGURES.items():
                path, factor = (f"{name}.mean", speed) if name.endswith("_ms") else (name, 1 / speed)
                values = [value for figures in runs if (value := figures.value(path)) is not None]
                if name in published and values:
                    measured = factor * fmean(values)
                    yield ComparedFigure(load=label, name=title, published=published[name], measured=measured)


def _speed(result: BenchResult) -> float:
    """How many times as fast as the deployment the server is; 1 for a real one."""
    return float((result.server.get("simulation") or {}).get("speed", 1.0))


def published_table(preset: BenchPreset, result: BenchResult) -> Table:
    """Lay the published figures beside the measured ones; without rows where the preset has none of these loads."""

    def number(value: float) -> str:
        return f"{value:,.2f}" if value >= 1 else f"{value:.4f}"

    rows = [
        (each.load, each.name, number(each.published), number(each.measured), f"{100 * each.deviation:+.1f}%")
        for each in compared_figures(preset, result)
    ]
    title = "; ".join([f"Beside {preset.source}", *_notes(preset, result)])
    headings = ("load", "figure", "published", "measured", "deviation")
    return Table(title=title, headings=headings, rows=rows, is_grid=True)


def _notes(preset: BenchPreset, result: BenchResult) -> Iterator[str]:
    if not (simulation := result.server.get("simulation")):
        if preset.note:
            yield preset.note
        return
    simulated, speed = simulation.get("preset"), _speed(result)
    if simulated != preset.simulated:
        yield f"the server simulates {simulated or 'no deployment'}, which is not the one of these figures"
    if speed != 1:
        yield f"measured times are of the deployment, {speed:g} times those of this run"
    # A server's machine that can't keep the pace makes all times longer.
    runs = [run for point in result.points for run in point.runs]
    lost = sum(
        summary.increase
        for run in runs
        for name, summary in run.server_metrics.items()
        if name.startswith("deepseek_triton_engine_stat{") and 'name="late_s"' in name
    )
    lasted = sum(run.figures.duration_s for run in runs)
    if lost > _LOST * lasted:
        yield (
            f"the server's machine was too slow for this pace, and lost {lost:,.0f} of {lasted:,.0f} s: set a lower "
            "speed in model.yaml"
        )


_MOST_BAD = 0.01
"""Share of requests that may miss a limit."""
_FEW, _LOW = 4, 128
"""Most requests at once of the published low-latency configurations, and of those without attention DP."""
_FULL = 0.95
"""Share of the KV cache."""
_GIB = 2**30
_REFUSED = "deepseek_triton_requests_refused_total"
_KV_USED = "deepseek_triton_kv_cache_used_blocks"
_KV_BLOCKS = "deepseek_triton_kv_cache_capacity_blocks"
_Row: TypeAlias = tuple[str, str, str, str]
"""The limit's name, planned, measured, and a remark about the difference."""


def _longest(runs: Sequence[BenchRun]) -> tuple[int, int]:
    """The longest prompt and the longest answer in tokens."""
    figures = [run.figures for run in runs]
    return (round(max(one.input_tokens.max for one in figures)), round(max(one.output_tokens.max for one in figures)))


# --- The load to plan for ---


@dataclass(frozen=True, kw_only=True)
class MeasuredLoad:
    """Values for the planner, each with the reason for it."""

    workload: Workload
    """The longest prompt and answer, and how many requests were under way at once."""
    profile: str
    max_inflight: int | None
    """None without limits to keep: more requests then wait, and harm nobody."""
    why: str
    """Why this load."""
    why_profile: str


def choose_load(result: BenchResult, slo: Slo) -> MeasuredLoad:
    """Choose the load with the most output tokens a second among those that keep `slo` for 99 of 100 requests, in every
    repeated run, while none failed.

    The benchmark counted the requests that kept its own limits. Of other limits, each is compared with the 99th
    percentile of its figure; for ITL that is one of all gaps, and not of each request's longest.

    :raises ToolError: when none does; it says by how much the best one misses. Also for a limit of a figure that nobody
        measured.
    """
    from deepseek_triton_build import Workload

    tried = [point for point in result.points if _is_answered(point)]
    if not tried:
        raise ToolError("no run of the benchmark ended whole and without errors; plan without --from-bench")
    limits: Mapping[str, float] = {name: limit for name, limit in asdict(slo).items() if limit is not None}
    titles = {name: name.removesuffix("_ms").upper() for name in limits}
    missing = [titles[name] for name in limits if all(_worst(point, name) is None for point in tried)]
    if missing:
        raise ToolError(f"the benchmark measured no {' and no '.join(missing)}: leave that out of --slo")
    is_counted = slo == result.slo
    excess = {point.load: _excess(point, limits, is_counted=is_counted) for point in tried}

    def seen(point: BenchPoint) -> str:
        parts = [f"{title} p99 {_worst(point, name) or 0.0:,.4g} ms" for name, title in titles.items()]
        if is_counted and (bad_share := _bad_share(point)) is not None:
            parts.append(f"{1 - bad_share:.1%} of the requests within all limits")
        return ", ".join(parts)

    def throughput(point: BenchPoint) -> float:
        return fmean(run.figures.output_throughput for run in point.whole_runs)

    limits_text = ", ".join(f"{titles[name]} {limit:g} ms" for name, limit in limits.items())
    if not (keeping := [point for point in tried if excess[point.load] <= 1]):
        nearest = min(tried, key=lambda point: excess[point.load])
        raise ToolError(
            f"no load of the benchmark keeps {limits_text} for 99 of 100 requests; the nearest is "
            f"{nearest.load.label} with {seen(nearest)}: measure a smaller load, or allow more with --slo"
        )
    best = max(keeping, key=throughput)
    concurrency = best.load.concurrency if best.load.rate is None else None
    concurrency = concurrency or max(run.figures.peak_concurrency for run in best.whole_runs)
    isl, osl = _longest(best.whole_runs)
    loads = "1 load" if len(tried) == 1 else f"{len(tried)} loads"
    kept = f", of those that keep {limits_text}: it has {seen(best)}" if limits else ""
    return MeasuredLoad(
        workload=Workload(isl=max(1, isl), osl=max(1, osl), concurrency=concurrency),
        profile="latency" if concurrency <= _FEW else "balanced" if concurrency <= _LOW else "throughput",
        max_inflight=concurrency if limits else None,
        why=f"measured: {best.load.label} gave the most output tokens/s, {throughput(best):,.0f}, of {loads}{kept}",
        why_profile=f"measured: best with {concurrency:,} requests at once; latency is for up to {_FEW}, balanced for "
        f"up to {_LOW}, throughput for more",
    )


def _is_answered(point: BenchPoint) -> bool:
    """Errors are also what the server cancelled. Interrupted runs don't count."""
    figures = [run.figures for run in point.whole_runs]
    return bool(figures) and all(one.completed and not one.failed and not one.errors for one in figures)


def _worst(point: BenchPoint, name: str) -> float | None:
    """The highest 99th percentile of its runs; None where one of them did not measure the figure."""
    values = [run.figures.value(f"{name}.p99") for run in point.whole_runs]
    return None if None in values else max(value for value in values if value is not None)


def _bad_share(point: BenchPoint) -> float | None:
    """The largest share of requests that missed the benchmark's own limits; None where nobody counted."""
    shares = [run.figures.good_share for run in point.whole_runs]
    return None if None in shares else max(1 - share for share in shares if share is not None)


def _excess(point: BenchPoint, limits: Mapping[str, float], *, is_counted: bool) -> float:
    """By how many times it is above the limits: up to 1 keeps them, and without limits it is 0.

    :param is_counted: the limits are the benchmark's own.
    """
    if is_counted and (bad_share := _bad_share(point)) is not None:
        return round(bad_share, 9) / _MOST_BAD
    worst = {name: _worst(point, name) for name in limits}
    return max((math.inf if seen is None else seen / limits[name] for name, seen in worst.items()), default=0.0)


# --- The plan's limits beside what was seen ---


def against_plan(plan: Plan, result: BenchResult) -> Table:
    """Lay the limits of one server beside the highest that was measured at any load. With several servers, the
    highest of any of them.

    :param plan: one for GPUs, which has such limits.
    """
    assert plan.budget is not None
    runs = [run for point in result.points for run in point.runs]
    rows = [*_gpu_rows(plan, result, runs), *_request_rows(plan, runs), *_length_rows(plan, runs)]
    title = "Planned and measured; highest values at any load"
    return Table(title=title, headings=("", "planned", "measured", ""), rows=rows)


def _gpu_rows(plan: Plan, result: BenchResult, runs: Sequence[BenchRun]) -> Iterator[_Row]:
    assert plan.budget is not None
    if result.gpus is not None:
        servers = max(1, len(result.urls))
        differs = result.gpus != plan.world_size * servers
        planned = f"{plan.world_size}" if servers == 1 else f"{servers} x {plan.world_size}"
        yield "GPUs", planned, f"{result.gpus}", "another number of them" if differs else ""
    if (used := _highest(runs, "nv_gpu_memory_used_bytes")) is not None:
        planned_use = plan.budget.memory - plan.budget.free
        verdict = "more than planned" if used > planned_use else ""
        yield "memory in use of a GPU, GiB", f"{planned_use / _GIB:.1f}", f"{used / _GIB:.1f}", verdict


def _request_rows(plan: Plan, runs: Sequence[BenchRun]) -> Iterator[_Row]:
    seen = _highest(runs, "deepseek_triton_engine_running_requests", "vllm:num_requests_running")
    # Without metrics, the client knows of its own requests only, and not which of them wait.
    running = max(run.figures.peak_concurrency for run in runs) if seen is None else seen
    what = "requests under way" if seen is None else "requests that run at once"
    waiting = _highest(runs, "deepseek_triton_engine_waiting_requests", "vllm:num_requests_waiting")
    most = plan.max_concurrency
    verdict = f"{running / most:.0%} of the batch" if most else ""
    if running > most:
        verdict = "the server allows more than the plan"
    elif waiting:
        verdict = f"{waiting:,.0f} waited, {'the batch was full' if running >= most else 'before the batch was full'}"
    yield what, f"{most:,}", f"{running:,.0f}", verdict
    yield from _kv_rows(plan, runs, running)
    limit = {setting.key: setting.value for setting in plan.settings}.get("triton_config.max_inflight")
    inflight = _highest(runs, "deepseek_triton_inflight_sequences")
    if limit is not None and inflight is not None:
        yield "requests accepted at once", f"{limit:,}", f"{inflight:,.0f}", "reached" if inflight >= limit else ""
    refused = sum(summary.increase for run in runs for summary in _series(run, _REFUSED))
    failed = sum(run.figures.failed for run in runs)
    errors = "; ".join(dict.fromkeys(error for run in runs for error in run.figures.errors))
    yield "requests refused or failed", "0", f"{max(refused, failed):,.0f}", errors


def _kv_rows(plan: Plan, runs: Sequence[BenchRun], running: float) -> Iterator[_Row]:
    """How many requests the KV cache holds, and how full it was where the server says so."""
    assert plan.budget is not None
    isl, osl = _longest(runs)
    held = plan.budget.concurrent_requests(isl, osl) if isl + osl else 0
    if isl + osl:
        verdict = "more than the plan has room for" if running > held else ""
        yield f"requests of {isl:,} + {osl:,} tokens in the KV cache", f"{held:,}", f"{running:,.0f}", verdict
    metrics = [run.server_metrics for run in runs]
    shares = [
        used.max / blocks.max
        for series in metrics
        for name, used in series.items()
        if name.startswith(_KV_USED) and (blocks := series.get(name.replace(_KV_USED, _KV_BLOCKS))) and blocks.max
    ]
    if shares:
        total, share = plan.budget.total_kv_tokens, max(shares)
        planned = min(1.0, running / held) if held else 0.0
        verdict = "the KV cache is full" if share > _FULL else "smaller than planned" if share > 1.25 * planned else ""
        yield f"share of {total:,} KV tokens in use", f"{planned:.0%}", f"{share:.0%}", verdict


def _length_rows(plan: Plan, runs: Sequence[BenchRun]) -> Iterator[_Row]:
    longest = plan.canonical.get("max_seq_len") or plan.canonical.get("max_model_len")
    isl, osl = _longest(runs)
    for what, planned, measured in (
        ("tokens of a prompt", plan.workload.isl, isl),
        ("tokens of an answer", plan.workload.osl, osl),
        ("tokens of both", longest, isl + osl),
    ):
        if planned:
            yield what, f"{planned:,}", f"{measured:,}", "longer than planned" if measured > planned else ""


def _highest(runs: Sequence[BenchRun], *names: str) -> float | None:
    return max((summary.max for run in runs for summary in _series(run, *names)), default=None)


def _series(run: BenchRun, *names: str) -> Iterator[MetricSummary]:
    return (summary for key, summary in run.server_metrics.items() if key.partition("{")[0] in names)
