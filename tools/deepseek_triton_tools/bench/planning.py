"""What a plan and a benchmark say to each other: the load to plan for, and the plan's limits beside what was seen."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any, NamedTuple

from deepseek_triton_build import Plan, Workload
from deepseek_triton_tools.bench.figures import Distribution, Figures, MetricSummary, Slo
from deepseek_triton_tools.bench.result import BenchPoint, BenchResult, BenchRun
from deepseek_triton_tools.terminal.tables import Table
from deepseek_triton_tools.tool_errors import ToolError

_NAMES = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "itl_ms": "ITL", "e2el_ms": "E2EL"}

_MOST_BAD = 0.01
"""Share of requests that may miss a limit."""
_FEW, _LOW = 4, 128
"""Most requests at once of the published low-latency configurations, and of those without attention DP."""


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
    tried = [point for point in result.points if _answered(point)]
    if not tried:
        raise ToolError("the benchmark has no load that was answered without errors; plan without --from-bench")
    missing = [_NAMES[name] for name in _given(slo) if not any(_is_measured(point, name) for point in tried)]
    if missing:
        raise ToolError(f"the benchmark measured no {' and no '.join(missing)}: leave that out of --slo")
    counted = slo == result.slo
    excess = {point.load: _excess(point, slo, counted=counted) for point in tried}
    keeping = [point for point in tried if excess[point.load] <= 1]
    if not keeping:
        nearest = min(tried, key=lambda point: excess[point.load])
        seen = _seen(nearest, slo, counted=counted)
        raise ToolError(
            f"no load of the benchmark keeps {_limits(slo)} for 99 of 100 requests; the nearest is "
            f"{nearest.load.label} with {seen}: measure a smaller load, or allow more with --slo"
        )
    best = max(keeping, key=_throughput)
    concurrency = best.load.concurrency if best.load.rate is None else None
    concurrency = concurrency or max(run.figures.peak_concurrency for run in best.whole_runs)
    return MeasuredLoad(
        workload=Workload(
            isl=_longest(best, "input_tokens"), osl=_longest(best, "output_tokens"), concurrency=concurrency
        ),
        profile="latency" if concurrency <= _FEW else "balanced" if concurrency <= _LOW else "throughput",
        max_inflight=concurrency if _given(slo) else None,
        why=_why(best, slo, len(tried), counted=counted),
        why_profile=f"measured: best with {concurrency:,} requests at once; latency is for up to {_FEW}, balanced for "
        f"up to {_LOW}, throughput for more",
    )


def _why(best: BenchPoint, slo: Slo, tried: int, *, counted: bool) -> str:
    kept = f", of those that keep {_limits(slo)}: it has {_seen(best, slo, counted=counted)}" if _given(slo) else ""
    loads = "1 load" if tried == 1 else f"{tried} loads"
    return f"measured: {best.load.label} gave the most output tokens/s, {_throughput(best):,.0f}, of {loads}{kept}"


def _answered(point: BenchPoint) -> bool:
    """Errors are also what the server cancelled. Interrupted runs don't count."""
    figures = [run.figures for run in point.whole_runs]
    return bool(figures) and all(one.completed and not one.failed and not one.errors for one in figures)


def _throughput(point: BenchPoint) -> float:
    return fmean(run.figures.output_throughput for run in point.whole_runs)


def _longest(point: BenchPoint, name: str) -> int:
    seen: list[Distribution] = [getattr(run.figures, name) for run in point.whole_runs]
    return max(1, math.ceil(max(each.max for each in seen)))


def _given(slo: Slo) -> dict[str, float]:
    limits: Mapping[str, Any] = asdict(slo)
    return {name: limit for name, limit in limits.items() if limit is not None}


def _p99(figures: Figures, name: str) -> float:
    seen: Distribution = getattr(figures, name)
    return seen.p99


def _worst(point: BenchPoint, name: str) -> float:
    return max(_p99(run.figures, name) for run in point.whole_runs)


