"""A comparison for people: tables by part and of the worst weights, what only one checkpoint has, a page with pictures
that needs no network; and as JSON.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from deepseek_triton_build.text import first_names, safe_name
from deepseek_triton_tools.bench.report_page import html_page, html_rows, html_table, picture_section
from deepseek_triton_tools.bench.report_pictures import Json, ReportPicture, picture_layout, series_color
from deepseek_triton_tools.checkpoints.model_parts import EXPERTS
from deepseek_triton_tools.checkpoints.weight_comparison import NUM_TOKENS, CheckpointComparison, WeightComparison
from deepseek_triton_tools.checkpoints.weight_errors import OCTAVES, ErrorSums
from deepseek_triton_tools.host.whole_file import whole_file
from deepseek_triton_tools.terminal.tables import Table, paragraph, show

SCHEMA = "deepseek-triton/checkpoint-compare/1"
_HEADINGS = ("Part", "Precision", "Weights", "Relative error", "SQNR dB", "Cosine", "Largest error", "Clipped")
_FORWARD_HEADINGS = ("Layer", "Relative error", "SQNR dB", "Cosine", "Same experts")
_FORWARD_NOTE = (
    f"Routed and shared experts of {NUM_TOKENS} random tokens, in float32 with the weights of each checkpoint."
)
_NUM_WORST = 5
_HEIGHT = 400
"""Pixels of a picture."""


def show_comparison(comparison: CheckpointComparison) -> None:
    """Print it to stdout."""
    show(Table(title="Weights", headings=_HEADINGS, rows=list(_part_rows(comparison)), is_grid=True))
    if comparison.forwards:
        rows = _forward_rows(comparison)
        show(Table(title="Mixture of experts", headings=_FORWARD_HEADINGS, rows=rows, is_grid=True))
        print(paragraph(_FORWARD_NOTE))
        print()
    differing = [weight for weight in comparison.weights if weight.errors.num_differing]
    differing.sort(key=lambda weight: weight.errors.relative_rms, reverse=True)
    if differing:
        worst = [
            [safe_name(weight.name), _precision([weight]), *_cells(weight.errors)] for weight in differing[:_NUM_WORST]
        ]
        show(Table(title="Largest relative errors", headings=("Weight", "Precision", *_HEADINGS[3:]), rows=worst))
    for line in _notes(comparison):
        print(paragraph(line))


def _part_rows(comparison: CheckpointComparison) -> Iterator[list[str]]:
    """Yield a row of cells for each part, and for the experts of each layer."""
    for part in comparison.parts:
        for layer in (None, *(comparison.expert_layers if part == EXPERTS else ())):
            weights, errors = comparison.of(part, layer), comparison.sums(part, layer)
            name = part if layer is None else f"  layer {layer}"
            yield [name, _precision(weights), f"{len(weights):,}", *_cells(errors)]


def _forward_rows(comparison: CheckpointComparison) -> list[list[str]]:
    return [
        [str(forward.layer), *_cells(forward.errors)[:3], f"{forward.same_experts:.2%}"]
        for forward in comparison.forwards
    ]


def _notes(comparison: CheckpointComparison) -> Iterator[str]:
    """Say what the tables don't."""
    if comparison.num_left_out:
        yield f"{comparison.num_left_out:,} weights that both have were not compared."
    for names, where in ((comparison.only_in_source, "first"), (comparison.only_in_other, "second")):
        if names:
            yield f"Only the {where} checkpoint has {len(names):,} tensors: {first_names(names)}."
    if comparison.other_shapes:
        yield f"{len(comparison.other_shapes):,} weights have another shape: {'; '.join(comparison.other_shapes[:3])}."
    layers = [str(forward.layer) for forward in comparison.forwards if forward.errors.num_not_finite]
    if layers:
        yield f"The experts' output in layer {', '.join(layers)} has values that are not finite, which are left out."
    broken = [weight.name for weight in comparison.weights if weight.errors.num_not_finite]
    if broken:
        yield f"{len(broken):,} weights have values that are not finite, which are left out: {first_names(broken)}."


def _cells(errors: ErrorSums) -> list[str]:
    """Return the cells from the relative error to the share that is clipped."""
    if errors.num_values and errors.num_not_finite == errors.num_values:
        return ["not finite", "-", "-", "-", "-"]
    if not errors.num_differing:
        return ["0", "exact", "1", "0", "0"]
    return [
        f"{errors.relative_rms:.3%}",
        f"{errors.sqnr_db:.1f}",
        f"{errors.cosine:.6f}",
        f"{errors.largest:.3g}",
        f"{errors.clipped_share:.2g}" if errors.num_clipped else "0",
    ]


