"""Compares two checkpoints of the same model: each weight as numbers, and the output of some mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from deepseek_triton_build.text import safe_name
from deepseek_triton_tools.checkpoints.compared_weight import SCALES, ComparedWeight, compare_weights, weight_of
from deepseek_triton_tools.checkpoints.config_numbers import config_number
from deepseek_triton_tools.checkpoints.conversion_plan import layer_of
from deepseek_triton_tools.checkpoints.error_figures import ErrorSums
from deepseek_triton_tools.checkpoints.job_processes import Say, do_jobs
from deepseek_triton_tools.checkpoints.model_parts import EXPERTS, PARTS, part_of
from deepseek_triton_tools.checkpoints.moe_forward import (
    MOE_SETTINGS,
    ReadWeight,
    moe_output,
    moe_weights,
    random_tokens,
)
from deepseek_triton_tools.checkpoints.number_formats import Floats
from deepseek_triton_tools.checkpoints.stored_tensors import StoredTensors, open_checkpoint, read_config
from deepseek_triton_tools.tool_errors import CheckpointError

NUM_TOKENS = 64
"""Random tokens that go through a mixture of experts."""
_MOST_FORWARDS = 3
_SEED = 0
_MOST_NAMED = 3
_INPUT_SCALE = ".input_scale"

_Comparison = Callable[[Say], "LayerComparison | ErrorSums"]


@dataclass(frozen=True, kw_only=True)
class ComparisonOptions:
    """The user's wishes."""

    layers: Collection[int] | None = None
    """Layers to compare, without embedding and head; None: everything."""
    sample: int | None = None
    """The most weights of each part, and of the experts of each layer; None: all."""


@dataclass(frozen=True)
class WeightComparison:
    """One weight in both checkpoints."""

    name: str
    part: str
    layer: int | None
    precisions: tuple[str, str]
    errors: ErrorSums


@dataclass(frozen=True)
class LayerComparison:
    """The output of a mixture of experts with the weights of both."""

    layer: int
    errors: ErrorSums
    same_experts: float
    """The share of the chosen experts that are the same."""


@dataclass(frozen=True)
class CheckpointComparison:
    """The errors of weights and layers, and what could not be compared."""

    weights: Sequence[WeightComparison]
    """By part, then layer and name."""
    forwards: Sequence[LayerComparison]
    num_left_out: int
    """Weights that both have and that --layers or --sample leaves out."""
    only_in_source: Sequence[str]
    only_in_other: Sequence[str]
    other_shapes: Sequence[str]
    """Weights that have another shape, with both."""

    def sums(self, part: str, layer: int | None = None) -> ErrorSums:
        """Sum up a part, or what one layer has of it."""
        total = ErrorSums()
        for weight in self.weights:
            if weight.part == part and layer in (None, weight.layer):
                total += weight.errors
        return total


@dataclass(frozen=True)
class ComparisonPlan:
    """The weights and layers to compare."""

    source: Path
    other: Path
    pairs: Mapping[str, tuple[ComparedWeight, ComparedWeight]]
    forwards: Sequence[int]
    """Layers whose mixture of experts is computed."""
    num_layers: int | None
    """Layers of the model by config.json, the MTP layer not counted; None: it doesn't say."""
    num_left_out: int
    only_in_source: Sequence[str]
    only_in_other: Sequence[str]
    other_shapes: Sequence[str]


def plan_comparison(source: Path, other: Path, options: ComparisonOptions) -> ComparisonPlan:
    """Read the headers of both, and config.json of the first: DeepSeek's inference format has none.

    :raises CheckpointError: with all that keeps them from being compared.
    """
    problems, opened = [], []
    for folder in (source, other):
        try:
            opened.append(open_checkpoint(folder))
        except CheckpointError as error:
            problems.append(str(error))
    if problems:
        raise CheckpointError("; ".join(problems))
    a, b = opened
    config = read_config(source)
    num_layers = None if config.get("num_hidden_layers") is None else config_number(config, "num_hidden_layers")
    names = [set(_weights(tensors)) for tensors in (a, b)]
    pairs, other_shapes = {}, []
    for name in sorted(names[0] & names[1], key=lambda name: _in_order(name, num_layers)):
        try:
            pair = (weight_of(a, name), weight_of(b, name))
        except CheckpointError as error:
            problems.append(str(error))
            continue
        if pair[0].shape == pair[1].shape:
            pairs[name] = pair
        else:
            other_shapes.append(f"{safe_name(name)}: {list(pair[0].shape)} and {list(pair[1].shape)}")
    if not pairs and not problems:
        problems.append(f"{source} and {other}: expected two checkpoints of one model, found no weight that both have")
    if problems:
        more = f"; and {len(problems) - _MOST_NAMED} more" if len(problems) > _MOST_NAMED else ""
        raise CheckpointError("; ".join(problems[:_MOST_NAMED]) + more)
    chosen = _chosen(list(pairs), num_layers, options)
    if not chosen:
        raise CheckpointError(f"--layers: expected layers of {source}, found no weight that both have in them")
    return ComparisonPlan(
        source=source,
        other=other,
        pairs={name: pairs[name] for name in chosen},
        forwards=_forwards(pairs, config, options),
        num_layers=num_layers,
        num_left_out=len(pairs) - len(chosen),
        only_in_source=sorted(names[0] - names[1]),
        only_in_other=sorted(names[1] - names[0]),
        other_shapes=other_shapes,
    )


