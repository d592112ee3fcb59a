"""The answer of a search: tables, JSON, and a page with the Pareto front."""

from __future__ import annotations

import dataclasses
from html import escape
from pathlib import Path
from typing import Any

from deepseek_triton_tools.bench.html_page import (
    Json,
    PictureSection,
    ReportPicture,
    html_table,
    picture_layout,
    readable,
    series_color,
    write_page,
)
from deepseek_triton_tools.sla.fleets import PlannedFleet
from deepseek_triton_tools.sla.sla_plan import SlaPlan
from deepseek_triton_tools.terminal.output_streams import print_json, to_reader
from deepseek_triton_tools.terminal.tables import Table, paragraph, show

SHOWN_FLEETS = 8
FLEET_HEADINGS = (
    "fleet",
    "users",
    "tokens/s/GPU",
    "with margin",
    "TTFT ms",
    "with margin",
    "TTFT at once",
    "TPOT ms",
    "with margin",
    "margin",
)
_NOTE = "Output tokens/s with the margin. The fleets keep the limit of TTFT, not that of TPOT."


def show_sla_plan(plan: SlaPlan, *, as_json: bool, paces: Path | None = None) -> None:
    """Print the search.

    :param paces: the folder that its paces were written to.
    """
    with to_reader():
        if as_json:
            print_json(sla_document(plan, paces))
            return
        rows = [fleet_cells(plan, fleet) for fleet in plan.fleets[:SHOWN_FLEETS]]
        title = f"{sla_title(plan)}: the best first; limits are kept with the margin"
        show(Table(title=title, headings=FLEET_HEADINGS, rows=rows))
        print(paragraph(f"paces: {plan.source}"))
        for note in plan.notes:
            print(paragraph(note))
        if plan.refused:
            print(paragraph(f"{len(plan.refused)} layouts were left out; --json says why"))
        best = plan.fleets[0]
        generation = _counted(best.num_servers, "generation server")
        pair = f"{_counted(best.num_context, 'context server')} and {generation}"
        print(paragraph(f"{pair if best.context else _counted(best.num_servers, 'server')}: {plan.build_command}"))
        if paces is not None:
            print(paragraph(f"rehearse it: {plan.rehearsal_command(paces)}"))


def sla_document(plan: SlaPlan, paces: Path | None = None) -> dict[str, Any]:
    """The search as JSON; docs/sla.md describes it."""
    return {
        "variant": plan.request.variant,
        "gpu": plan.request.gpu,
        "gpus": plan.request.num_gpus,
        "precision": plan.request.precision,
        "workload": dataclasses.asdict(plan.workload),
        "limits": dataclasses.asdict(plan.slo),
        "source": plan.source,
        "fleets": [
            {
                "layout": str(fleet.layout),
                "servers": fleet.num_servers,
                "context_layout": str(fleet.context.layout) if fleet.context else None,
                "context_servers": fleet.num_context,
                "requests_per_rank": fleet.rows,
                "users": fleet.users,
                "gpus_used": fleet.num_gpus,
                "ttft_ms": round(fleet.times.ttft_ms, 1),
                "burst_ttft_ms": round(plan.burst_ttft_ms(fleet), 1),
                "tpot_ms": round(fleet.times.tpot_ms, 2),
                "output_tps": round(fleet.output_tps, 1),
                "output_tps_per_gpu": round(fleet.output_tps / (plan.request.num_gpus or 1), 1),
                "margin": fleet.margin,
            }
            for fleet in plan.fleets
        ],
        "build": plan.build_command,
        "rehearsal": plan.rehearsal_command(paces) if paces is not None else None,
        "notes": plan.notes,
        "refused": plan.refused,
    }


def fleet_name(fleet: PlannedFleet) -> str:
    served = f"{fleet.num_servers} x {fleet.layout}, {fleet.rows} a rank"
    return f"{fleet.num_context} x {fleet.context.layout} context + {served}" if fleet.context else served


def sla_title(plan: SlaPlan) -> str:
    asked, shared = plan.request, plan.workload
    return f"{asked.variant} on {asked.num_gpus} x {asked.gpu}, {shared.isl:,} + {shared.osl:,} tokens"


def fleet_cells(plan: SlaPlan, fleet: PlannedFleet) -> tuple[str, ...]:
    """The cells under FLEET_HEADINGS."""
    slow, tps = fleet.times.slower(fleet.margin), fleet.output_tps / (plan.request.num_gpus or 1)
    return (
        fleet_name(fleet),
        f"{fleet.users:,}",
        f"{tps:,.1f}",
        f"{tps / fleet.margin:,.1f}",
        f"{fleet.times.ttft_ms:,.0f}",
        f"{slow.ttft_ms:,.0f}",
        f"{plan.burst_ttft_ms(fleet) * fleet.margin:,.0f}",
        f"{fleet.times.tpot_ms:.1f}",
        f"{slow.tpot_ms:.1f}",
        f"{fleet.margin - 1:.0%}",
    )


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def write_sla_report(path: Path, plan: SlaPlan) -> None:
    """Write the search as a page of its own, in the place of a file that is there. Raises ToolError where it can't."""
    section = PictureSection(
        title="Throughput per user and per GPU",
        note=f"Up and right is better; the star is the best fleet within the limits. {_NOTE}",
        pictures=[_front_picture(plan)],
        names=list(plan.fronts),
    )
    facts = {
        "Limits": ", ".join(plan.limits),
        "Paces": plan.source,
        "Left out": f"{len(plan.refused)} layouts; plan --sla --json says why",
        "Command": plan.build_command,
    }
    fleets = [fleet_cells(plan, fleet) for fleet in plan.fleets[:SHOWN_FLEETS]]
    write_page(
        path,
        f"Plan to an SLA: {sla_title(plan)}",
        tables=[
            html_table("What was searched", "facts", ["", ""], list(facts.items())),
            html_table("The best fleets", "figures", FLEET_HEADINGS, fleets),
        ],
        sections=[section],
    )


def _point(plan: SlaPlan, fleet: PlannedFleet) -> tuple[float, float]:
    """Tokens/s per user, and per GPU."""
    return fleet.tps_user / fleet.margin, fleet.output_tps / fleet.margin / (plan.request.num_gpus or 1)


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
        said.append(f"{kind} from " + " to ".join(f"{readable(x)} and {readable(y)}" for x, y in ends))
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
        "x": [x for x, _ in points],
        "y": [y for _, y in points],
        "hovertext": [escape(fleet_name(fleet), quote=False) for fleet in fleets],
        "hovertemplate": "%{hovertext}<br>%{x:,.4~r} tok/s/user<br>%{y:,.4~r} tok/s/GPU<extra>%{fullData.name}</extra>",
    }
