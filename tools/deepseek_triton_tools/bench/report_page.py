"""The report of one or several results: one HTML file with pictures and tables, which needs no network."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path

from deepseek_triton_tools.bench.report_pictures import (
    ReportPicture,
    latency_over_load,
    latency_over_throughput,
    pareto_picture,
    series_color,
    timeline_pictures,
)
from deepseek_triton_tools.bench.report_points import (
    LATENCIES,
    ExpectedPoint,
    FigureOf,
    NamedResult,
    readable,
    share_of,
    spread,
    throughput_per,
)
from deepseek_triton_tools.bench.result import BenchPoint, BenchResult
from deepseek_triton_tools.host.whole_file import whole_file
from deepseek_triton_tools.pages import install_extra
from deepseek_triton_tools.text_templates import filled
from deepseek_triton_tools.tool_errors import InstallationError

_LATE_MS = 10.0
_LATE_SHARE = 0.01
"""A client that sent later than both was the limit. The share is of the median end-to-end latency."""
_CACHED_SHARE = 0.03
"""A template and the first token are the same in all prompts."""
_NOTHING = "–"
"""The cell of a figure that there is not."""
_SERVER_FACTS = {
    "name": "Served model",
    "checkpoint": "Checkpoint",
    "engine": "Engine",
    "engine_version": "Engine version",
    "simulation": "Simulation",
    "max_seq_len": "Longest sequence",
}
"""Those of the server's facts that say something about its speed, and their titles."""


def write_report(path: Path, results: Sequence[NamedResult], expected: Sequence[ExpectedPoint] = ()) -> None:
    """Write the report in the place of a file that is there, or leave that as it is and raise ToolError.

    :param results: at least one, each with another name.
    """
    page = report_page(results, expected)
    with whole_file(path) as file:
        file.write(page)


def report_page(results: Sequence[NamedResult], expected: Sequence[ExpectedPoint] = ()) -> str:
    """The whole page, plotly's script included. Raises InstallationError without plotly."""
    pictures: list[ReportPicture] = []
    models = ", ".join(dict.fromkeys(str(named.result.server.get("name") or named.result.model) for named in results))
    return html_page(
        f"Benchmark of {models}",
        warnings="".join(f"<p class=warning>{escape(text)}</p>\n" for text in report_warnings(results)),
        facts=_facts_table(results),
        figures=_figures_table(results),
        sections="\n".join(_sections(results, expected, pictures)),
        pictures=pictures,
    )


def html_page(
    title: str, *, facts: str, figures: str, sections: str, pictures: Sequence[ReportPicture], warnings: str = ""
) -> str:
    """Return a page of HTML parts, plotly's script included. Raises InstallationError without plotly.

    :param pictures: those of the sections, in their order.
    """
    try:
        from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]
    except ModuleNotFoundError as error:
        raise InstallationError(f"the report's pictures need plotly; {install_extra('bench')}") from error

    document = json.dumps([picture.figure for picture in pictures], allow_nan=False)
    values = {
        "title": escape(title),
        "facts": facts,
        "warnings": warnings,
        "figures": figures,
        "sections": sections,
        "plotly": get_plotlyjs(),
        "pictures": document.replace("<", "\\u003c"),  # "</script>" in a name would end the script
    }
    return filled(__package__, "report.html", values)


def report_warnings(results: Sequence[NamedResult]) -> Iterator[str]:
    """Say where requests failed, where the server knew random prompts, and where this client was slower than the load
    that it was to send."""
    for named, point in _all_points(results):
        where = f"{named.name}, {point.load.label}"
        runs = [run.figures for run in point.runs]
        failed, sent = sum(one.failed for one in runs), sum(one.completed + one.failed + one.cancelled for one in runs)
        errors = [(count, text) for one in runs for text, count in one.errors.items()]
        if failed or errors:
            why = f"; most often: {max(errors)[1]}" if errors else ""
            ended = f"{failed:,} of {sent:,} requests failed" if failed else "the server cancelled requests"
            yield f"{where}: {ended}{why}"
        if short := sum(one.short for one in runs):
            yield f"{where}: {short:,} answers are shorter than was asked for; does the server limit max_tokens?"
        # No random prompt begins as another one does, unless the label of the dataset names turns or common prefixes.
        if re.fullmatch(r"random [\d±/-]+", named.result.dataset):
            cached = sum(one.total_cached_tokens for one in runs) / max(1, sum(one.total_input_tokens for one in runs))
            if cached > _CACHED_SHARE:
                yield f"{where}: the server had {cached:.0%} of the prompts in its cache, although they are random"
    for named in results:
        yield from _client_warnings(named)


