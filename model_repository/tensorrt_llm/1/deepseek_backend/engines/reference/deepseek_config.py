"""The shape of a DeepSeek-V3 model, read from its config.json and checked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepseek_backend.errors import EngineError

ARCHITECTURE = "DeepseekV3ForCausalLM"

_ONLY_VALUES: Mapping[str, Any] = {
    "attention_bias": False,
    "hidden_act": "silu",
    "moe_layer_freq": 1,
    "rope_interleave": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
"""Keys that change the computation, with the value that every published DeepSeek-V3 has. A key may be absent."""


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071): how a context of `original_max_position_embeddings` was made `factor` times as long."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32
    """Dimensions with more turns than this in the original context keep their frequency."""
    beta_slow: float = 1
    """Dimensions with fewer turns than this in the original context are slowed down by `factor`."""
    mscale: float = 0
    mscale_all_dim: float = 0


@dataclass(frozen=True, kw_only=True)
class DeepseekConfig:
    """The keys of config.json that the forward pass reads, by their published names."""

    hidden_size: int
    num_hidden_layers: int
    first_k_dense_replace: int
    """Number of first layers with a dense MLP; the others have experts."""
    num_attention_heads: int
    q_lora_rank: int | None
    """None: the query has one projection instead of two."""
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool
    routed_scaling_factor: float
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    yarn: YarnScaling | None
    tie_word_embeddings: bool = False
    weight_block_size: tuple[int, int] = (128, 128)
    """Rows and columns of an FP8 matrix that share a scale."""
    eos_token_ids: frozenset[int] = frozenset()
    """End tokens by config.json; those of generation_config.json count more."""


def read_config(folder: Path) -> DeepseekConfig:
    """Read the config.json in `folder`.

    :raises EngineError: when it describes a model that this engine can't compute.
    """
    document = read_json(folder / "config.json")
    problems = [
        f"{key}: expected {only!r}, got {document[key]!r}"
        for key, only in _ONLY_VALUES.items()
        if document.get(key, only) != only
    ]
    if (architectures := document.get("architectures")) != [ARCHITECTURE]:
        problems.insert(0, f"architectures: expected {[ARCHITECTURE]}, got {architectures!r}")
    quantization = document.get("quantization_config") or {}
    if (method := quantization.get("quant_method", "fp8")) != "fp8":
        problems.append(f"quantization_config.quant_method: expected fp8, got {method!r}")
    if problems:
        raise EngineError(f"config.json: the reference engine can't compute this model: {'; '.join(problems)}")
    # transformers 5 writes rope_parameters, with rope_theta inside; published checkpoints have the other two keys.
    rope = document.get("rope_parameters") or document.get("rope_scaling") or {}
    given = {
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "n_shared_experts": 1,
        "rms_norm_eps": 1e-6,
        **{name: value for name, value in document.items() if value is not None},
        "q_lora_rank": document.get("q_lora_rank"),
        "rope_theta": rope.get("rope_theta", document.get("rope_theta", 10000.0)),
        "yarn": _yarn(rope, document.get("max_position_embeddings")),
        "weight_block_size": tuple(quantization.get("weight_block_size") or (128, 128)),
        "eos_token_ids": token_ids(document.get("eos_token_id")),
    }
    names = DeepseekConfig.__dataclass_fields__
    try:
        config = DeepseekConfig(**{name: value for name, value in given.items() if name in names})
    except TypeError as error:  # its message ends with the names of the missing keys
        raise EngineError(f"config.json: keys are missing: {str(error).partition(': ')[2]}") from error
    if config.topk_group < config.n_group and (
        config.n_routed_experts % config.n_group or config.n_routed_experts < 2 * config.n_group
    ):
        raise EngineError(
            f"config.json: n_group: expected groups of two or more of the {config.n_routed_experts} experts, of equal "
            f"size, got {config.n_group} groups"
        )
    return config


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    :raises EngineError: when there is none.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise EngineError(f"{path.name}: can't be read: {error.strerror}") from error
    except ValueError as error:
        raise EngineError(f"{path.name}: not JSON: {error}") from error
    if not isinstance(document, dict):
        raise EngineError(f"{path.name}: expected a JSON object, got {type(document).__name__}")
    return document


def token_ids(given: int | list[int] | None) -> frozenset[int]:
    """Return the token ids of a key that may give one, several or none."""
    if given is None:
        return frozenset()
    return frozenset([given] if isinstance(given, int) else given)


def _yarn(rope: Mapping[str, Any], max_position_embeddings: Any) -> YarnScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "yarn":
        raise EngineError(f"config.json: rope_scaling.type: expected yarn, got {kind!r}")
    given = {"original_max_position_embeddings": max_position_embeddings, **rope}
    return YarnScaling(
        **{name: given[name] for name in YarnScaling.__dataclass_fields__ if given.get(name) is not None}
    )
