"""The mixture of experts of one layer, computed with the weights of a checkpoint: what a changed precision does to it.

The formulas are those of DeepSeek-V3 (arXiv 2412.19437). All is float32, and weights are read one at a time, so that
what differs between two checkpoints is their weights alone: an engine would also round activations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from deepseek_triton_tools.checkpoints.number_formats import Floats

ReadWeight: TypeAlias = Callable[[str], Floats]
"""Returns a whole weight by its name."""
Experts: TypeAlias = npt.NDArray[np.intp]
MOE_SETTINGS = ("n_routed_experts", "num_experts_per_tok")
"""Entries that config.json has to have."""
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class MoeOutput:
    """The output for some tokens [tokens, hidden_size], and the experts [tokens, num_experts_per_tok], in order."""

    output: Floats
    experts: Experts


def moe_weights(layer: int, config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of all weights that `moe_output` may read."""
    prefix = f"model.layers.{layer}.mlp"
    yield _bias_name(prefix)
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
    experts, weights = _routed(tokens, config, read(f"{prefix}.gate.weight"), read(_bias_name(prefix)))
    output = np.zeros_like(tokens)
    if config.get("n_shared_experts"):
        output += _mlp(tokens, f"{prefix}.shared_experts", read)
    for expert in np.unique(experts).tolist():
        rows, places = np.nonzero(experts == expert)
        output[rows] += weights[rows, places, None] * _mlp(tokens[rows], f"{prefix}.experts.{expert}", read)
    return MoeOutput(output, np.sort(experts, axis=1))


def _routed(tokens: Floats, config: Mapping[str, Any], router: Floats, bias: Floats) -> tuple[Experts, Floats]:
    """Return the experts of each token and their weights. The bias takes part in the choice only."""
    scores = 1 / (1 + np.exp(-(tokens @ router.T)))
    choice = scores + bias
    num_groups, num_kept = config.get("n_group") or 1, config.get("topk_group") or 1
    if num_kept < num_groups:
        groups = choice.reshape(len(tokens), num_groups, -1)  # a view
        of_groups = np.sort(groups, axis=2)[:, :, -2:].sum(axis=2)  # the two best of each
        dropped = np.argsort(of_groups, axis=1)[:, : num_groups - num_kept]
        groups[np.arange(len(tokens))[:, None], dropped] = -np.inf
    experts = np.argsort(choice, axis=1)[:, -config["num_experts_per_tok"] :]
    weights = np.take_along_axis(scores, experts, axis=1)
    if config.get("norm_topk_prob", True):
        weights /= weights.sum(axis=1, keepdims=True)
    return experts, weights * np.float32(config.get("routed_scaling_factor", 1.0))


def _mlp(tokens: Floats, prefix: str, read: ReadWeight) -> Floats:
    gate = tokens @ read(f"{prefix}.gate_proj.weight").T
    gate /= 1 + np.exp(-gate)  # SiLU
    gate *= tokens @ read(f"{prefix}.up_proj.weight").T
    output: Floats = gate @ read(f"{prefix}.down_proj.weight").T
    return output


def _bias_name(prefix: str) -> str:
    return f"{prefix}.gate.e_score_correction_bias"