def _client_warnings(named: NamedResult) -> Iterator[str]:
    """Each once for a result, with the worst figure."""
    runs = [(point.load.label, run.figures) for point in named.result.points for run in point.runs]
    late = [
        (load, figures.lag_ms.p99)
        for load, figures in runs
        if figures.lag_ms.p99 > max(_LATE_MS, _LATE_SHARE * figures.e2el_ms.p50)
    ]
    if late:
        loads, most_ms = _at_loads(late)
        yield (
            f"{named.name}: this client, not the server, was the limit at {loads}: it sent requests up to {most_ms} ms "
            "late (99th percentile). Give it more cores or processes."
        )
    busy = [(load, figures.client_delay_ms) for load, figures in runs if figures.client_delay_ms > _LATE_MS]
    if busy:
        loads, most_ms = _at_loads(busy)
        yield f"{named.name}: this client was busy at {loads}: times are exact to {most_ms} ms only; give it more cores"


def _at_loads(values: Sequence[tuple[str, float]]) -> tuple[str, str]:
    """Return the loads, and the largest value."""
    return "; ".join(dict.fromkeys(load for load, _ in values)), readable(max(value for _, value in values))


def _all_points(results: Sequence[NamedResult]) -> list[tuple[NamedResult, BenchPoint]]:
    return [(named, point) for named in results for point in named.result.points]


# --- Pictures ---


def _sections(
    results: Sequence[NamedResult], expected: Sequence[ExpectedPoint], pictures: list[ReportPicture]
) -> Iterator[str]:
    """The parts of the page with pictures, which are added to `pictures`."""
    share = share_of(results)
    if not any(named.measured for named in results):
        return
    names = [named.name for named in results]
    means = ["Of repeated runs, a point is the mean, and its bars reach from the lowest to the highest."]
    repeated = means if _is_repeated(results) else []
    notes = ["Up and right is better. A point is one load; its label is the concurrency, or the request rate."]
    notes.append("The line is the Pareto front; a hollow point is behind it.")
    notes.append("Throughput per user is the mean over requests of output tokens / end-to-end latency.")
    if share == "server":
        notes.append("Throughput is per server, because the number of GPUs is not known: give it with --gpus.")
        if expected:
            notes.append("The expected figures are per GPU, so they are left out.")
    notes += repeated
    yield picture_section(
        "Throughput per user and per " + share, notes, names, [pareto_picture(results, expected)], pictures
    )
    if len({point.load for named in results for point in named.measured}) > 1:
        kinds = ["Solid: the median. Dotted: the 99th percentile.", *repeated]
        over_throughput = latency_over_throughput(results)
        yield picture_section("Latency over throughput", kinds, names, over_throughput, pictures)
        yield picture_section("Latency over load", kinds, names, latency_over_load(results), pictures)
    if runs := timeline_pictures(results):
        yield _timelines(runs, pictures)


def _is_repeated(results: Sequence[NamedResult]) -> bool:
    return any(len(point.counted_runs) > 1 for _, point in _all_points(results))


def picture_section(
    title: str,
    notes: Sequence[str],
    names: Sequence[str],
    shown: Sequence[ReportPicture],
    pictures: list[ReportPicture],
) -> str:
    """Return a part of the page. `shown` is added to `pictures`, and `names` are those of the colours."""
    figures = []
    for picture in shown:
        caption = f"<figcaption>{escape(picture.title)}</figcaption>" if len(shown) > 1 else ""
        figures.append(f"<figure>{caption}{_picture(picture, len(pictures))}</figure>")
        pictures.append(picture)
    keys = "".join(
        f'<li style="--color: {series_color(number)}">{escape(name)}</li>' for number, name in enumerate(names)
    )
    legend = f"<ul class=legend>{keys}</ul>" if len(names) > 1 else ""
    return (
        f"<section>\n<h2>{escape(title)}</h2>\n<p class=note>{escape(' '.join(notes))}</p>\n{legend}\n"
        f"<div class=pictures>{''.join(figures)}</div>\n</section>"
    )


def _picture(picture: ReportPicture, number: int) -> str:
    height = picture.figure["layout"]["height"]
    return (
        f'<div class=picture role=img data-picture={number} style="height: {height}px" '
        f'aria-label="{escape(picture.alt)}"></div>'
    )


