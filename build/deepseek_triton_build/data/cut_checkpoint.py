"""Checkpoints with fewer layers or experts than the model, which test hardware: `checkpoint cut` makes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from deepseek_triton_build.data.catalog import Architecture

_CUT_FIGURES = {"num_hidden_layers": "num_layers", "n_routed_experts": "num_routed_experts"}
"""Key of config.json that a cut lowers -> attribute of Architecture."""


def cut_architecture(config: Mapping[str, Any], whole: Architecture) -> Architecture | None:
    """Return the shape that config.json gives a checkpoint cut from one of shape `whole`; None when it isn't cut."""
    shape = {name: config.get(key, getattr(whole, name)) for key, name in _CUT_FIGURES.items()}
    is_within = all(type(found) is int and 0 < found <= getattr(whole, name) for name, found in shape.items())
    is_whole = all(found == getattr(whole, name) for name, found in shape.items())
    if not is_within or is_whole or config.get("hidden_size", whole.hidden_size) != whole.hidden_size:
        return None
    num_mtp = config.get("num_nextn_predict_layers", 0)
    return replace(
        whole,
        **shape,
        num_dense_layers=min(whole.num_dense_layers, shape["num_layers"]),
        num_mtp_layers=num_mtp if type(num_mtp) is int else 0,
    )


def cut_summary(cut: Architecture, whole: Architecture) -> str:
    """Say what is left: "5 of 61 layers, 32 of 256 routed experts"."""
    figures = (("layers", "num_layers"), ("routed experts", "num_routed_experts"))
    pairs = ((noun, getattr(cut, name), getattr(whole, name)) for noun, name in figures)
    return ", ".join(f"{left} of {of} {noun}" for noun, left, of in pairs if left < of)
