"""Compares two checkpoints of the same model: each weight as numbers, and the output of some mixtures of experts.

A mixture of experts is computed by the formulas of DeepSeek-V3 (arXiv 2412.19437) with the weights of each checkpoint.
All is float32, and weights are read one at a time, so that what differs between two checkpoints is their weights alone:
an engine would also round activations.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from deepseek_triton_build.text import safe_name
from deepseek_triton_tools.checkpoints.job_processes import Say, do_jobs
from deepseek_triton_tools.checkpoints.model_parts import EXPERTS, PARTS, layer_of, part_of
from deepseek_triton_tools.checkpoints.number_formats import Floats
from deepseek_triton_tools.checkpoints.stored_tensors import StoredTensors, config_number, open_checkpoint, read_config
from deepseek_triton_tools.checkpoints.stored_weights import StoredWeight, is_weight, weight_of
from deepseek_triton_tools.checkpoints.weight_errors import ErrorSums, compare_weights
from deepseek_triton_tools.tool_errors import CheckpointError

NUM_TOKENS = 64
"""Random tokens that go through a mixture of experts."""
_MOST_FORWARDS = 3
_SEED = 0
_MOST_NAMED = 3
_PRECISIONS = {"F8_E4M3": "FP8", "I8": "INT4"}
"""Data type -> the name of the format for people. Another type is named as it is."""

Pairs: TypeAlias = Mapping[str, tuple[StoredWeight, StoredWeight]]
"""Name of a weight -> the weight in both checkpoints."""
ReadWeight: TypeAlias = Callable[[str], Floats]
"""Returns a whole weight by its name."""
_MOE_SETTINGS = ("n_routed_experts", "num_experts_per_tok")
"""Entries that config.json has to have."""
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


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


@dataclass(frozen=True, kw_only=True)
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
        for weight in self.of(part, layer):
            total += weight.errors
        return total

    def of(self, part: str, layer: int | None = None) -> list[WeightComparison]:
        return [weight for weight in self.weights if weight.part == part and layer in (None, weight.layer)]

    @property
    def parts(self) -> list[str]:
        return [part for part in PARTS if self.of(part)]

    @property
    def expert_layers(self) -> list[int]:
        return sorted({weight.layer for weight in self.of(EXPERTS) if weight.layer is not None})


def compare(
    source: Path,
    other: Path,
    *,
    layers: Collection[int] | None = None,
    sample: int | None = None,
    workers: int,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> CheckpointComparison:
    """Compare in several processes, each of which has a few rows of two weights in memory, or one expert.

    Of both the headers are read, and config.json of the first: DeepSeek's inference format has none.

    :param layers: layers to compare, without embedding and head; None: everything.
    :param sample: the most weights of each part, and of the experts of each layer; None: all.
    :param on_progress: gets the number of weights and layers that are done, and of all.
    :raises CheckpointError: with all that keeps them from being compared, when a weight can't be read, or when a
        process was killed.
    """
    a, b = _opened(source, other)
    config = read_config(source)
    num_layers = None if config.get("num_hidden_layers") is None else config_number(config, "num_hidden_layers")
    names = [{name for name in tensors if is_weight(tensors, name)} for tensors in (a, b)]
    pairs, other_shapes = _pairs(a, b, sorted(names[0] & names[1], key=partial(_in_order, num_layers)))
    chosen = _chosen(list(pairs), num_layers, layers, sample)
    if not chosen:
        raise CheckpointError(f"--layers: expected layers of {source}, found no weight that both have in them")
    forwards = _forwards(pairs, config, layers)
    # Layers first: one takes longer than any weight.
    jobs: list[int | tuple[StoredWeight, StoredWeight]] = [*forwards, *(pairs[name] for name in chosen)]
    works = [partial(_compare_one, source, other)] * workers
    results: dict[int, Any] = {}
    if_killed = "a process that compares was killed; was memory short? Try again with fewer --workers"
    with closing(do_jobs(jobs, works, if_killed=if_killed)) as turns:
        for turn in turns:
            results.update(turn.done)
            on_progress(len(results), len(jobs))
    in_order = [results[index] for index in range(len(jobs))]
    return CheckpointComparison(
        weights=[
            WeightComparison(name, part_of(name, num_layers), layer_of(name), _precisions(*pairs[name]), errors)
            for name, errors in zip(chosen, in_order[len(forwards) :], strict=True)
        ],
        forwards=in_order[: len(forwards)],
        num_left_out=len(pairs) - len(chosen),
        only_in_source=sorted(names[0] - names[1]),
        only_in_other=sorted(names[1] - names[0]),
        other_shapes=other_shapes,
    )


def _opened(*folders: Path) -> list[StoredTensors]:
    opened, problems = [], []
    for folder in folders:
        try:
            opened.append(open_checkpoint(folder))
        except CheckpointError as error:
            problems.append(str(error))
    if problems:
        raise CheckpointError("; ".join(problems))
    return opened


def _pairs(a: StoredTensors, b: StoredTensors, names: Sequence[str]) -> tuple[Pairs, list[str]]:
    """Return the weights that both have, and what is to be said of those that have another shape."""
    pairs, other_shapes, problems = {}, [], []
    for name in names:
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
        problems = [f"{a.folder} and {b.folder}: expected two checkpoints of one model, found no weight that both have"]
    if problems:
        more = f"; and {len(problems) - _MOST_NAMED} more" if len(problems) > _MOST_NAMED else ""
        raise CheckpointError("; ".join(problems[:_MOST_NAMED]) + more)
    return pairs, other_shapes


def _in_order(num_layers: int | None, name: str) -> tuple[int, list[str]]:
    # Layer 10 comes after layer 9.
    words = [word.zfill(6) if word.isdecimal() else word for word in name.split(".")]
    return PARTS.index(part_of(name, num_layers)), words


def _precisions(*pair: StoredWeight) -> tuple[str, str]:
    a, b = (_PRECISIONS.get(weight.stored.dtype, weight.stored.dtype) for weight in pair)
    return a, b


def _chosen(
    names: Sequence[str], num_layers: int | None, layers: Collection[int] | None, sample: int | None
) -> list[str]:
    groups: dict[tuple[str, int | None], list[str]] = {}
    for name in names:
        if layers is None or layer_of(name) in layers:
            part = part_of(name, num_layers)
            groups.setdefault((part, layer_of(name) if part == EXPERTS else None), []).append(name)
    return [name for group in groups.values() for name in _spread(group, sample)]


def _spread(names: Sequence[Any], most: int | None) -> list[Any]:
    """Return some of the names, evenly spaced, the first and the last among them."""
    if most is None or len(names) <= most:
        return list(names)
    return [names[int(at)] for at in np.linspace(0, len(names) - 1, most).round()]


def _forwards(pairs: Pairs, config: Mapping[str, Any], layers: Collection[int] | None) -> list[int]:
    """Return the first, the middle and the last layer with all its experts in both checkpoints."""
    if any(not isinstance(config.get(key), int) for key in (*_MOE_SETTINGS, "num_hidden_layers")):
        return []
    stored = {layer for name in pairs if (layer := layer_of(name)) is not None}
    complete = [
        layer
        for layer in sorted(stored)
        if (layer < config["num_hidden_layers"] if layers is None else layer in layers)
        and _norm_name(layer) in pairs
        and all(name in pairs for name in moe_weights(layer, config))
    ]
    return _spread(complete, _MOST_FORWARDS)


def _norm_name(layer: int) -> str:
    return f"model.layers.{layer}.post_attention_layernorm.weight"


def _compare_one(
    source: Path, other: Path, job: int | tuple[StoredWeight, StoredWeight], say: Say
) -> LayerComparison | ErrorSums:
    return _compare_layer(source, other, job, say) if isinstance(job, int) else compare_weights(*job)


def _compare_layer(source: Path, other: Path, layer: int, say: Say) -> LayerComparison:
    config = read_config(source)

    def reader(tensors: StoredTensors) -> ReadWeight:
        def read(name: str) -> Floats:
            # A layer may take a minute, and this ends it when the main process was killed.
            say(0)
            return weight_of(tensors, name).read()

        return read

    readers = [reader(open_checkpoint(folder)) for folder in (source, other)]
    try:
        # What is not finite then is counted.
        with np.errstate(all="ignore"):
            tokens = random_tokens(readers[0](_norm_name(layer)), NUM_TOKENS, _SEED + layer)
            before, after = (moe_output(tokens, layer, config, read) for read in readers)
    except (IndexError, TypeError, ValueError) as error:
        # numpy raises these for shapes that don't fit each other.
        raise CheckpointError(
            f"{source}: layer {layer}: expected experts that fit the numbers in config.json: {error}; download it "
            "again, or leave the layer out (--layers)"
        ) from error
    errors = ErrorSums()
    errors.add(before.output, after.output)
    is_same = (before.experts[:, :, None] == after.experts[:, None, :]).any(axis=2)
    return LayerComparison(layer, errors, float(is_same.mean()))


@dataclass(frozen=True)
class MoeOutput:
    """The output for some tokens [tokens, hidden_size], and the experts [tokens, num_experts_per_tok], in order."""

    output: Floats
    experts: npt.NDArray[np.intp]


def moe_weights(layer: int, config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of all weights that `moe_output` may read."""
    prefix = f"model.layers.{layer}.mlp"
    yield f"{prefix}.gate.e_score_correction_bias"
    yield f"{prefix}.gate.weight"
    if config.get("n_shared_experts"):
        yield from (f"{prefix}.shared_experts.{name}.weight" for name in _PROJECTIONS)
    for expert in range(config["n_routed_experts"]):
        yield from (f"{prefix}.experts.{expert}.{name}.weight" for name in _PROJECTIONS)


