"""The pictures of the HTML report, as plotly's figures.

A colour is a CSS variable of the page (`var(--series-1)`), which the page's script replaces by the one of the scheme.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
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
_FROM_ZERO: Json = {"rangemode": "tozero", "tickformat": ",~r"}
_LOGARITHMIC: Json = {"type": "log", "dtick": "D2", "tickformat": ",~r"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportPicture:
    """One picture of the page."""

    title: str
    alt: str
    """The picture in words, for those who do not see it."""
    figure: Json
    """Plotly's `data` and `layout`."""


# --- What the pictures share ---


def series_color(number: int) -> str:
    """The colour of the result of this number, from 0."""
    return f"var(--series-{number % NUM_COLORS + 1})"


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


def _trace(name: str, points: Sequence[BenchPoint], y: Sequence[RunSpread], color: str) -> Json:
    """A trace without the place of its points on the x axis."""
    runs = [len(point.counted_runs) for point in points]
    return {
        "type": "scatter",
        "name": html.escape(name, quote=False),
        "y": [value.mean for value in y],
        "cliponaxis": False,
        "hovertext": [
            point.label + (f", mean of {number} runs" if number > 1 else "")
            for point, number in zip(points, runs, strict=True)
        ],
        **_error_bars("y", y, color),
    }


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


def _spreads(points: Sequence[BenchPoint], figure: Callable[[Any], float | None]) -> list[RunSpread]:
    """The spread of the figure at each point that has it."""
    return [value for point in points if (value := spread(point, figure))]


# --- Throughput per user and per GPU ---


def pareto_picture(results: Sequence[NamedResult], expected: Sequence[ExpectedPoint] = ()) -> ReportPicture:
    """Throughput per user over throughput per GPU. The front of each result is a line, the points behind it are hollow.
    Expected points are left out where throughput is per server."""
    share = share_of(results)
    data: list[Json] = []
    fronts = []
    for number, named in enumerate(results):
        points, color = named.measured, series_color(number)
        users = _spreads(points, lambda figures: figures.user_throughput)
        shares = _spreads(points, throughput_per(share, named.result))
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
            "x": [value.mean for value in users],
            "text": [short_load(point.load) for point in points],
            "textfont": {"color": color, "size": 12},
            "textposition": ["top right" if n in front else "bottom left" for n in range(len(points))],
            "marker": {"color": color, "size": 9, "symbol": symbols},
            "hovertemplate": f"%{{hovertext}}<br>%{{x:,.4~r}} tok/s/user<br>%{{y:,.4~r}} tok/s/{share}"
            "<extra>%{fullData.name}</extra>",
        }
        data += [line, _trace(named.name, points, shares, color) | _error_bars("x", users, color) | marks]
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


# --- Latencies ---


def latency_over_throughput(results: Sequence[NamedResult]) -> list[ReportPicture]:
    """A picture for each latency: the median and the 99th percentile over the throughput of output tokens."""
    share = share_of(results)

    def places(named: NamedResult, points: Sequence[BenchPoint], color: str) -> Json:
        x = _spreads(points, throughput_per(share, named.result))
        return {"x": [value.mean for value in x], **_error_bars("x", x, color)}

    axis = _axis(f"Output tokens/s per {share}")
    return _latency_pictures(results, f"the throughput per {share}", axis, places, has_labels=True)


def latency_over_load(results: Sequence[NamedResult]) -> list[ReportPicture]:
    """A picture for each latency: the median and the 99th percentile over the loads, evenly spaced."""
    loads = sorted({point.load for named in results for point in named.measured}, key=load_order)
    labels = list(dict.fromkeys(map(short_load, loads)))
    axis = _axis(load_title(loads), {"type": "category", "categoryorder": "array", "categoryarray": labels})
    return _latency_pictures(
        results,
        "the load",
        axis,
        lambda _named, points, _color: {"x": [short_load(point.load) for point in points]},
        has_labels=False,
    )


def _latency_pictures(
    results: Sequence[NamedResult],
    over: str,
    x_axis: Json,
    places: Callable[[NamedResult, Sequence[BenchPoint], str], Json],
    *,
    has_labels: bool,
) -> list[ReportPicture]:
    """:param places: gives the place of a result's points on the x axis."""
    pictures = []
    for latency in LATENCIES:
        lines = [
            (number, named, percentile, points, _spreads(points, latency.percentile(percentile)))
            for number, named in enumerate(results)
            for percentile in ("p50", "p99")
            if (points := _points_with(latency, named))
        ]
        ends = [end for *_, values in lines for value in values for end in (value.low, value.high)]
        if not ends:
            continue
        divisor, unit = in_ms_or_s(ends)
        data = []
        for number, named, percentile, points, values in lines:
            scaled = [
                RunSpread(mean=value.mean / divisor, low=value.low / divisor, high=value.high / divisor)
                for value in values
            ]
            color = series_color(number)
            trace = _trace(named.name, points, scaled, color) | places(named, points, color)
            data.append(trace | _line_style(percentile, unit, color, points if has_labels else ()))
        lowest, highest = min(min(trace["y"]) for trace in data), max(max(trace["y"]) for trace in data)
        pictures.append(
            ReportPicture(
                title=f"{latency.title} ({latency.name}), {unit}",
                alt=f"Line plot of the median and the 99th percentile over {over}: "
                f"from {readable(lowest)} to {readable(highest)} {unit}. The table has every figure.",
                figure={
                    "data": data,
                    "layout": picture_layout("", "", height=300, is_log=is_wide(ends)) | {"xaxis": x_axis},
                },
            )
        )
    return pictures


