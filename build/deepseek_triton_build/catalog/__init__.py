"""The catalogue: variants and GPUs as data, each figure with its source beside it in the YAML."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

import yaml

from deepseek_triton_build.errors import UnknownNameError


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A model that can be served."""

    name: str
    title: str
    model: str
    """Hugging Face name, or "tiny"."""
    engines: tuple[str, ...]
    """The engines it can run on; the first is the default."""
    presets: tuple[str, ...] = ()
    """Deployments whose pace the simulated engine can keep; the backend's own list, held to it by a test."""
    precision: str = ""
    weight_bytes: int = 0
    weight_bytes_source: str = ""
    num_layers: int = 0
    kv_values_per_token_per_layer: int = 0
    kv_values_source: str = ""
    max_position_embeddings: int = 0
    default_sampling: Mapping[str, float] = field(default_factory=dict)
    default_sampling_source: str = ""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    name: str
    title: str
    memory_mib: int
    memory_source: str
    gpus_per_node: int
    min_gpus: Mapping[str, int]
    """Precision -> GPUs one instance needs."""
    min_gpus_source: str
    moe_backend: Mapping[str, str]
    """Precision -> moe_config.backend."""
    moe_backend_source: str


@cache
def variants() -> dict[str, Variant]:
    return {name: _variant(name, entry) for name, entry in _load("variants.yaml").items()}


@cache
def gpus() -> dict[str, Gpu]:
    return {name: Gpu(name=name, **entry) for name, entry in _load("gpus.yaml").items()}


def find_variant(name: str) -> Variant:
    """:raises UnknownNameError: naming the nearest variant."""
    variant: Variant = _find("variant", name, variants())
    return variant


def find_gpu(name: str) -> Gpu:
    """:raises UnknownNameError: naming the nearest GPU."""
    gpu: Gpu = _find("GPU", name, gpus())
    return gpu


def _variant(name: str, entry: dict[str, Any]) -> Variant:
    lists = {key: tuple(entry.get(key, ())) for key in ("engines", "presets")}
    return Variant(name=name, **(entry | lists))


def _find(kind: str, name: str, entries: dict[str, Any]) -> Any:
    if name.lower() not in entries:
        raise UnknownNameError(kind, name, entries)
    return entries[name.lower()]


def _load(file: str) -> dict[str, dict[str, Any]]:
    entries: dict[str, dict[str, Any]] = yaml.safe_load((resources.files(__package__) / file).read_text("utf-8"))
    return entries
