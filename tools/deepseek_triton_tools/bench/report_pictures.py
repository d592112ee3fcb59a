"""The pictures of the HTML report, as plotly's figures.

A colour is a CSS variable of the page (`var(--series-1)`), which the page's script replaces by the one of the scheme.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

from deepseek_triton_tools.bench.figures import TimelineBin
from deepseek_triton_tools.bench.report_points import (
    LATENCIES,
    ExpectedPoint,
    Latency,
    NamedResult,
    RunSpread,
    in_ms_or_s,
    is_wide,
    load_order,
    load_title,
    pareto_front,
    readable,
    share_of,
    short_load,
    spread,
    throughput_per,
)
from deepseek_triton_tools.bench.result import BenchPoint, BenchRun

Json: TypeAlias = dict[str, Any]

NUM_COLORS = 8
"""The page has that many colours for results; then they begin anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportPicture:
    """One picture of the page."""

    title: str
    alt: str
    """The picture in words, for those who do not see it."""
    figure: Json
    """Plotly's `data` and `layout`."""


def series_color(number: int) -> str:
    """The colour of the result of this number, from 0."""
    return f"var(--series-{number % NUM_COLORS + 1})"


def pareto_picture(results: Sequence[NamedResult], expected: Sequence[ExpectedPoint] = ()) -> ReportPicture:
    """Throughput per user over throughput per GPU. The front of each result is a line, the points behind it are hollow.
    Expected points are left out where throughput is per server."""
    share = share_of(results)
    data: list[Json] = []
    fronts = []
    for number, named in enumerate(results):
        points = named.measured
        users = _spreads([spread(point, lambda figures: figures.user_throughput) for point in points])
        shares = _spreads([spread(point, throughput_per(share, named.result)) for point in points])
        front = pareto_front([(x.mean, y.mean) for x, y in zip(users, shares, strict=True)])
        color = series_color(number)
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "x": [users[n].mean for n in front],
                "y": [shares[n].mean for n in front],
                "line": {"color": color, "width": 2},
                "hoverinfo": "skip",
            }
        )
        data.append(
            _points(named.name, color, points, users, shares)
            | {
                "marker": {
                    "color": color,
                    "size": 9,
                    "symbol": ["circle" if n in front else "circle-open" for n in range(len(points))],
                },
                "textposition": ["top right" if n in front else "bottom left" for n in range(len(points))],
                "hovertemplate": f"%{{hovertext}}<br>%{{x:,.4~r}} tok/s/user<br>%{{y:,.4~r}} tok/s/{share}"
                "<extra>%{fullData.name}</extra>",
            }
        )
        fronts += [
            f"{named.name}, {points[n].load.label}: {readable(users[n].mean)} and {readable(shares[n].mean)}"
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
    """Their names, which are long, point to the middle of the picture."""
    widest = max(most_tps_user, *(point.tps_user for point in expected))
    return {
        "type": "scatter",
        "mode": "markers+text",
        "name": "expected",
        "x": [point.tps_user for point in expected],
        "y": [point.tps_gpu for point in expected],
        "text": [html.escape(point.name, quote=False) for point in expected],
        "textposition": [f"top {'left' if 2 * point.tps_user > widest else 'right'}" for point in expected],
        "textfont": {"color": "var(--quiet)"},
        "marker": {"symbol": "star", "size": 12, "color": "var(--quiet)"},
        "hovertemplate": "expected: %{text}<br>%{x:,.4~r} tok/s/user<br>%{y:,.4~r} tok/s/GPU<extra></extra>",
    }


def latency_over_throughput(results: Sequence[NamedResult]) -> list[ReportPicture]:
    """A picture for each latency: the median and the 99th percentile over the throughput of output tokens."""
    share = share_of(results)
    pictures = []
    for latency in LATENCIES:
        data, unit, is_log = [], "ms", False
        for lines in _latency_lines(results, latency):
            x = _spreads([spread(point, throughput_per(share, lines.named.result)) for point in lines.points])
            data.append(_latency_trace(lines, x=[value.mean for value in x]) | _error_bars("x", x, lines.color))
            unit, is_log = lines.unit, lines.is_log
        if data:
            layout = picture_layout(f"Output tokens/s per {share}", "", height=300, is_log=is_log)
            pictures.append(_latency_picture(latency, f"the throughput per {share}", data, layout, unit))
    return pictures


def latency_over_load(results: Sequence[NamedResult]) -> list[ReportPicture]:
    """A picture for each latency: the median and the 99th percentile over the loads, evenly spaced."""
    loads = sorted({point.load for named in results for point in named.measured}, key=load_order)
    pictures = []
    for latency in LATENCIES:
        data, unit, is_log = [], "ms", False
        for lines in _latency_lines(results, latency):
            data.append(_latency_trace(lines, x=[short_load(point.load) for point in lines.points], labels=False))
            unit, is_log = lines.unit, lines.is_log
        if data:
            layout = picture_layout("", "", height=300, is_log=is_log)
            labels = list(dict.fromkeys(map(short_load, loads)))
            kind = {"type": "category", "categoryorder": "array", "categoryarray": labels}
            layout["xaxis"] = _axis(load_title(loads), kind)
            pictures.append(_latency_picture(latency, "the load", data, layout, unit))
    return pictures


@dataclass(frozen=True, slots=True, kw_only=True)
class _LatencyLine:
    """One percentile of one result."""

    named: NamedResult
    points: list[BenchPoint]
    percentile: str
    values: list[RunSpread]
    """In `unit`."""
    unit: str
    is_log: bool
    color: str


def _latency_lines(results: Sequence[NamedResult], latency: Latency) -> Iterator[_LatencyLine]:
    """The lines of a picture; none where the latency was not measured."""
    found = []
    for number, named in enumerate(results):
        for percentile in ("p50", "p99"):
            figure = latency.percentile(percentile)
            by_load = sorted(named.measured, key=lambda point: load_order(point.load))
            points = [point for point in by_load if spread(point, figure)]
            if points:
                found.append((number, named, points, percentile, _spreads([spread(point, figure) for point in points])))
    ends = [end for *_, values in found for value in values for end in (value.low, value.high)]
    divisor, unit = in_ms_or_s(ends)
    for number, named, points, percentile, values in found:
        yield _LatencyLine(
            named=named,
            points=points,
            percentile=percentile,
            values=[
                RunSpread(mean=value.mean / divisor, low=value.low / divisor, high=value.high / divisor)
                for value in values
            ],
            unit=unit,
            is_log=is_wide(ends),
            color=series_color(number),
        )


def _latency_trace(line: _LatencyLine, *, x: Sequence[float | str], labels: bool = True) -> Json:
    is_tail = line.percentile == "p99"
    texts = {
        "mode": "lines+markers+text",
        "text": [short_load(point.load) for point in line.points],
        "textposition": "top center",
        "textfont": {"color": line.color, "size": 11},
    }
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": html.escape(line.named.name, quote=False),
        "x": list(x),
        "y": [value.mean for value in line.values],
        "cliponaxis": False,
        "hovertext": [_hover(point) for point in line.points],
        "hovertemplate": f"%{{hovertext}}<br>{line.percentile}: %{{y:,.4~r}} {line.unit}"
        "<extra>%{fullData.name}</extra>",
        "line": {"color": line.color, "width": 2, "dash": "dot" if is_tail else "solid"},
        "marker": {"color": line.color, "size": 7, "symbol": "circle-open" if is_tail else "circle"},
        **_error_bars("y", line.values, line.color),
        **(texts if labels and is_tail else {}),
    }