def compare(
    plan: ComparisonPlan, workers: int, on_progress: Callable[[int, int], None] = lambda done, total: None
) -> CheckpointComparison:
    """Compare in several processes, each of which has a few rows of two weights in memory, or one expert.

    `on_progress` gets the number of weights and layers that are done, and of all.

    :raises CheckpointError: when a weight can't be read, or a process was killed.
    """
    # Layers first: one takes longer than any weight.
    jobs: list[_Comparison] = [partial(_compare_layer, plan.source, plan.other, layer) for layer in plan.forwards]
    jobs += [partial(_compare_pair, pair) for pair in plan.pairs.values()]
    results: dict[int, Any] = {}
    turns = do_jobs(
        jobs,
        [_run] * workers,
        if_killed="a process that compares was killed; was memory short? Try again with fewer --workers",
    )
    with closing(turns):
        for turn in turns:
            results.update(turn.done)
            on_progress(len(results), len(jobs))
    in_order = [results[index] for index in range(len(jobs))]
    num_layers = len(plan.forwards)
    return CheckpointComparison(
        weights=[
            WeightComparison(
                name,
                part_of(name, plan.num_layers),
                layer_of(name),
                (plan.pairs[name][0].precision, plan.pairs[name][1].precision),
                errors,
            )
            for name, errors in zip(plan.pairs, in_order[num_layers:], strict=True)
        ],
        forwards=in_order[:num_layers],
        num_left_out=plan.num_left_out,
        only_in_source=plan.only_in_source,
        only_in_other=plan.only_in_other,
        other_shapes=plan.other_shapes,
    )


def _weights(tensors: StoredTensors) -> list[str]:
    """The names that stand for numbers of the model: not scales."""
    return [
        name
        for name in tensors
        if not name.endswith(_INPUT_SCALE) and not (name.endswith(SCALES) and name.removesuffix(SCALES) in tensors)
    ]


def _in_order(name: str, num_layers: int | None) -> tuple[int, list[str]]:
    parts = [one.zfill(6) if one.isdecimal() else one for one in name.split(".")]  # numbers as numbers
    return PARTS.index(part_of(name, num_layers)), parts


def _chosen(names: Sequence[str], num_layers: int | None, options: ComparisonOptions) -> list[str]:
    if options.layers is not None:
        names = [name for name in names if layer_of(name) in options.layers]
    if options.sample is None:
        return list(names)
    groups: dict[tuple[str, int | None], list[str]] = {}
    for name in names:
        part = part_of(name, num_layers)
        groups.setdefault((part, layer_of(name) if part == EXPERTS else None), []).append(name)
    return [one for group in groups.values() for one in _spread(group, options.sample)]


def _spread(names: Sequence[Any], most: int) -> list[Any]:
    """Return some of the names, evenly spaced, the first and the last among them."""
    if len(names) <= most:
        return list(names)
    return [names[int(at)] for at in np.linspace(0, len(names) - 1, most).round()]


def _forwards(pairs: Collection[str], config: Mapping[str, Any], options: ComparisonOptions) -> list[int]:
    """The first, the middle and the last layer with all its experts in both checkpoints."""
    if any(not isinstance(config.get(key), int) for key in (*MOE_SETTINGS, "num_hidden_layers")):
        return []
    stored = sorted({layer for name in pairs if (layer := layer_of(name)) is not None})
    layers = [layer for layer in stored if options.layers is None or layer in options.layers]
    if options.layers is None:
        layers = [layer for layer in layers if layer < config["num_hidden_layers"]]
    complete = [
        layer
        for layer in layers
        if _norm_name(layer) in pairs and all(name in pairs for name in moe_weights(layer, config))
    ]
    return _spread(complete, _MOST_FORWARDS)


def _norm_name(layer: int) -> str:
    return f"model.layers.{layer}.post_attention_layernorm.weight"


def _run(comparison: _Comparison, say: Say) -> LayerComparison | ErrorSums:
    return comparison(say)


def _compare_pair(pair: tuple[ComparedWeight, ComparedWeight], say: Say) -> ErrorSums:
    return compare_weights(*pair)


def _compare_layer(source: Path, other: Path, layer: int, say: Say) -> LayerComparison:
    config = read_config(source)
    readers = [_reader(open_checkpoint(folder), say) for folder in (source, other)]
    try:
        with np.errstate(all="ignore"):  # what is not finite then is counted
            tokens = random_tokens(readers[0](_norm_name(layer)), NUM_TOKENS, _SEED + layer)
            before, after = (moe_output(tokens, layer, config, read) for read in readers)
    except (IndexError, TypeError, ValueError) as error:  # numpy raises these for shapes that don't fit each other
        raise CheckpointError(
            f"{source}: layer {layer}: expected experts that fit the numbers in config.json: {error}; download it "
            "again, or leave the layer out (--layers)"
        ) from error
    errors = ErrorSums()
    errors.add(before.output, after.output)
    is_same = (before.experts[:, :, None] == after.experts[:, None, :]).any(axis=2)
    return LayerComparison(layer, errors, float(is_same.mean()))


def _reader(tensors: StoredTensors, say: Say) -> ReadWeight:
    def read(name: str) -> Floats:
        say(0)  # a layer may take a minute, and this ends it when the main process was killed
        return weight_of(tensors, name).read()

    return read
