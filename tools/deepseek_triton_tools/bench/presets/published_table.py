"""A preset's published figures beside those that were measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from deepseek_triton_tools.bench.measuring.figures import Figures
from deepseek_triton_tools.bench.presets.bench_preset import BenchPreset, PublishedFigures
from deepseek_triton_tools.bench.results.bench_result import BenchPoint, BenchResult
from deepseek_triton_tools.terminal.tables import Table


class _PublishedRow(NamedTuple):
    name: str
    published: Callable[[PublishedFigures], float | None]
    measured: Callable[[Figures], float | None]
    is_rate: bool


_ROWS = (
    _PublishedRow("requests/s", lambda p: p.request_throughput, lambda f: f.request_throughput, True),
    _PublishedRow("output tokens/s", lambda p: p.output_throughput, lambda f: f.output_throughput, True),
    _PublishedRow("all tokens/s", lambda p: p.total_token_throughput, lambda f: f.total_token_throughput, True),
    _PublishedRow("tokens/s a user", lambda p: p.user_throughput, lambda f: f.user_throughput, True),
    _PublishedRow("tokens/s a GPU", lambda p: p.output_throughput_per_gpu, lambda f: f.output_throughput_per_gpu, True),
    _PublishedRow("TTFT, ms", lambda p: p.ttft_ms, lambda f: f.ttft_ms.mean, False),
    _PublishedRow("TPOT, ms", lambda p: p.tpot_ms, lambda f: f.tpot_ms.mean, False),
    _PublishedRow("latency, ms", lambda p: p.e2el_ms, lambda f: f.e2el_ms.mean, False),
)


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
        known = [each.published for each in preset.points if each.describes(point.load) and each.published]
        for published in known:
            for row in _ROWS:
                expected, seen = row.published(published), _mean(row, point)
                if expected is not None and seen is not None:
                    seen = seen / speed if row.is_rate else seen * speed
                    yield ComparedFigure(load=point.load.label, name=row.name, published=expected, measured=seen)


def published_table(preset: BenchPreset, result: BenchResult) -> Table:
    """Lay the published figures beside the measured ones; without rows where the preset has none of these loads."""
    rows = [
        (
            figure.load,
            figure.name,
            _number(figure.published),
            _number(figure.measured),
            f"{100 * figure.deviation:+.1f}%",
        )
        for figure in compared_figures(preset, result)
    ]
    title = "; ".join([f"Beside {preset.source}", *_notes(preset, result)])
    return Table(
        title=title, headings=("load", "figure", "published", "measured", "deviation"), rows=rows, is_grid=True
    )


def _number(value: float) -> str:
    return f"{value:,.2f}" if value >= 1 else f"{value:.4f}"


def _notes(preset: BenchPreset, result: BenchResult) -> Iterator[str]:
    simulation = result.server.get("simulation")
    if simulation:
        simulated, speed = simulation.get("preset"), _speed(result)
        if simulated != preset.simulated:
            yield f"the server simulates {simulated or 'no deployment'}, which is not the one of these figures"
        if speed != 1:
            yield f"measured times are of the deployment, {speed:g} times those of this run"
        yield from _too_slow(result)
    elif preset.note:
        yield preset.note


_LOST = 0.01
"""Share of a run that the simulation may lose without a word."""


def _too_slow(result: BenchResult) -> Iterator[str]:
    """Say so where the server's machine could not keep the pace, which makes all times longer."""
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


def _speed(result: BenchResult) -> float:
    """How many times as fast as the deployment the server is; 1 for a real one."""
    return float((result.server.get("simulation") or {}).get("speed", 1.0))


def _mean(row: _PublishedRow, point: BenchPoint) -> float | None:
    runs = [run.figures for run in point.counted_runs if run.figures.completed]
    seen = [value for figures in runs if (value := row.measured(figures)) is not None]
    return sum(seen) / len(seen) if seen else None