def random_tokens(norm: Floats, num_tokens: int, seed: int) -> Floats:
    """Return what an RMS norm with the weight `norm` gives for random tokens [num_tokens, hidden_size]."""
    tokens = np.random.default_rng(seed).standard_normal((num_tokens, norm.size), np.float32)
    tokens /= np.sqrt(np.mean(np.square(tokens), axis=1, keepdims=True))
    return tokens * norm


def moe_output(tokens: Floats, layer: int, config: Mapping[str, Any], read: ReadWeight) -> MoeOutput:
    """Return the output of routed and shared experts for tokens [tokens, hidden_size]."""
    prefix = f"model.layers.{layer}.mlp"
    router, bias = read(f"{prefix}.gate.weight"), read(f"{prefix}.gate.e_score_correction_bias")
    experts, weights = _routed(tokens, config, router, bias)
    output = np.zeros_like(tokens)
    if config.get("n_shared_experts"):
        output += _mlp(tokens, f"{prefix}.shared_experts", read)
    for expert in np.unique(experts).tolist():
        rows, places = np.nonzero(experts == expert)
        output[rows] += weights[rows, places, None] * _mlp(tokens[rows], f"{prefix}.experts.{expert}", read)
    return MoeOutput(output, np.sort(experts, axis=1))


def _routed(
    tokens: Floats, config: Mapping[str, Any], router: Floats, bias: Floats
) -> tuple[npt.NDArray[np.intp], Floats]:
    """Return the experts of each token and their weights. The bias takes part in the choice only."""
    scores = 1 / (1 + np.exp(-(tokens @ router.T)))
    choice = scores + bias
    num_groups, num_kept = config.get("n_group") or 1, config.get("topk_group") or 1
    if num_kept < num_groups:
        # Writing into this view changes `choice`.
        groups = choice.reshape(len(tokens), num_groups, -1)
        # The two best of each.
        of_groups = np.sort(groups, axis=2)[:, :, -2:].sum(axis=2)
        dropped = np.argsort(of_groups, axis=1)[:, : num_groups - num_kept]
        groups[np.arange(len(tokens))[:, None], dropped] = -np.inf
    experts = np.argsort(choice, axis=1)[:, -config["num_experts_per_tok"] :]
    weights = np.take_along_axis(scores, experts, axis=1)
    if config.get("norm_topk_prob", True):
        weights /= weights.sum(axis=1, keepdims=True)
    return experts, weights * np.float32(config.get("routed_scaling_factor", 1.0))


def _mlp(tokens: Floats, prefix: str, read: ReadWeight) -> Floats:
    gate = tokens @ read(f"{prefix}.gate_proj.weight").T
    # SiLU.
    gate /= 1 + np.exp(-gate)
    gate *= tokens @ read(f"{prefix}.up_proj.weight").T
    output: Floats = gate @ read(f"{prefix}.down_proj.weight").T
    return output
