"""The parts and layers of a DeepSeek model, by the names of its tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping

_LAYER = re.compile(r"model\.layers\.(\d{1,9})\.")
EXPERTS = "routed experts"
_MTP = "MTP layer"
_OTHER = "other"
_PATTERNS: Mapping[str, re.Pattern[str]] = {
    "scales": re.compile(r".*(?:_scale|_scale_inv|_scale_2|_scales|\.weight_shape)", re.DOTALL),
    "embedding": re.compile(r"model\.embed_tokens\..*", re.DOTALL),
    "norms": re.compile(r"model\.(?:layers\.\d+\..*)?\w*norm\..*", re.DOTALL),
    "attention": re.compile(r"model\.layers\.\d+\.self_attn\..*", re.DOTALL),
    "router": re.compile(r"model\.layers\.\d+\.mlp\.gate\..*", re.DOTALL),
    EXPERTS: re.compile(r"model\.layers\.\d+\.mlp\.experts\..*", re.DOTALL),
    "shared experts": re.compile(r"model\.layers\.\d+\.mlp\.shared_experts\..*", re.DOTALL),
    "dense MLP": re.compile(r"model\.layers\.\d+\.mlp\..*", re.DOTALL),
    "head": re.compile(r"lm_head\..*", re.DOTALL),
}
"""Part -> the tensors that belong to it, unless they belong to the MTP layer or an earlier one."""
PARTS = (
    *("embedding", "attention", "dense MLP", "shared experts", EXPERTS, "router", "norms"),
    *(_MTP, "head", "scales", _OTHER),
)
"""All parts, in the order in which they are shown."""


def part_of(name: str, num_layers: int | None) -> str:
    """Return the part that a tensor is in, one of PARTS.

    :param num_layers: layers before the MTP layer; None: it is not known, and no layer counts as one.
    """
    layer = layer_of(name)
    if layer is not None and num_layers is not None and layer >= num_layers:
        return _MTP
    return next((part for part, pattern in _PATTERNS.items() if pattern.fullmatch(name)), _OTHER)


def layer_of(name: str) -> int | None:
    """Return the number of the layer that a tensor is in; None for embeddings, the last norm and the head."""
    match = _LAYER.match(name)
    return int(match[1]) if match else None


def in_order(name: str) -> tuple[int, list[tuple[int, str]]]:
    """Return a key that sorts by layer, with embeddings first, then by name, with numbers as numbers."""
    layer = layer_of(name)
    parts = [(len(part), part) if part.isdecimal() else (0, part) for part in name.split(".")]
    return (-1 if layer is None else layer, parts)