def _latency_picture(latency: Latency, over: str, data: list[Json], layout: Json, unit: str) -> ReportPicture:
    lowest, highest = min(min(trace["y"]) for trace in data), max(max(trace["y"]) for trace in data)
    return ReportPicture(
        title=f"{latency.title} ({latency.name}), {unit}",
        alt=f"Line plot of the median and the 99th percentile over {over}: "
        f"from {readable(lowest)} to {readable(highest)} {unit}. The table has every figure.",
        figure={"data": data, "layout": layout},
    )


def timeline_pictures(results: Sequence[NamedResult]) -> list[ReportPicture]:
    """A picture for each run that has a timeline: what was under way, tokens a second, and requests a second."""
    return [
        _timeline_picture(_run_name(named, point, number, several=len(results) > 1), run, series_color(index))
        for index, named in enumerate(results)
        for point in named.result.points
        for number, run in enumerate(point.runs, 1)
        if run.timeline
    ]


def _run_name(named: NamedResult, point: BenchPoint, number: int, *, several: bool) -> str:
    parts = [named.name] if several else []
    parts.append(point.load.label)
    if len(point.runs) > 1:
        parts.append(f"run {number}")
    if point.runs[number - 1].interrupted:
        parts.append("interrupted")
    return ", ".join(parts)