def _is_measured(point: BenchPoint, name: str) -> bool:
    seen: list[Distribution] = [getattr(run.figures, name) for run in point.whole_runs]
    return all(each.count for each in seen)


def _bad_share(point: BenchPoint) -> float | None:
    """The largest share of requests that missed the benchmark's own limits; None where nobody counted."""
    shares = [run.figures.good_share for run in point.whole_runs]
    return max(1 - share for share in shares if share is not None) if None not in shares else None


def _excess(point: BenchPoint, slo: Slo, *, counted: bool) -> float:
    """By how many times it is above the limits: up to 1 keeps them, and without limits it is 0.

    :param counted: the limits are the benchmark's own.
    """
    bad_share = _bad_share(point) if counted else None
    if bad_share is not None:
        return round(bad_share, 9) / _MOST_BAD
    return max(
        (_worst(point, name) / limit if _is_measured(point, name) else math.inf for name, limit in _given(slo).items()),
        default=0.0,
    )


def _limits(slo: Slo) -> str:
    return _joined(f"{_NAMES[name]} {limit:g} ms" for name, limit in _given(slo).items())


def _seen(point: BenchPoint, slo: Slo, *, counted: bool) -> str:
    seen = [f"{_NAMES[name]} p99 {_worst(point, name):,.4g} ms" for name in _given(slo)]
    bad_share = _bad_share(point) if counted else None
    return _joined([*seen, *([] if bad_share is None else [f"{1 - bad_share:.1%} of the requests within all limits"])])


def _joined(parts: Iterable[str]) -> str:
    return ", ".join(parts)


_RUNNING = ("deepseek_triton_engine_running_requests", "vllm:num_requests_running")
_WAITING = ("deepseek_triton_engine_waiting_requests", "vllm:num_requests_waiting")
_INFLIGHT = ("deepseek_triton_inflight_sequences",)
_KV_USED = "deepseek_triton_kv_cache_used_blocks"
_KV_BLOCKS = "deepseek_triton_kv_cache_capacity_blocks"
_REFUSED = "deepseek_triton_requests_refused_total"
_GPU_MEMORY = ("nv_gpu_memory_used_bytes",)
_GIB = 2**30


class _PlanLine(NamedTuple):
    what: str
    planned: str
    measured: str
    verdict: str = ""


def against_plan(plan: Plan, result: BenchResult) -> Table:
    """Lay the limits of one server beside the highest that was measured at any load. With several servers, the
    highest of any of them.

    :param plan: one for GPUs, which has such limits.
    """
    runs = [run for point in result.points for run in point.runs]
    rows = [*_gpu_lines(plan, result, runs), *_request_lines(plan, runs), *_length_lines(plan, runs)]
    title = "Planned and measured; highest values at any load"
    return Table(title=title, headings=("", "planned", "measured", ""), rows=rows)


def _gpu_lines(plan: Plan, result: BenchResult, runs: Sequence[BenchRun]) -> Iterator[_PlanLine]:
    assert plan.budget is not None
    if result.gpus is not None:
        servers = max(1, len(result.urls))
        differs = result.gpus != plan.world_size * servers
        planned = f"{plan.world_size}" if servers == 1 else f"{servers} x {plan.world_size}"
        yield _PlanLine("GPUs", planned, f"{result.gpus}", "another number of them" if differs else "")
    used = _highest(runs, _GPU_MEMORY)
    if used is not None:
        planned_use = plan.budget.memory - plan.budget.free
        yield _PlanLine(
            "memory in use of a GPU, GiB",
            f"{planned_use / _GIB:.1f}",
            f"{used / _GIB:.1f}",
            "more than planned" if used > planned_use else "",
        )


