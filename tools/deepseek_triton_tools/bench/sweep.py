"""A sweep: every point of load in turn, each as often as asked for, and the files they leave."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from functools import partial
from typing import Any

import numpy as np

from deepseek_triton_client import Tls
from deepseek_triton_tools.bench.figures import MetricSummary, Slo
from deepseek_triton_tools.bench.load_run import (
    LoadProcesses,
    LoadProgress,
    LoadRun,
    conversations_needed,
    processes_for,
)
from deepseek_triton_tools.bench.result import BenchPoint, BenchResult, BenchRun
from deepseek_triton_tools.bench.run_figures import run_figures, run_timeline
from deepseek_triton_tools.bench.server_metrics import MetricsWatch
from deepseek_triton_tools.bench.targets import TargetSettings
from deepseek_triton_tools.bench.workload import Conversation, LoadPoint

_LEAST_BINS, _MOST_BINS = 20, 240
"""Parts of the timeline; about one for each second."""


_NO_SLO = Slo()


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Everything that is to be measured."""

    target: TargetSettings
    points: Sequence[LoadPoint]
    repeat: int = 1
    conversations: Callable[[int, int], Sequence[Conversation]]
    """Makes a number of conversations with a seed; each run has a seed of its own, so that no prefix cache helps it."""
    dataset: str
    """The dataset in a few words."""
    gpus: int | None = None
    slo: Slo = _NO_SLO
    metrics_urls: Sequence[str] = ()
    """Servers' own metrics, which are read during each run."""
    processes: int | None = None
    """Load processes; None: as many as the largest point needs."""
    seed: int = 0
    command: str = ""
    preset: str = ""
    server: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class SweepStep:
    """One run of a sweep that has ended."""

    load: LoadPoint
    number: int
    """Number of the run at this point, from 0."""
    run: BenchRun
    measured: LoadRun
    problems: Mapping[str, str] = field(default_factory=dict)
    """Addresses of metrics that could not be read, a line each."""


def sweep_steps(sweep: Sweep, on_progress: Callable[[str, LoadProgress], None]) -> Iterator[SweepStep]:
    """Measure. The first Ctrl-C ends the run under way, which is then the last step; the second raises
    KeyboardInterrupt.

    :param on_progress: gets the name of the run, and how far it is.
    :raises ToolError: when the server can't be asked.
    """
    target = sweep.target
    tls = Tls(ca=target.ca, certificate=target.certificate, key=target.key)
    number = sweep.processes or max(processes_for(point) for point in sweep.points)
    runs = [point for point in sweep.points for _ in range(sweep.repeat)]
    with LoadProcesses(number) as processes:
        for position, point in enumerate(runs):
            repeated = runs[:position].count(point)  # a sweep may name a point twice
            name = _name(point, repeated, runs.count(point), position, len(runs))
            # Neighbouring seeds of a user mustn't share runs, as their sums with the position would.
            seed = int(np.random.SeedSequence((sweep.seed, position)).generate_state(1)[0])
            conversations = sweep.conversations(conversations_needed(point), seed)
            with MetricsWatch(sweep.metrics_urls, own_urls=target.all_urls, token=target.token, tls=tls) as watch:
                measured = processes.run(
                    sweep.target,
                    point,
                    conversations,
                    seed=seed,
                    on_progress=partial(on_progress, name),
                )
            yield SweepStep(
                load=point,
                number=repeated,
                run=_bench_run(sweep, point, measured, watch.summaries()),
                measured=measured,
                problems=watch.problems,
            )
            if measured.interrupted:
                return


def sweep_result(sweep: Sweep, steps: Sequence[SweepStep]) -> BenchResult:
    """Put the steps so far together; steps at equal points are runs of one. There must be a step."""
    points = [
        BenchPoint(load=point, runs=tuple(step.run for step in steps if step.load == point))
        for point in dict.fromkeys(step.load for step in steps)
    ]
    return BenchResult(
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        urls=sweep.target.all_urls,
        endpoint=sweep.target.endpoint,
        model=sweep.target.model,
        gpus=sweep.gpus,
        dataset=sweep.dataset,
        slo=sweep.slo,
        points=tuple(points),
        command=sweep.command,
        preset=sweep.preset,
        server=sweep.server,
    )


def _bench_run(
    sweep: Sweep, point: LoadPoint, measured: LoadRun, server_metrics: Mapping[str, MetricSummary]
) -> BenchRun:
    is_closed = point.rate is None and point.concurrency is not None
    figures = run_figures(
        measured.records, gpus=sweep.gpus, concurrency=point.concurrency if is_closed else None, slo=sweep.slo
    )
    delay_ms = float(np.percentile(measured.delays_ms, 99)) if measured.delays_ms else 0.0
    bins = min(_MOST_BINS, max(_LEAST_BINS, round(figures.duration_s)))
    return BenchRun(
        figures=replace(figures, client_delay_ms=delay_ms),
        timeline=run_timeline(measured.records, bins),
        server_metrics=server_metrics,
        interrupted=measured.interrupted,
    )


def _name(point: LoadPoint, repeated: int, repeat: int, position: int, total: int) -> str:
    parts = [point.label]
    if repeat > 1:
        parts.append(f"run {repeated + 1} of {repeat}")
    if total > 1:
        parts.append(f"{position + 1} of {total} in all")
    return ", ".join(parts)