def comparison_document(comparison: CheckpointComparison, source: Path, other: Path) -> dict[str, Any]:
    """Return it for JSON. What is infinite (the SQNR without an error) is null."""
    return {
        "schema": SCHEMA,
        "source": str(source),
        "other": str(other),
        "octaves": list(OCTAVES),
        "parts": [{"part": part, **_figures(comparison.sums(part), with_octaves=True)} for part in comparison.parts],
        "expert_layers": [
            {"layer": layer, **_figures(comparison.sums(EXPERTS, layer))} for layer in comparison.expert_layers
        ],
        "moe_outputs": [
            {"layer": forward.layer, "same_experts": forward.same_experts, **_figures(forward.errors)}
            for forward in comparison.forwards
        ],
        "weights": [
            {
                "name": weight.name,
                "part": weight.part,
                "precisions": list(weight.precisions),
                **_figures(weight.errors),
            }
            for weight in comparison.weights
        ],
        "left_out": comparison.num_left_out,
        "only_in_source": list(comparison.only_in_source),
        "only_in_other": list(comparison.only_in_other),
        "other_shapes": list(comparison.other_shapes),
    }


def _precision(weights: Sequence[WeightComparison]) -> str:
    """Return precisions for people: "FP8 → INT4". What stays the same is not named beside what doesn't."""
    pairs = {weight.precisions for weight in weights}
    changed = sorted(pair for pair in pairs if pair[0] != pair[1])
    return ", ".join(f"{a} → {b}" for a, b in changed) if changed else ", ".join(sorted({a for a, _ in pairs}))


def _figures(errors: ErrorSums, *, with_octaves: bool = False) -> dict[str, Any]:
    figures = {
        "values": errors.num_values,
        "differing": errors.num_differing,
        "not_finite": errors.num_not_finite,
        "clipped": errors.num_clipped,
        "relative_rms": _finite(errors.relative_rms),
        "sqnr_db": _finite(errors.sqnr_db),
        "cosine": errors.cosine,
        "largest": errors.largest,
    }
    return figures | ({"errors_by_octave": errors.octaves.tolist()} if with_octaves else {})


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def write_comparison(path: Path, comparison: CheckpointComparison, source: Path, other: Path) -> None:
    """Write it in the place of a file that is there. Raises ToolError without plotly, or where it can't be written."""
    pictures: list[ReportPicture] = []
    parts = [part for part in comparison.parts if comparison.sums(part).num_differing]
    sections = []
    if comparison.forwards:
        rows = html_rows([[escape(cell) for cell in row] for row in _forward_rows(comparison)])
        sections.append(html_table("Mixture of experts", "figures", _FORWARD_HEADINGS, rows, escape(_FORWARD_NOTE)))
    if parts:
        text = [
            "Each value's error is divided by the root mean square of the values around it. A step has the "
            "errors from one power of two to the next. Values without an error are left out."
        ]
        picture = _distribution(comparison, parts)
        sections.append(picture_section("Distribution of the errors", text, parts, [picture], pictures))
    if EXPERTS in parts:
        text = ["||b - a|| / ||a|| over all values of the routed experts of a layer."]
        sections.append(picture_section("Experts by layer", text, [EXPERTS], [_by_layer(comparison)], pictures))
    rows = html_rows([[escape(cell.strip()) for cell in row] for row in _part_rows(comparison)])
    facts = {"First": str(source), "Second": str(other), "Notes": " ".join(_notes(comparison)) or "none"}
    page = html_page(
        f"{other.name} compared with {source.name}",
        facts=html_table("Checkpoints", "facts", ["", ""], html_rows([[k, escape(v)] for k, v in facts.items()])),
        figures=html_table("Weights by part", "figures", _HEADINGS, rows),
        sections="\n".join(sections),
        pictures=pictures,
    )
    with whole_file(path) as file:
        file.write(page)


def _distribution(comparison: CheckpointComparison, parts: list[str]) -> ReportPicture:
    data: list[Json] = []
    peaks = []
    for number, part in enumerate(parts):
        sums = comparison.sums(part)
        shares = [int(count) / sums.num_values for count in sums.octaves]
        peaks.append(f"{part} most often at 2^{OCTAVES[shares.index(max(shares))]}")
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": part,
                # A point stands in the middle of its bin.
                "x": [2 ** (octave + 0.5) for octave in OCTAVES],
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
        alt=f"Line chart of the sizes of errors: {'; '.join(peaks)}.",
        figure={"data": data, "layout": layout},
    )


def _by_layer(comparison: CheckpointComparison) -> ReportPicture:
    layers = comparison.expert_layers
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
