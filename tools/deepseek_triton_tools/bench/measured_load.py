"""The load to plan for, chosen among those that a benchmark measured."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from deepseek_triton_build import Workload
from deepseek_triton_tools.bench.measuring.figures import Distribution, Figures, Slo
from deepseek_triton_tools.bench.results.bench_result import BenchPoint, BenchResult
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