def _points_with(latency: Latency, named: NamedResult) -> list[BenchPoint]:
    """Those in which it was measured, by rising load."""
    by_load = sorted(named.measured, key=lambda point: load_order(point.load))
    return [point for point in by_load if spread(point, latency.percentile("p50"))]


def _line_style(percentile: str, unit: str, color: str, labelled: Sequence[BenchPoint]) -> Json:
    """:param labelled: the points that get a label, at the upper of the two lines."""
    is_tail = percentile == "p99"
    style: Json = {
        "mode": "lines+markers",
        "hovertemplate": f"%{{hovertext}}<br>{percentile}: %{{y:,.4~r}} {unit}<extra>%{{fullData.name}}</extra>",
        "line": {"color": color, "width": 2, "dash": "dot" if is_tail else "solid"},
        "marker": {"color": color, "size": 7, "symbol": "circle-open" if is_tail else "circle"},
    }
    if is_tail and labelled:
        style |= {
            "mode": "lines+markers+text",
            "text": [short_load(point.load) for point in labelled],
            "textposition": "top center",
            "textfont": {"color": color, "size": 11},
        }
    return style


# --- Timelines ---


def timeline_pictures(results: Sequence[NamedResult]) -> list[ReportPicture]:
    """A picture for each run that has a timeline: what was under way, tokens a second, and requests a second."""
    return [
        _timeline_picture(
            ", ".join(
                [
                    *([named.name] if len(results) > 1 else []),
                    point.load.label,
                    *([f"run {number}"] if len(point.runs) > 1 else []),
                    *(["interrupted"] if run.interrupted else []),
                ]
            ),
            run,
            series_color(index),
        )
        for index, named in enumerate(results)
        for point in named.result.points
        for number, run in enumerate(point.runs, 1)
        if run.timeline
    ]


def _timeline_picture(name: str, run: BenchRun, color: str) -> ReportPicture:
    bins = run.timeline
    # The last bin is as wide as the one before, and a single one as long as the run.
    widths = [later.at_s - each.at_s for each, later in pairwise(bins)]
    widths.append(widths[-1] if widths else run.figures.duration_s or 1.0)
    failed = sum(one.failed for one in bins)
    thick = {"color": color, "width": 2}
    requests: list[tuple[str, list[float], Json]] = [
        ("sent/s", _rates(bins, widths, "requests_sent"), {"color": "var(--quiet)", "dash": "dot"}),
        ("ended/s", _rates(bins, widths, "requests_ended"), thick),
    ]
    if failed:
        requests.append(("failed/s", _rates(bins, widths, "failed"), {"color": "var(--error)"}))
    inflight, tokens = [one.inflight for one in bins], _rates(bins, widths, "output_tokens")
    panels: dict[str, list[tuple[str, list[float], Json]]] = {
        "Requests in flight": [("in flight", inflight, thick)],
        "Output tokens/s": [("tokens/s", tokens, thick)],
        "Requests/s": requests,
    }
    # A step needs its end: the last value is repeated there.
    times = [*(one.at_s for one in bins), bins[-1].at_s + widths[-1]]
    layout = picture_layout("Seconds since the start", "", height=560)
    layout |= {"hovermode": "x", "hoversubplots": "axis", "annotations": []}
    layout["xaxis"]["anchor"] = "y3"
    data = []
    for number, (title, lines) in enumerate(panels.items()):
        top = 1 - number * 0.36
        axis = f"y{number + 1 if number else ''}"
        layout[axis.replace("y", "yaxis")] = _axis("") | {"domain": [top - 0.24, top], "nticks": 4}
        layout["annotations"].append(_panel_title(title, top))
        data += [
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
            for label, values, line in lines
        ]
    return ReportPicture(
        title=name,
        alt=f"Lines over {readable(times[-1] - times[0])} seconds: at most {readable(max(inflight))} requests in "
        f"flight, at most {readable(max(tokens))} output tokens a second, {failed:,} failed requests.",
        figure={"data": data, "layout": layout},
    )


def _rates(bins: Sequence[TimelineBin], widths: Sequence[float], count: str) -> list[float]:
    return [getattr(one, count) / width for one, width in zip(bins, widths, strict=True)]


def _panel_title(title: str, top: float) -> Json:
    """Plotly's annotation above a panel that ends at `top`."""
    place = {"x": 0, "y": top, "xref": "paper", "yref": "paper", "xanchor": "left", "yanchor": "bottom", "yshift": 4}
    return {"text": title, **place, "showarrow": False, "font": {"color": "var(--text)", "size": 13}}