def _timeline_picture(name: str, run: BenchRun, color: str) -> ReportPicture:
    bins, widths = run.timeline, _widths(run)
    failed = sum(one.failed for one in bins)
    panels: list[tuple[str, list[tuple[str, list[float], Json]]]] = [
        ("Requests in flight", [("in flight", [b.inflight for b in bins], {"color": color, "width": 2})]),
        ("Output tokens/s", [("tokens/s", _rates(bins, widths, "output_tokens"), {"color": color, "width": 2})]),
        (
            "Requests/s",
            [
                ("sent/s", _rates(bins, widths, "requests_sent"), {"color": "var(--quiet)", "dash": "dot"}),
                ("ended/s", _rates(bins, widths, "requests_ended"), {"color": color, "width": 2}),
                *([("failed/s", _rates(bins, widths, "failed"), {"color": "var(--error)"})] if failed else []),
            ],
        ),
    ]
    # A step needs its end: the last value is repeated there.
    times = [*(b.at_s for b in bins), bins[-1].at_s + widths[-1]]
    layout = picture_layout("Seconds since the start", "", height=560)
    layout |= {"hovermode": "x", "hoversubplots": "axis", "annotations": []}
    layout["xaxis"]["anchor"] = "y3"
    data = []
    for number, (title, lines) in enumerate(panels, 1):
        top = 1 - (number - 1) * 0.36
        axis = "y" if number == 1 else f"y{number}"
        layout[axis.replace("y", "yaxis")] = _axis("") | {"domain": [top - 0.24, top], "nticks": 4}
        layout["annotations"].append(
            {
                "text": title,
                "x": 0,
                "y": top,
                "xref": "paper",
                "yref": "paper",
                "xanchor": "left",
                "yanchor": "bottom",
                "yshift": 4,
                "showarrow": False,
                "font": {"color": "var(--text)", "size": 13},
            }
        )
        for label, values, line in lines:
            data.append(
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
            )
    most, fastest = max(b.inflight for b in bins), max(panels[1][1][0][1])
    return ReportPicture(
        title=name,
        alt=f"Lines over {readable(times[-1] - times[0])} seconds: at most {readable(most)} requests in flight, "
        f"at most {readable(fastest)} output tokens a second, {failed:,} failed requests.",
        figure={"data": data, "layout": layout},
    )


def _widths(run: BenchRun) -> list[float]:
    """Seconds of each bin. The last one's is the one before's; a single one's is the run's duration."""
    starts = [one.at_s for one in run.timeline]
    widths = [end - start for start, end in pairwise(starts)]
    return [*widths, widths[-1] if widths else run.figures.duration_s or 1.0]


def _rates(bins: Sequence[TimelineBin], widths: Sequence[float], count: str) -> list[float]:
    return [getattr(one, count) / width for one, width in zip(bins, widths, strict=True)]


# --- What the pictures share ---


def _spreads(spreads: Sequence[RunSpread | None]) -> list[RunSpread]:
    """The same, where each point is known to have the figure."""
    return [value for value in spreads if value is not None]


def _points(
    name: str, color: str, points: Sequence[BenchPoint], x: Sequence[RunSpread], y: Sequence[RunSpread]
) -> Json:
    return {
        "type": "scatter",
        "mode": "markers+text",
        "name": html.escape(name, quote=False),
        "x": [value.mean for value in x],
        "y": [value.mean for value in y],
        "text": [short_load(point.load) for point in points],
        "textfont": {"color": color, "size": 12},
        "cliponaxis": False,
        "hovertext": [_hover(point) for point in points],
        **_error_bars("x", x, color),
        **_error_bars("y", y, color),
    }


def _hover(point: BenchPoint) -> str:
    number = len(point.counted_runs)
    return point.label + (f", mean of {number} runs" if number > 1 else "")


def _error_bars(axis: str, values: Sequence[RunSpread], color: str) -> Json:
    """From the lowest run to the highest; none where no load was run twice."""
    if all(value.high == value.low for value in values):
        return {}
    bars = {
        "type": "data",
        "symmetric": False,
        "array": [value.high - value.mean for value in values],
        "arrayminus": [value.mean - value.low for value in values],
        "color": color,
        "thickness": 1,
        "width": 3,
    }
    return {f"error_{axis}": bars}


def picture_layout(x_title: str, y_title: str, *, height: int, is_log: bool = False) -> Json:
    """Return plotly's `layout` of a picture with axes from 0, or with a logarithmic one."""
    return {
        "height": height,
        "showlegend": False,
        "paper_bgcolor": "rgba(0, 0, 0, 0)",
        "plot_bgcolor": "rgba(0, 0, 0, 0)",
        "margin": {"l": 8, "r": 24, "t": 24, "b": 8},
        "font": {"color": "var(--quiet)", "family": "system-ui, sans-serif", "size": 12},
        "hoverlabel": {"bgcolor": "var(--card)", "bordercolor": "var(--line)", "font": {"color": "var(--text)"}},
        "xaxis": _axis(x_title),
        "yaxis": _axis(y_title, _LOGARITHMIC if is_log else _FROM_ZERO),
    }


_FROM_ZERO: Json = {"rangemode": "tozero", "tickformat": ",~r"}
_LOGARITHMIC: Json = {"type": "log", "dtick": "D2", "tickformat": ",~r"}


def _axis(title: str, kind: Json = _FROM_ZERO) -> Json:
    return {
        "title": {"text": title, "standoff": 8},
        "automargin": True,
        "gridcolor": "var(--grid)",
        "linecolor": "var(--line)",
        "zerolinecolor": "var(--line)",
        "ticks": "",
        **kind,
    }
