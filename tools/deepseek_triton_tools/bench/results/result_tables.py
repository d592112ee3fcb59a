"""Our own tables of a result: a row for each point of a sweep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from deepseek_triton_tools.bench.results.bench_result import BenchPoint, BenchResult
from deepseek_triton_tools.bench.results.main_figures import MAIN_FIGURES, Estimate, MainFigure, estimate
from deepseek_triton_tools.terminal.tables import Table


def result_tables(result: BenchResult) -> Iterator[Table]:
    """A table of throughputs and one of latencies, each with the figures that at least one point has."""
    about = f"{result.model}, {result.dataset}" + (f", {result.gpus} GPUs" if result.gpus else "")
    for title, is_latency in ((f"Throughput: {about}", False), ("Latencies in ms", True)):
        shown = [
            figure
            for figure in MAIN_FIGURES
            if figure.is_latency == is_latency and any(map(figure.of_runs, result.points))
        ]
        yield Table(
            title=title,
            headings=("load", *(figure.heading for figure in shown)),
            rows=[_row(point, shown) for point in result.points],
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


def _row(point: BenchPoint, shown: Sequence[MainFigure]) -> list[str]:
    measured = (figure.of_runs(point) for figure in shown)
    return [point.label, *(estimate_text(estimate(values)) if values else "-" for values in measured)]
