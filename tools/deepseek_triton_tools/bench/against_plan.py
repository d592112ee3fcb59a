"""A plan's numbers beside what a benchmark saw of the server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from deepseek_triton_build import Plan
from deepseek_triton_tools.bench.measuring.figures import MetricSummary
from deepseek_triton_tools.bench.results.bench_result import BenchResult, BenchRun
from deepseek_triton_tools.terminal.tables import Table

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
    isl, osl = _longest(runs)
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
    isl, osl = _longest(runs)
    for what, planned, measured in (
        ("tokens of a prompt", plan.workload.isl, isl),
        ("tokens of an answer", plan.workload.osl, osl),
        ("tokens of both", longest, isl + osl),
    ):
        if planned:
            verdict = "longer than planned" if measured > planned else ""
            yield _PlanLine(what, f"{planned:,}", f"{measured:,}", verdict)


def _longest(runs: Sequence[BenchRun]) -> tuple[int, int]:
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
