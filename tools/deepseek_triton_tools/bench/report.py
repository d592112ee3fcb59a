"""The report of one or several results as one HTML page, which needs no network, and what to know before they are
believed.

A colour is a CSS variable of the page (`var(--series-1)`), which the page's script replaces by the one of the scheme.
What all of plotly's pictures have in common stands in templates/report.html.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

from deepseek_triton_tools.bench.result import BenchPoint, BenchResult, BenchRun
from deepseek_triton_tools.bench.result_tables import number_text, result_note, result_tables
from deepseek_triton_tools.bench.workload import LoadPoint
from deepseek_triton_tools.host.whole_file import whole_file
from deepseek_triton_tools.pages import install_extra
from deepseek_triton_tools.text_templates import filled
from deepseek_triton_tools.tool_errors import InstallationError

Json: TypeAlias = dict[str, Any]

_NUM_COLORS = 8
"""The page has that many colours for series; then they begin anew."""

_LATE_MS, _LATE_SHARE = 10.0, 0.01
"""A client that sent later than both was the limit. The share is of the median end-to-end latency."""
# A template and the first token are the same in all prompts.
_CACHED_SHARE = 0.03
_SERVER_FACTS = {
    "checkpoint": "Checkpoint",
    "engine": "Engine",
    "engine_version": "Engine version",
    "simulation": "Simulation",
    "max_seq_len": "Longest sequence",
}
"""Those of the server's facts that say something about its speed, and their titles."""
_LATENCIES = {
    "ttft_ms": "Time to first token (TTFT), ms",
    "tpot_ms": "Time per output token (TPOT), ms",
    "e2el_ms": "End-to-end latency (E2EL), ms",
}
_WIDE = 30
"""An axis is logarithmic when its largest value is so many times the smallest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedResult:
    """A result as pictures name it."""

    name: str
    result: BenchResult

    @property
    def measured(self) -> list[BenchPoint]:
        """The points that can be drawn, by rising load: of each, some request was completed."""
        points = [point for point in self.result.points if any(run.figures.completed for run in point.counted_runs)]
        return sorted(points, key=lambda point: load_order(point.load))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedPoint:
    """The published figures of a preset, in output tokens a second."""

    tps_user: float
    """The mean over requests of output tokens / end-to-end latency: `Figures.user_throughput`."""
    tps_gpu: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpread:
    """A figure over the repeated runs of one load."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportPicture:
    title: str
    alt: str
    """The picture in words, for those who do not see it."""
    figure: Json
    """Plotly's `data` and `layout`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureSection:
    """A part of the page: its pictures side by side, or one at a time, which the reader chooses by its title."""

    title: str
    note: str
    pictures: Sequence[ReportPicture]
    names: Sequence[str] = ()
    """Those of the colours, in their order."""
    is_choice: bool = False


def write_report(path: Path, results: Sequence[NamedResult], expected: Sequence[ExpectedPoint] = ()) -> None:
    """Write the page, plotly's script included, in the place of a file that is there, or leave that as it is.

    :param results: at least one, each with another name.
    :raises InstallationError: without plotly.
    :raises ToolError: when it can't be written.
    """
    try:
        from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]
    except ModuleNotFoundError as error:
        raise InstallationError(f"the report's pictures need plotly; {install_extra('bench')}") from error

    models = ", ".join(dict.fromkeys(named.result.served_model for named in results))
    sections = list(_sections(results, expected)) if any(named.measured for named in results) else []
    pictures = [picture for section in sections for picture in section.pictures]
    values = {
        "title": escape(f"Benchmark of {models}"),
        "warnings": "".join(f"<p class=warning>{escape(text)}</p>\n" for text in report_warnings(results)),
        "tables": "\n".join(_tables(results)),
        "sections": "\n".join(_section(section, pictures.index(section.pictures[0])) for section in sections),
        "plotly": get_plotlyjs(),
        # "</script>" in a name would end the script.
        "pictures": json.dumps([each.figure for each in pictures], allow_nan=False).replace("<", "\\u003c"),
    }
    page = filled(__package__, "report.html", values)
    with whole_file(path) as file:
        file.write(page)


def report_warnings(results: Sequence[NamedResult]) -> Iterator[str]:
    """Say where requests failed, where the server knew random prompts, and where this client was slower than the load
    that it was to send."""
    for named in results:
        for point in named.result.points:
            where = f"{named.name}, {point.load.label}"
            runs = [run.figures for run in point.runs]
            failed = sum(one.failed for one in runs)
            sent = failed + sum(one.completed + one.cancelled for one in runs)
            errors = [(count, text) for one in runs for text, count in one.errors.items()]
            if failed or errors:
                why = f"; most often: {max(errors)[1]}" if errors else ""
                ended = f"{failed:,} of {sent:,} requests failed" if failed else "the server cancelled requests"
                yield f"{where}: {ended}{why}"
            if short := sum(one.short for one in runs):
                yield f"{where}: {short:,} answers are shorter than was asked for; does the server limit max_tokens?"
            # No random prompt begins as another one does, unless the label of the dataset names turns or prefixes.
            if re.fullmatch(r"random [\d±/-]+", named.result.dataset):
                share = sum(one.total_cached_tokens for one in runs) / max(
                    1, sum(one.total_input_tokens for one in runs)
                )
                if share > _CACHED_SHARE:
                    yield f"{where}: the server had {share:.0%} of the prompts in its cache, although they are random"
    for named in results:
        runs_of_all = [(point.load.label, run.figures) for point in named.result.points for run in point.runs]
        late = [
            (load, one.lag_ms.p99)
            for load, one in runs_of_all
            if one.lag_ms.p99 > max(_LATE_MS, _LATE_SHARE * one.e2el_ms.p50)
        ]
        busy = [(load, one.client_delay_ms) for load, one in runs_of_all if one.client_delay_ms > _LATE_MS]
        if late:
            most_ms = number_text(max(ms for _, ms in late))
            yield (
                f"{named.name}: this client, not the server, was the limit at {'; '.join(dict(late))}: it sent "
                f"requests up to {most_ms} ms late (99th percentile). Give it more cores or processes."
            )
        if busy:
            yield (
                f"{named.name}: this client was busy at {'; '.join(dict(busy))}: times are exact to "
                f"{number_text(max(ms for _, ms in busy))} ms only; give it more cores"
            )


# --- Tables ---


def _tables(results: Sequence[NamedResult]) -> Iterator[str]:
    """Yield what was run, a row for each fact that a result has and a column for each result; then the figures."""
    columns = [_facts(named.result) for named in results]
    rows = [
        [name, *(column.get(name, "-") for column in columns)]
        for name in dict.fromkeys(name for column in columns for name in column)
    ]
    yield _html_table("What was run", "facts", ["", *(named.name for named in results)], rows)
    for named in results:
        for table in result_tables(named.result):
            title = f"{escape(named.name)}: {table.title.partition(':')[0]}"
            yield _html_table(title, "figures", table.headings, table.rows, result_note(named.result))


def _facts(result: BenchResult) -> dict[str, str]:
    facts: dict[str, Any] = {
        "Model": result.served_model,
        "Dataset": result.dataset,
        "Preset": result.preset,
        "Date": result.date,
        "Servers": ", ".join(result.urls),
        "Endpoint": result.endpoint,
        "GPUs": "not known" if result.gpus is None else result.gpus,
        "SLO": str(result.slo),
    }
    for name, title in _SERVER_FACTS.items():
        value = result.server.get(name, "")
        facts[title] = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, Mapping) else value
    return {name: str(value) for name, value in {**facts, "Command": result.command}.items() if value}


def _html_table(title: str, kind: str, headings: Sequence[str], rows: Sequence[Sequence[str]], note: str = "") -> str:
    """Return a part of the page with a table, of which the first cell of a row is a heading.

    :param kind: a class of its style: facts or figures.
    """
    head = "".join(f"<th scope=col>{escape(heading)}</th>" for heading in headings)
    body = "".join(
        f"<tr><th scope=row>{escape(first)}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>\n"
        for first, *cells in rows
    )
    return (
        f"<section>\n<h2>{title}</h2>\n{f'<p class=note>{escape(note)}</p>' if note else ''}\n"
        f'<div class=scroll tabindex=0 role=region aria-label="{title}"><table class={kind}>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody>\n</table></div>\n</section>"
    )


# --- Pictures ---


def _section(section: PictureSection, first: int) -> str:
    """:param first: the number of its first picture among those of the page."""
    places = [
        f'<div class=picture role=img data-picture={number} style="height: {picture.figure["layout"]["height"]}px" '
        f'aria-label="{escape(picture.alt)}"></div>'
        for number, picture in enumerate(section.pictures, first)
    ]
    if section.is_choice:
        options = "".join(
            f'<option value={number} data-alt="{escape(picture.alt)}">{escape(picture.title)}</option>'
            for number, picture in enumerate(section.pictures, first)
        )
        head = f"<p><label for=run>Run</label> <select id=run>{options}</select></p>"
        figures = f"<figure>{places[0]}</figure>"
    else:
        keys = "".join(
            f'<li style="--color: {series_color(number)}">{escape(name)}</li>'
            for number, name in enumerate(section.names)
        )
        head = f"<ul class=legend>{keys}</ul>" if len(section.names) > 1 else ""
        figures = "".join(
            f"<figure>{f'<figcaption>{escape(picture.title)}</figcaption>' if len(places) > 1 else ''}{place}</figure>"
            for picture, place in zip(section.pictures, places, strict=True)
        )
    return (
        f"<section>\n<h2>{escape(section.title)}</h2>\n<p class=note>{escape(section.note)}</p>\n{head}\n"
        f"<div class=pictures>{figures}</div>\n</section>"
    )


def _sections(results: Sequence[NamedResult], expected: Sequence[ExpectedPoint]) -> Iterator[PictureSection]:
    share = share_of(results)
    names = [named.name for named in results]
    is_repeated = any(len(point.counted_runs) > 1 for named in results for point in named.result.points)
    means = "Of repeated runs, a point is the mean, and its bars reach from the lowest to the highest."
    notes = [
        "Up and right is better. A point is one load; its label is the concurrency, or the request rate.",
        "The line is the Pareto front; a hollow point is behind it.",
        "Throughput per user is the mean over requests of output tokens / end-to-end latency.",
    ]
    if share == "address":
        notes.append("Throughput is per address, because the number of GPUs is not known: give it with --gpus.")
        if expected:
            notes.append("The expected figures are per GPU, so they are left out.")
    if is_repeated:
        notes.append(means)
    front = pareto_picture(results, expected)
    yield PictureSection(title=front.title, note=" ".join(notes), pictures=[front], names=names)
    if len({point.load for named in results for point in named.measured}) > 1:
        note = "Solid: the median. Dotted: the 99th percentile." + (f" {means}" if is_repeated else "")
        pictures = list(latency_pictures(results))
        yield PictureSection(title="Latency over throughput", note=note, pictures=pictures, names=names)
    if runs := timeline_pictures(results):
        note = "Requests/s: dotted are those sent, solid those ended, red those failed."
        yield PictureSection(title="Timeline", note=note, pictures=runs, is_choice=True)


def pareto_picture(results: Sequence[NamedResult], expected: Sequence[ExpectedPoint] = ()) -> ReportPicture:
    """Throughput per user over throughput per GPU. The front of each result is a line, the points behind it are hollow.
    Expected points are left out where throughput is per address."""
    share = share_of(results)
    data: list[Json] = []
    fronts = []
    for number, named in enumerate(results):
        points, color = named.measured, series_color(number)
        users, shares = _spreads(points, "user_throughput"), _spreads(points, "output_throughput", _parts(named, share))
        front = pareto_front([(x.mean, y.mean) for x, y in zip(users, shares, strict=True)])
        line = {
            "type": "scatter",
            "mode": "lines",
            "x": [users[n].mean for n in front],
            "y": [shares[n].mean for n in front],
            "line": {"color": color, "width": 2},
            "hoverinfo": "skip",
        }
        symbols = ["circle" if n in front else "circle-open" for n in range(len(points))]
        marks = {
            "mode": "markers+text",
            "marker": {"color": color, "size": 9, "symbol": symbols},
            "textfont": {"color": color},
            "hovertemplate": f"%{{hovertext}}<br>%{{x:,.4~r}} tok/s/user<br>%{{y:,.4~r}} tok/s/{share}"
            "<extra>%{fullData.name}</extra>",
        }
        places = ["top right" if n in front else "bottom left" for n in range(len(points))]
        data += [line, _trace(named.name, points, users, shares, color) | marks | {"textposition": places}]
        fronts += [
            f"{named.name}, {points[n].load.label}: {number_text(users[n].mean)} and {number_text(shares[n].mean)}"
            for n in front
        ]
    if expected and share == "GPU":
        # First, because a label gives way to those before it.
        data.insert(0, _expected_points(expected, max(x for trace in data for x in trace["x"])))
    return ReportPicture(
        title=f"Throughput per user and per {share}",
        alt=f"Scatter plot. Output tokens a second for each user and for each {share} on the Pareto front: "
        + ("; ".join(fronts) or "no point")
        + ".",
        figure={
            "data": data,
            "layout": picture_layout("Output tokens/s per user", f"Output tokens/s per {share}", height=460),
        },
    )


def _expected_points(expected: Sequence[ExpectedPoint], most_tps_user: float) -> Json:
    """Their labels point to the middle of the picture."""
    widest = max(most_tps_user, *(point.tps_user for point in expected))
    return {
        "type": "scatter",
        "mode": "markers+text",
        "name": "expected",
        "x": [point.tps_user for point in expected],
        "y": [point.tps_gpu for point in expected],
        "text": ["published"] * len(expected),
        "textposition": [f"top {'left' if 2 * point.tps_user > widest else 'right'}" for point in expected],
        "marker": {"symbol": "star", "size": 12, "color": "var(--quiet)"},
        "hovertemplate": "expected: %{text}<br>%{x:,.4~r} tok/s/user<br>%{y:,.4~r} tok/s/GPU<extra></extra>",
    }


def latency_pictures(results: Sequence[NamedResult]) -> Iterator[ReportPicture]:
    """A picture for each latency that was measured: the median and the 99th percentile over the throughput."""
    share = share_of(results)
    for figure, title in _LATENCIES.items():
        data: list[Json] = []
        for number, named in enumerate(results):
            color, points = series_color(number), [p for p in named.measured if spread(p, f"{figure}.p50")]
            x = _spreads(points, "output_throughput", _parts(named, share))
            for percentile, dash in (("p50", "solid"), ("p99", "dot")):
                style: Json = {
                    "mode": "lines+markers",
                    "line": {"color": color, "width": 2, "dash": dash},
                    "marker": {"color": color, "size": 7, "symbol": "circle" if dash == "solid" else "circle-open"},
                    "hovertemplate": f"%{{hovertext}}<br>{percentile}: %{{y:,.4~r}} ms"
                    "<extra>%{fullData.name}</extra>",
                }
                if percentile == "p99":
                    style |= {"textposition": "top center", "textfont": {"color": color}, "mode": "lines+markers+text"}
                trace = _trace(named.name, points, x, _spreads(points, f"{figure}.{percentile}"), color)
                data += [trace | style] if points else []
        if not data:
            continue
        low, high = min(min(trace["y"]) for trace in data), max(max(trace["y"]) for trace in data)
        layout = picture_layout(f"Output tokens/s per {share}", "", height=300)
        if 0 < _WIDE * low <= high:
            layout["yaxis"] |= {"type": "log", "dtick": "D2"}
        yield ReportPicture(
            title=title,
            alt=f"Line plot of the median and the 99th percentile over the throughput per {share}: "
            f"from {number_text(low)} to {number_text(high)} ms. The table has every figure.",
            figure={"data": data, "layout": layout},
        )


def _trace(name: str, points: Sequence[BenchPoint], x: Sequence[RunSpread], y: Sequence[RunSpread], color: str) -> Json:
    """The means of the points, with bars from the lowest run to the highest where a load was run again."""
    trace: Json = {
        "type": "scatter",
        "name": escape(name, quote=False),
        "text": [short_load(point.load) for point in points],
        "cliponaxis": False,
        "hovertext": [
            point.label + (f", mean of {number} runs" if (number := len(point.counted_runs)) > 1 else "")
            for point in points
        ],
    }
    for axis, values in (("x", x), ("y", y)):
        trace[axis] = [value.mean for value in values]
        if any(value.high > value.low for value in values):
            trace[f"error_{axis}"] = {
                "type": "data",
                "symmetric": False,
                "array": [value.high - value.mean for value in values],
                "arrayminus": [value.mean - value.low for value in values],
                "color": color,
                "thickness": 1,
                "width": 3,
            }
    return trace


def timeline_pictures(results: Sequence[NamedResult]) -> list[ReportPicture]:
    """A picture for each run that has a timeline: what was under way, tokens a second, and requests a second."""
    pictures = []
    for index, named in enumerate(results):
        for point in named.result.points:
            for number, run in enumerate(point.runs, 1):
                parts = {
                    named.name: len(results) > 1,
                    point.load.label: True,
                    f"run {number}": len(point.runs) > 1,
                    "interrupted": run.interrupted,
                }
                title = ", ".join(part for part, is_shown in parts.items() if is_shown)
                if run.timeline:
                    pictures.append(_timeline_picture(title, run, series_color(index)))
    return pictures


def _timeline_picture(title: str, run: BenchRun, color: str) -> ReportPicture:
    bins = run.timeline
    # The last bin is as wide as the one before, and a single one as long as the run.
    widths = [later.at_s - each.at_s for each, later in pairwise(bins)]
    widths.append(widths[-1] if widths else run.figures.duration_s or 1.0)

    def rates(count: str) -> list[float]:
        return [getattr(one, count) / width for one, width in zip(bins, widths, strict=True)]

    thick = {"color": color, "width": 2}
    lines: dict[str, tuple[str, list[float], Json]] = {
        "in flight": ("y", [one.inflight for one in bins], thick),
        "tokens/s": ("y2", rates("output_tokens"), thick),
        "sent/s": ("y3", rates("requests_sent"), {"color": "var(--quiet)", "dash": "dot"}),
        "ended/s": ("y3", rates("requests_ended"), thick),
    }
    if failed := sum(one.failed for one in bins):
        lines["failed/s"] = ("y3", rates("failed"), {"color": "var(--error)"})
    # A step needs its end: the last value is repeated there.
    times = [*(one.at_s for one in bins), bins[-1].at_s + widths[-1]]
    data = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": label,
            "x": times,
            "y": [*values, values[-1]],
            "yaxis": axis,
            "line": {"shape": "hv"} | line,
            "hovertemplate": f"%{{y:,.4~r}} {label}<extra></extra>",
        }
        for label, (axis, values, line) in lines.items()
    ]
    layout = picture_layout("Seconds since the start", "Requests in flight", height=560)
    layout |= {
        "hovermode": "x",
        "hoversubplots": "axis",
        "grid": {"rows": 3, "columns": 1, "subplots": [["xy"], ["xy2"], ["xy3"]], "ygap": 0.2},
        "yaxis2": {"title": {"text": "Output tokens/s"}},
        "yaxis3": {"title": {"text": "Requests/s"}},
    }
    inflight, tokens = lines["in flight"][1], lines["tokens/s"][1]
    return ReportPicture(
        title=title,
        alt=f"Lines over {number_text(times[-1] - times[0])} seconds: at most {number_text(max(inflight))} requests in "
        f"flight, at most {number_text(max(tokens))} output tokens a second, {failed:,} failed requests.",
        figure={"data": data, "layout": layout},
    )


# --- Points ---


def spread(point: BenchPoint, figure: str, parts: float = 1) -> RunSpread | None:
    """Return the figure, as `Figures.value` takes it, divided by `parts`. None where no run has it, as one without a
    completed request has none."""
    runs = [run.figures for run in point.counted_runs if run.figures.completed]
    values = [value / parts for figures in runs if (value := figures.value(figure)) is not None]
    return RunSpread(mean=math.fsum(values) / len(values), low=min(values), high=max(values)) if values else None


def _spreads(points: Sequence[BenchPoint], figure: str, parts: float = 1) -> list[RunSpread]:
    """The spread at each point that has the figure."""
    return [value for point in points if (value := spread(point, figure, parts))]


def share_of(results: Sequence[NamedResult]) -> str:
    """ "GPU", or "address" where a result does not say how many GPUs there were: all are then divided by addresses."""
    return "address" if any(named.result.gpus is None for named in results) else "GPU"


def _parts(named: NamedResult, share: str) -> int:
    return len(named.result.urls) if share == "address" else named.result.gpus or 1


def short_load(load: LoadPoint) -> str:
    """A label for a point: the concurrency as a plain number, a rate as "4/s", and "16 at once"."""
    if load.rate is not None:
        return f"{load.num_requests} at once" if load.at_once else f"{load.rate:g}/s"
    return "trace" if load.concurrency is None else str(load.concurrency)


def load_order(load: LoadPoint) -> tuple[float, int, int]:
    """Loads from small to large."""
    return (load.rate or 0.0, load.concurrency or 0, load.num_requests)


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return the numbers of the points than which none is better in one coordinate and at least as good in the other,
    by rising first coordinate. Of equal points the first counts."""
    front: list[int] = []
    for number in sorted(range(len(points)), key=lambda n: (-points[n][0], -points[n][1])):
        if not front or points[number][1] > points[front[-1]][1]:
            front.append(number)
    return front[::-1]


def series_color(number: int) -> str:
    """The colour of the series of this number, from 0."""
    return f"var(--series-{number % _NUM_COLORS + 1})"


def picture_layout(x_title: str, y_title: str, *, height: int) -> Json:
    """Return plotly's `layout` of a picture with axes from 0."""
    return {"height": height, "xaxis": {"title": {"text": x_title}}, "yaxis": {"title": {"text": y_title}}}
