"""The Pareto front of a search, in the terminal and as a page."""

from __future__ import annotations

import sys
from html import escape
from pathlib import Path

from deepseek_triton_tools.bench.report_page import html_page, html_rows, html_table, picture_section
from deepseek_triton_tools.bench.report_pictures import Json, ReportPicture, picture_layout, series_color
from deepseek_triton_tools.bench.report_points import readable
from deepseek_triton_tools.bench.terminal_pictures import TextLine, TextPoint, drawn, picture_columns
from deepseek_triton_tools.host.whole_file import whole_file
from deepseek_triton_tools.sla.fleet_search import PlannedFleet
from deepseek_triton_tools.sla.sla_plan import SlaPlan
from deepseek_triton_tools.sla.sla_view import FLEET_HEADINGS, SHOWN_FLEETS, fleet_cells, fleet_name, sla_title
from deepseek_triton_tools.terminal.output_streams import has_style, to_reader
from deepseek_triton_tools.terminal.tables import paragraph
from deepseek_triton_tools.tool_errors import InstallationError

_MARKS = {"aggregated": ("●", 12), "disaggregated": ("▲", 208)}
"""Kind of fleet -> its mark, and the number of its colour among the terminal's 256."""
_CHOSEN = "★"
_HEIGHT = 18
_NOTE = "Output tokens/s with the margin. The fleets keep the limit of TTFT, not that of TPOT."


def show_fronts(plan: SlaPlan) -> None:
    """Print the picture, as wide as the terminal; without plotext, how to install it."""
    lines = []
    for kind, fleets in plan.fronts.items():
        mark, color = _MARKS[kind]
        points = [_point(plan, fleet) for fleet in fleets]
        lines.append(TextLine(mark=mark, color=color, points=points, joined=points))
    lines.append(TextLine(mark=_CHOSEN, points=[_point(plan, plan.fleets[0])]))
    title = "Output tokens/s per GPU, over tokens/s per user"
    with to_reader():
        try:
            picture = drawn(title, lines, picture_columns(), _HEIGHT, has_style(sys.stdout))
        except InstallationError as error:
            print(paragraph(str(error)))
            return
        print(picture, end="")
        print("  " + "   ".join(f"{_MARKS[kind][0]} {kind}" for kind in plan.fronts) + f"   {_CHOSEN} the best\n")


def write_sla_report(path: Path, plan: SlaPlan) -> None:
    """Write the search as a page of its own, in the place of a file that is there. Raises ToolError where it can't."""
    pictures: list[ReportPicture] = []
    notes = ["Up and right is better; the star is the best fleet within the limits.", _NOTE]
    section = picture_section(
        "Throughput per user and per GPU", notes, list(plan.fronts), [_front_picture(plan)], pictures
    )
    facts = {
        "Limits": ", ".join(plan.limits),
        "Paces": plan.source,
        "Left out": f"{len(plan.refused)} layouts; plan --sla --json says why",
        "Command": plan.build_command,
    }
    page = html_page(
        f"Plan to an SLA: {sla_title(plan)}",
        facts=html_table("What was searched", "facts", ["", ""], html_rows([[k, escape(v)] for k, v in facts.items()])),
        figures=html_table(
            "The best fleets",
            "figures",
            FLEET_HEADINGS,
            html_rows([[escape(cell) for cell in fleet_cells(plan, fleet)] for fleet in plan.fleets[:SHOWN_FLEETS]]),
        ),
        sections=section,
        pictures=pictures,
    )
    with whole_file(path) as file:
        file.write(page)


def _point(plan: SlaPlan, fleet: PlannedFleet) -> TextPoint:
    gpus = plan.request.num_gpus or 1
    return TextPoint(x=fleet.tps_user / fleet.margin, y=fleet.output_tps / fleet.margin / gpus)


def _front_picture(plan: SlaPlan) -> ReportPicture:
    data: list[Json] = []
    said = []
    for number, (kind, fleets) in enumerate(plan.fronts.items()):
        color = series_color(number)
        data.append(
            _trace(plan, fleets)
            | {
                "mode": "lines+markers",
                "name": kind,
                "line": {"color": color, "width": 2},
                "marker": {"color": color, "size": 7},
            }
        )
        ends = [_point(plan, fleet) for fleet in (fleets[0], fleets[-1])]
        said.append(f"{kind} from " + " to ".join(f"{readable(at.x)} and {readable(at.y)}" for at in ends))
    data.append(
        _trace(plan, plan.fleets[:1])
        | {"mode": "markers", "name": "the best", "marker": {"symbol": "star", "size": 16, "color": "var(--text)"}}
    )
    return ReportPicture(
        title="Throughput per user and per GPU",
        alt="Scatter plot. Output tokens a second for each user and for each GPU: " + "; ".join(said) + ".",
        figure={
            "data": data,
            "layout": picture_layout("Output tokens/s per user", "Output tokens/s per GPU", height=460),
        },
    )


def _trace(plan: SlaPlan, fleets: list[PlannedFleet]) -> Json:
    points = [_point(plan, fleet) for fleet in fleets]
    return {
        "type": "scatter",
        "x": [point.x for point in points],
        "y": [point.y for point in points],
        "hovertext": [escape(fleet_name(fleet), quote=False) for fleet in fleets],
        "hovertemplate": "%{hovertext}<br>%{x:,.4~r} tok/s/user<br>%{y:,.4~r} tok/s/GPU<extra>%{fullData.name}</extra>",
    }
