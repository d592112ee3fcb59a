"""A comparison for people: a table by part, the worst weights, and what only one checkpoint has; and as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deepseek_triton_build.text import first_names, safe_name
from deepseek_triton_tools.checkpoints.error_figures import OCTAVES, ErrorSums
from deepseek_triton_tools.checkpoints.model_parts import EXPERTS, PARTS
from deepseek_triton_tools.checkpoints.weight_comparison import NUM_TOKENS, CheckpointComparison
from deepseek_triton_tools.terminal.tables import Table, paragraph, show

SCHEMA = "deepseek-triton/checkpoint-compare/1"
HEADINGS = ("Part", "Precision", "Weights", "Relative error", "SQNR dB", "Cosine", "Largest error", "Clipped")
FORWARD_HEADINGS = ("Layer", "Relative error", "SQNR dB", "Cosine", "Same experts")
FORWARD_NOTE = (
    f"Routed and shared experts of {NUM_TOKENS} random tokens, in float32 with the weights of each checkpoint."
)
_NUM_WORST = 5


def show_comparison(comparison: CheckpointComparison) -> None:
    """Print it to stdout."""
    show(Table(title="Weights", headings=HEADINGS, rows=list(part_rows(comparison)), is_grid=True))
    if comparison.forwards:
        rows = forward_rows(comparison)
        show(Table(title="Mixture of experts", headings=FORWARD_HEADINGS, rows=rows, is_grid=True))
        print(paragraph(FORWARD_NOTE))
        print()
    if worst := worst_rows(comparison):
        show(Table(title="Largest relative errors", headings=("Weight", *HEADINGS[1:2], *HEADINGS[3:]), rows=worst))
    for line in notes(comparison):
        print(paragraph(line))


def part_rows(comparison: CheckpointComparison) -> Iterator[list[str]]:
    """Yield a row of cells for each part, and for the experts of each layer."""
    for part in PARTS:
        weights = [weight for weight in comparison.weights if weight.part == part]
        if not weights:
            continue
        yield [part, *_cells(comparison, part, None)]
        layers = sorted({weight.layer for weight in weights if weight.layer is not None}) if part == EXPERTS else []
        for layer in layers:
            yield [f"  layer {layer}", *_cells(comparison, part, layer)]


def worst_rows(comparison: CheckpointComparison) -> list[list[str]]:
    """Return a row of cells for each of the weights that differ most."""
    differing = [weight for weight in comparison.weights if weight.errors.num_differing]
    differing.sort(key=lambda weight: weight.errors.relative_rms, reverse=True)
    return [
        [safe_name(weight.name), _precision({weight.precisions}), *error_cells(weight.errors)]
        for weight in differing[:_NUM_WORST]
    ]


def forward_rows(comparison: CheckpointComparison) -> list[list[str]]:
    return [[str(one.layer), *error_cells(one.errors)[:3], f"{one.same_experts:.2%}"] for one in comparison.forwards]


def notes(comparison: CheckpointComparison) -> Iterator[str]:
    """Say what the tables don't."""
    if comparison.num_left_out:
        yield f"{comparison.num_left_out:,} weights that both have were not compared."
    for names, where in ((comparison.only_in_source, "first"), (comparison.only_in_other, "second")):
        if names:
            yield f"Only the {where} checkpoint has {len(names):,} tensors: {first_names(names)}."
    if comparison.other_shapes:
        yield f"{len(comparison.other_shapes):,} weights have another shape: {'; '.join(comparison.other_shapes[:3])}."
    layers = [str(one.layer) for one in comparison.forwards if one.errors.num_not_finite]
    if layers:
        yield f"The experts' output in layer {', '.join(layers)} has values that are not finite, which are left out."
    broken = [weight.name for weight in comparison.weights if weight.errors.num_not_finite]
    if broken:
        yield f"{len(broken):,} weights have values that are not finite, which are left out: {first_names(broken)}."


def error_cells(errors: ErrorSums) -> list[str]:
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
    parts = dict.fromkeys(weight.part for weight in comparison.weights)
    layers = sorted(
        {weight.layer for weight in comparison.weights if weight.part == EXPERTS and weight.layer is not None}
    )
    return {
        "schema": SCHEMA,
        "source": str(source),
        "other": str(other),
        "octaves": list(OCTAVES),
        "parts": [{"part": part, **_figures(comparison.sums(part), with_octaves=True)} for part in parts],
        "expert_layers": [{"layer": layer, **_figures(comparison.sums(EXPERTS, layer))} for layer in layers],
        "moe_outputs": [
            {"layer": one.layer, "same_experts": one.same_experts, **_figures(one.errors)}
            for one in comparison.forwards
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


def _cells(comparison: CheckpointComparison, part: str, layer: int | None) -> list[str]:
    weights = [weight for weight in comparison.weights if weight.part == part and layer in (None, weight.layer)]
    precisions = {weight.precisions for weight in weights}
    return [_precision(precisions), f"{len(weights):,}", *error_cells(comparison.sums(part, layer))]


def _precision(pairs: set[tuple[str, str]]) -> str:
    """Return precisions for people: "FP8 → INT4". What stays the same is not named beside what doesn't."""
    changed = sorted(pair for pair in pairs if pair[0] != pair[1])
    return ", ".join(f"{a} → {b}" for a, b in changed) if changed else ", ".join(sorted({a for a, _ in pairs}))


def _figures(errors: ErrorSums, *, with_octaves: bool = False) -> dict[str, Any]:
    found = {
        "values": errors.num_values,
        "differing": errors.num_differing,
        "not_finite": errors.num_not_finite,
        "clipped": errors.num_clipped,
        "relative_rms": _finite(errors.relative_rms),
        "sqnr_db": _finite(errors.sqnr_db),
        "cosine": errors.cosine,
        "largest": errors.largest,
    }
    return found | ({"errors_by_octave": errors.octaves.tolist()} if with_octaves else {})


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
