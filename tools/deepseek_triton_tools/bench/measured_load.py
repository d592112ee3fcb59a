"""The load to plan for, chosen among those that a benchmark measured."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from deepseek_triton_build import Workload
from deepseek_triton_tools.bench.measuring.figures import Distribution, Figures, Slo
from deepseek_triton_tools.bench.results.bench_result import BenchPoint, BenchResult
from deepseek_triton_tools.tool_errors import ToolError

_NAMES = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "itl_ms": "ITL", "e2el_ms": "E2EL"}

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
    """Choose the load with the most output tokens a second among those that keep `slo`: 99 of 100 requests are within
    each limit, in every repeated run, and none failed.

    :raises ToolError: when none does; it says by how much the best one misses.
    """
    tried = [point for point in result.points if _answered(point)]
    if not tried:
        raise ToolError("the benchmark has no load that was answered without errors; plan without --from-bench")
    keeping = [point for point in tried if _excess(point, slo) <= 1]
    if not keeping:
        nearest = min(tried, key=lambda point: _excess(point, slo))
        raise ToolError(
            f"no load of the benchmark keeps {_limits(slo)} for 99 of 100 requests; the nearest is "
            f"{nearest.load.label} with {_seen(nearest, slo)}: measure a smaller load, or allow more with --slo"
        )
    best = max(keeping, key=_throughput)
    concurrency = best.load.concurrency if best.load.rate is None else None
    concurrency = concurrency or max(run.figures.peak_concurrency for run in best.runs)
    return MeasuredLoad(
        workload=Workload(
            isl=_longest(best, "input_tokens"), osl=_longest(best, "output_tokens"), concurrency=concurrency
        ),
        profile="latency" if concurrency <= _FEW else "balanced" if concurrency <= _LOW else "throughput",
        max_inflight=concurrency if _given(slo) else None,
        why=_why(best, slo, len(tried)),
        why_profile=f"measured: best with {concurrency:,} requests at once; latency is for up to {_FEW}, balanced for "
        f"up to {_LOW}, throughput for more",
    )


def _why(best: BenchPoint, slo: Slo, tried: int) -> str:
    kept = f", of those that keep {_limits(slo)}: it has {_seen(best, slo)}" if _given(slo) else ""
    loads = "1 load" if tried == 1 else f"{tried} loads"
    return f"measured: {best.load.label} gave the most output tokens/s, {_throughput(best):,.0f}, of {loads}{kept}"


def _answered(point: BenchPoint) -> bool:
    return all(run.figures.completed and not run.figures.failed for run in point.runs)


def _throughput(point: BenchPoint) -> float:
    return sum(run.figures.output_throughput for run in point.runs) / len(point.runs)


def _longest(point: BenchPoint, name: str) -> int:
    seen: list[Distribution] = [getattr(run.figures, name) for run in point.runs]
    return max(1, math.ceil(max(each.max for each in seen)))


def _given(slo: Slo) -> dict[str, float]:
    limits: Mapping[str, Any] = asdict(slo)
    return {name: limit for name, limit in limits.items() if limit is not None}


def _p99(figures: Figures, name: str) -> float:
    seen: Distribution = getattr(figures, name)
    return seen.p99


def _worst(point: BenchPoint, name: str) -> float:
    return max(_p99(run.figures, name) for run in point.runs)


def _excess(point: BenchPoint, slo: Slo) -> float:
    """The largest ratio of a 99th percentile to its limit; 0 without limits."""
    return max((_worst(point, name) / limit for name, limit in _given(slo).items()), default=0.0)


def _limits(slo: Slo) -> str:
    return _joined(f"{_NAMES[name]} {limit:g} ms" for name, limit in _given(slo).items())


def _seen(point: BenchPoint, slo: Slo) -> str:
    return _joined(f"{_NAMES[name]} p99 {_worst(point, name):,.4g} ms" for name in _given(slo))


def _joined(parts: Iterable[str]) -> str:
    return ", ".join(parts)
