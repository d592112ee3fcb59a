"""A whole benchmark: every point of a sweep with its repeated runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from deepseek_triton_tools.bench.load.load_settings import LoadPoint
from deepseek_triton_tools.bench.measuring.figures import Figures, MetricSummary, Slo, TimelineBin


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRun:
    figures: Figures
    timeline: tuple[TimelineBin, ...] = ()
    server_metrics: Mapping[str, MetricSummary] = field(default_factory=dict)
    """Series of the servers' /metrics, GPU telemetry too, by name with labels."""
    interrupted: bool = False
    """Ctrl-C ended it early."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPoint:
    load: LoadPoint
    runs: tuple[BenchRun, ...]
    """Repeated runs of the same load, at least one."""

    @property
    def whole_runs(self) -> tuple[BenchRun, ...]:
        return tuple(run for run in self.runs if not run.interrupted)

    @property
    def counted_runs(self) -> tuple[BenchRun, ...]:
        """Those that figures are of: the whole runs, or the interrupted one if it is the only one."""
        return self.whole_runs or self.runs

    @property
    def label(self) -> str:
        """The load's name, which says so if a run was interrupted."""
        return self.load.label + (", interrupted" if len(self.whole_runs) < len(self.runs) else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """This is written as bench.json, and every table and picture is made of it."""

    date: str
    """ISO 8601, UTC."""
    urls: tuple[str, ...]
    endpoint: str
    """triton-http, triton-grpc or openai."""
    model: str
    gpus: int | None
    dataset: str
    """The dataset in a few words: its kind and lengths."""
    slo: Slo
    points: tuple[BenchPoint, ...]
    command: str = ""
    preset: str = ""
    server: Mapping[str, Any] = field(default_factory=dict)
    """The server's own words: engine, variant, limits."""