def _request_lines(plan: Plan, runs: Sequence[BenchRun]) -> Iterator[_PlanLine]:
    assert plan.budget is not None
    seen = _highest(runs, _RUNNING)
    waiting = _highest(runs, _WAITING)
    # Without metrics, the client knows of its own requests only, and not which of them wait.
    running = max(run.figures.peak_concurrency for run in runs) if seen is None else seen
    what = "requests under way" if seen is None else "requests that run at once"
    yield _PlanLine(what, f"{plan.max_concurrency:,}", f"{running:,.0f}", _batch_verdict(plan, running, waiting))
    isl, osl = _longest_lengths(runs)
    if isl + osl:
        held = plan.budget.concurrent_requests(isl, osl)
        yield _PlanLine(
            f"requests of {isl:,} + {osl:,} tokens in the KV cache",
            f"{held:,}",
            f"{running:,.0f}",
            "more than the plan has room for" if running > held else "",
        )
    share = _kv_share(runs)
    if share is not None:
        planned = min(1.0, running * (isl + osl) / plan.budget.total_kv_tokens)
        verdict = "the KV cache is full" if share > _FULL else "smaller than planned" if share > 1.25 * planned else ""
        yield _PlanLine(
            f"share of {plan.budget.total_kv_tokens:,} KV tokens in use", f"{planned:.0%}", f"{share:.0%}", verdict
        )
    limits = {setting.key: setting.value for setting in plan.settings}
    most = limits.get("triton_config.max_inflight")
    inflight = _highest(runs, _INFLIGHT)
    if most is not None and inflight is not None:
        yield _PlanLine(
            "requests accepted at once", f"{most:,}", f"{inflight:,.0f}", "reached" if inflight >= most else ""
        )
    refused = sum(summary.increase for run in runs for summary in _series(run, (_REFUSED,)))
    failed = sum(run.figures.failed for run in runs)
    yield _PlanLine("requests refused or failed", "0", f"{max(refused, failed):,.0f}", _errors(runs))


_FULL = 0.95


def _batch_verdict(plan: Plan, running: float, waiting: float | None) -> str:
    if running > plan.max_concurrency:
        return "the server allows more than the plan"
    if waiting:
        why = "the batch was full" if running >= plan.max_concurrency else "before the batch was full"
        return f"{waiting:,.0f} waited, {why}"
    return f"{running / plan.max_concurrency:.0%} of the batch" if plan.max_concurrency else ""


def _length_lines(plan: Plan, runs: Sequence[BenchRun]) -> Iterator[_PlanLine]:
    longest = plan.canonical.get("max_seq_len") or plan.canonical.get("max_model_len")
    isl, osl = _longest_lengths(runs)
    for what, planned, measured in (
        ("tokens of a prompt", plan.workload.isl, isl),
        ("tokens of an answer", plan.workload.osl, osl),
        ("tokens of both", longest, isl + osl),
    ):
        if planned:
            verdict = "longer than planned" if measured > planned else ""
            yield _PlanLine(what, f"{planned:,}", f"{measured:,}", verdict)


def _longest_lengths(runs: Sequence[BenchRun]) -> tuple[int, int]:
    """Return the longest prompt and the longest answer in tokens."""
    return (
        round(max(run.figures.input_tokens.max for run in runs)),
        round(max(run.figures.output_tokens.max for run in runs)),
    )


def _errors(runs: Sequence[BenchRun]) -> str:
    return "; ".join(dict.fromkeys(error for run in runs for error in run.figures.errors))


def _kv_share(runs: Sequence[BenchRun]) -> float | None:
    """Return the highest share of the KV blocks in use; None where the server doesn't say."""
    shares = []
    for run in runs:
        for name, used in run.server_metrics.items():
            if name.startswith(_KV_USED):
                blocks = run.server_metrics.get(name.replace(_KV_USED, _KV_BLOCKS))
                if blocks is not None and blocks.max:
                    shares.append(used.max / blocks.max)
    return max(shares, default=None)


def _highest(runs: Sequence[BenchRun], names: tuple[str, ...]) -> float | None:
    return max((summary.max for run in runs for summary in _series(run, names)), default=None)


def _series(run: BenchRun, names: tuple[str, ...]) -> Iterator[MetricSummary]:
    for key, summary in run.server_metrics.items():
        if key.partition("{")[0] in names:
            yield summary
