"""A comparison as one HTML file with pictures, which needs no network."""

from __future__ import annotations

from html import escape
from pathlib import Path

from deepseek_triton_tools.bench.report_page import html_page, html_rows, html_table, picture_section
from deepseek_triton_tools.bench.report_pictures import Json, ReportPicture, picture_layout, series_color
from deepseek_triton_tools.checkpoints.comparison_view import (
    FORWARD_HEADINGS,
    FORWARD_NOTE,
    HEADINGS,
    forward_rows,
    notes,
    part_rows,
)
from deepseek_triton_tools.checkpoints.error_figures import OCTAVES
from deepseek_triton_tools.checkpoints.model_parts import EXPERTS, PARTS
from deepseek_triton_tools.checkpoints.weight_comparison import CheckpointComparison
from deepseek_triton_tools.host.whole_file import whole_file

_HEIGHT = 400


def write_comparison(path: Path, comparison: CheckpointComparison, source: Path, other: Path) -> None:
    """Write it in the place of a file that is there. Raises ToolError without plotly, or where it can't be written."""
    pictures: list[ReportPicture] = []
    parts = [part for part in PARTS if comparison.sums(part).num_differing]
    sections = []
    if comparison.forwards:
        rows = html_rows([[escape(cell) for cell in row] for row in forward_rows(comparison)])
        sections.append(html_table("Mixture of experts", "figures", FORWARD_HEADINGS, rows, escape(FORWARD_NOTE)))
    if parts:
        text = [
            "Each value's error is divided by the root mean square of the values around it. A step has the "
            "errors from one power of two to the next. Values without an error are left out."
        ]
        picture = _distribution(comparison, parts)
        sections.append(picture_section("Distribution of the errors", text, parts, [picture], pictures))
    if any(weight.part == EXPERTS and weight.errors.num_differing for weight in comparison.weights):
        text = ["||b - a|| / ||a|| over all values of the routed experts of a layer."]
        sections.append(picture_section("Experts by layer", text, [EXPERTS], [_by_layer(comparison)], pictures))
    rows = html_rows([[escape(cell.strip()) for cell in row] for row in part_rows(comparison)])
    facts = {"First": str(source), "Second": str(other), "Notes": " ".join(notes(comparison)) or "none"}
    page = html_page(
        f"{other.name} compared with {source.name}",
        facts=html_table("Checkpoints", "facts", ["", ""], html_rows([[k, escape(v)] for k, v in facts.items()])),
        figures=html_table("Weights by part", "figures", HEADINGS, rows),
        sections="\n".join(sections),
        pictures=pictures,
    )
    with whole_file(path) as file:
        file.write(page)


def _distribution(comparison: CheckpointComparison, parts: list[str]) -> ReportPicture:
    data: list[Json] = []
    said = []
    for number, part in enumerate(parts):
        sums = comparison.sums(part)
        shares = [int(count) / sums.num_values for count in sums.octaves]
        said.append(f"{part} most often at 2^{OCTAVES[shares.index(max(shares))]}")
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": part,
                "x": [2 ** (octave + 0.5) for octave in OCTAVES],  # the middle of a bin
                "y": shares,
                "line": {"color": series_color(number), "width": 2, "shape": "hvh"},
                "marker": {"color": series_color(number), "size": 4},
                "hovertemplate": "%{y:.2%} of all values near %{x:.2~g}<extra>%{fullData.name}</extra>",
            }
        )
    layout = picture_layout("Error / RMS", "Share of the values", height=_HEIGHT)
    layout["xaxis"] |= {"type": "log", "rangemode": "normal", "dtick": 1, "exponentformat": "power", "tickformat": ""}
    layout["yaxis"] |= {"tickformat": ".0%"}
    return ReportPicture(
        title="Distribution of the errors",
        alt=f"Line chart of the sizes of errors: {'; '.join(said)}.",
        figure={"data": data, "layout": layout},
    )


def _by_layer(comparison: CheckpointComparison) -> ReportPicture:
    layers = sorted(
        {weight.layer for weight in comparison.weights if weight.part == EXPERTS and weight.layer is not None}
    )
    errors = [comparison.sums(EXPERTS, layer).relative_rms for layer in layers]
    layout = picture_layout("Layer", "Relative error", height=_HEIGHT)
    layout["xaxis"] |= {"type": "category"}
    layout["yaxis"] |= {"tickformat": ".1%"}
    return ReportPicture(
        title="Experts by layer",
        alt=f"Bar chart of relative errors from {min(errors):.2%} to {max(errors):.2%}.",
        figure={
            "data": [
                {
                    "type": "bar",
                    "x": layers,
                    "y": errors,
                    "marker": {"color": series_color(0)},
                    "hovertemplate": "layer %{x}: %{y:.3%}<extra></extra>",
                }
            ],
            "layout": layout,
        },
    )
