"""The benchmark runs that NVIDIA's and vLLM's guides publish, by name, and their figures beside measured ones."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from deepseek_triton_tools.bench.result import BenchResult, from_document
from deepseek_triton_tools.bench.workload import LoadPoint
from deepseek_triton_tools.terminal.tables import Table
from deepseek_triton_tools.tool_errors import ToolError

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
    import yaml

    rows: dict[str, Any] = yaml.safe_load(_FILE.read_text("utf-8"))
    return {name: from_document(BenchPreset, row, name) for name, row in rows.items()}


def preset(name: str) -> BenchPreset:
    """:raises ToolError: for an unknown name; it names all."""
    if name in presets():
        return presets()[name]
    near = difflib.get_close_matches(name, presets(), n=1)
    known = f"did you mean {near[0]}?" if near else f"there are {', '.join(presets())}"
    raise ToolError(f"--preset {name}: there is none of this name; {known}", exit_code=2)


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
    simulation = result.server.get("simulation")
    if not simulation:
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