def _timelines(runs: Sequence[ReportPicture], pictures: list[ReportPicture]) -> str:
    """One picture, which shows the run that is chosen."""
    first = len(pictures)
    pictures.extend(runs)
    options = "".join(
        f'<option value={number} data-alt="{escape(run.alt)}">{escape(run.title)}</option>'
        for number, run in enumerate(runs, first)
    )
    return (
        "<section>\n<h2>Timeline</h2>\n"
        f"<p><label for=run>Run</label> <select id=run>{options}</select></p>\n"
        "<p class=note>Requests/s: dotted are those sent, solid those ended, red those failed.</p>\n"
        f"<figure>{_picture(runs[0], first)}</figure>\n</section>"
    )


# --- Tables ---


def _facts_table(results: Sequence[NamedResult]) -> str:
    """What was run: a row for each fact that a result has, a column for each result."""
    columns = [_facts(named.result) for named in results]
    rows = [
        [escape(name), *(escape(column.get(name, _NOTHING)) for column in columns)]
        for name in dict.fromkeys(name for column in columns for name in column)
    ]
    return html_table("What was run", "facts", ["", *(named.name for named in results)], html_rows(rows))


def _facts(result: BenchResult) -> dict[str, str]:
    limits = [f"{name.removesuffix('_ms').upper()} {limit:g} ms" for name, limit in asdict(result.slo).items() if limit]
    facts = {
        "Model": result.model,
        "Dataset": result.dataset,
        "Preset": result.preset,
        "Date": result.date,
        "Servers": ", ".join(result.urls),
        "Endpoint": result.endpoint,
        "GPUs": "not known" if result.gpus is None else str(result.gpus),
        "SLO": ", ".join(limits),
    }
    for name, title in _SERVER_FACTS.items():
        value = result.server.get(name, "")
        is_several = isinstance(value, Mapping)
        facts[title] = ", ".join(f"{key} {part}" for key, part in value.items()) if is_several else str(value)
    return {name: value for name, value in {**facts, "Command": result.command}.items() if value}


def _figures_table(results: Sequence[NamedResult]) -> str:
    """A row for each point. Columns that no point has are left out."""
    share = share_of(results)
    tables = [[_figures(point, named.result, share) for point in named.result.points] for named in results]
    every_row = [row for table in tables for row in table]
    headings = [heading for heading in every_row[0] if any(row[heading] != _NOTHING for row in every_row)]
    body = ""
    for named, table in zip(results, tables, strict=True):
        if len(results) > 1:
            body += f"<tr><th class=group colspan={len(headings)} scope=rowgroup>{escape(named.name)}</th></tr>\n"
        body += html_rows([[row[heading] for heading in headings] for row in table])
    note = "Latencies are in milliseconds."
    if _is_repeated(results):
        note += " Of repeated runs, a cell has the mean, and below it the lowest and the highest."
    return html_table("Figures of each load", "figures", headings, body, note)


def _figures(point: BenchPoint, result: BenchResult, share: str) -> dict[str, str]:
    """Heading -> cell, as HTML."""

    def cell(figure: FigureOf) -> str:
        if (value := spread(point, figure)) is None:
            return _NOTHING
        runs = f"<small>{readable(value.low)} – {readable(value.high)}</small>" if value.high > value.low else ""
        return readable(value.mean) + runs

    latencies = {
        f"{latency.name} {percentile}": cell(latency.percentile(percentile))
        for latency in LATENCIES
        for percentile in ("p50", "p99")
    }
    return {
        "Load": escape(point.label),
        "Completed": f"{sum(run.figures.completed for run in point.counted_runs):,}",
        "Failed": f"{sum(run.figures.failed for run in point.counted_runs):,}",
        "Requests/s": cell(lambda figures: figures.request_throughput),
        "Output tok/s": cell(lambda figures: figures.output_throughput),
        f"tok/s/{share}": cell(throughput_per(share, result)),
        "tok/s/user": cell(lambda figures: figures.user_throughput),
        **latencies,
        "Goodput, requests/s": cell(lambda figures: figures.goodput),
    }


def html_rows(rows: Sequence[Sequence[str]]) -> str:
    """Cells are HTML; the first is a heading."""
    return "".join(
        f"<tr><th scope=row>{first}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>\n"
        for first, *cells in rows
    )


def html_table(title: str, kind: str, headings: Sequence[str], body: str, note: str = "") -> str:
    """Return a part of the page: `kind` is a class of its style, `body` and `note` are HTML."""
    head = "".join(f"<th scope=col>{escape(heading)}</th>" for heading in headings)
    return (
        f"<section>\n<h2>{title}</h2>\n{f'<p class=note>{note}</p>' if note else ''}\n"
        f'<div class=scroll tabindex=0 role=region aria-label="{title}"><table class={kind}>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody>\n</table></div>\n</section>"
    )
