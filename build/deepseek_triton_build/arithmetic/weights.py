"""Bytes of a checkpoint by the shapes: exact, 688,574,839,360 for DeepSeek-V3 in FP8."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

from deepseek_triton_build.data.catalog import Architecture, KnownCheckpoint


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Bytes of a checkpoint, by parts that are divided among the GPUs in different ways."""

    routed_experts: float
    attention: float
    """The attention projections that tensor parallelism divides; attention DP keeps them whole on every rank."""
    replicated: float
    """Attention's down-projections, router and norms: every rank holds them whole."""
    dense: float
    """Shared experts and the first dense layers."""
    embeddings: float
    mtp_experts: float
    """The routed experts of the MTP layer; they are divided like the other experts."""
    mtp: float
    """The rest of the MTP layer."""

    @property
    def total(self) -> float:
        """Bytes of the whole checkpoint."""
        whole_layers = self.routed_experts + self.attention + self.replicated + self.dense
        return whole_layers + self.embeddings + self.mtp_experts + self.mtp


# A search for the fewest GPUs asks for the same weights a hundred times, which took a tenth of `variants`.
@cache
def weights(architecture: Architecture, checkpoint: KnownCheckpoint) -> Weights:
    """Compute the parts of `checkpoint` from the shapes of `architecture` and the formats of its precision."""
    a, stored = architecture, _STORED[checkpoint.precision]
    num_moe = a.num_layers - a.num_dense_layers
    wo_stored: Format = "nvfp4" if checkpoint.wo_quantized else stored["attention"]
    dense_mlp = 3 * _linear(a.intermediate_size, a.hidden_size, stored["dense"])
    embeddings = 2 * _linear(a.vocab_size, a.hidden_size, "bf16")
    return Weights(
        routed_experts=num_moe * _experts(a, a.num_routed_experts, stored["routed"]),
        attention=a.num_layers * _divided_attention(a, stored["attention"], wo_stored),
        replicated=a.num_layers * _whole_attention(a, stored["attention"]) + num_moe * _router(a) + a.hidden_size * 2,
        dense=num_moe * _experts(a, a.num_shared_experts, stored["dense"]) + a.num_dense_layers * dense_mlp,
        embeddings=embeddings,
        mtp_experts=a.num_mtp_layers * _experts(a, a.num_routed_experts, stored["mtp"]),
        mtp=a.num_mtp_layers * (_mtp_layer(a, stored["mtp"]) + embeddings),
    )


Format = Literal["bf16", "fp8", "nvfp4", "int4"]
_STORED: Mapping[str, Mapping[str, Format]] = {
    "fp8": {"routed": "fp8", "dense": "fp8", "attention": "fp8", "mtp": "fp8"},
    "fp4": {"routed": "nvfp4", "dense": "nvfp4", "attention": "bf16", "mtp": "bf16"},
    "w4a8": {"routed": "int4", "dense": "fp8", "attention": "fp8", "mtp": "fp8"},
    "w4a16": {"routed": "int4", "dense": "int4", "attention": "bf16", "mtp": "bf16"},
}
"""Precision -> the format of each part. NVFP4 checkpoints keep attention (the later ones all of it but wo) and the MTP
layer in 16 bits (their hf_quant_config.json); W4AFP8 quantizes the routed experts only (TensorRT-LLM's guide). W4A16 is
compressed-tensors' form, with attention and lm_head left out of it."""


def _linear(rows: int, columns: int, stored: Format) -> float:
    """Return the bytes of a weight matrix with its scales."""
    values = rows * columns
    if stored == "bf16":
        return values * 2
    if stored == "fp8":  # a 32-bit scale for each block of 128 x 128
        return values + 4 * math.ceil(rows / 128) * math.ceil(columns / 128)
    if stored == "nvfp4":  # an 8-bit scale for every 16 values
        return values / 2 + values / 16
    return values / 2 + values / 128 * 2  # int4: a 16-bit scale for every 128 values


def _experts(a: Architecture, number: int, stored: Format) -> float:
    """Return the bytes of the gate, up and down projections of `number` experts."""
    return number * 3 * _linear(a.moe_intermediate_size, a.hidden_size, stored)


def _router(a: Architecture) -> float:
    return a.num_routed_experts * (a.hidden_size * 2 + 4)  # each expert also has a 32-bit bias


def _divided_attention(a: Architecture, stored: Format, wo_stored: Format) -> float:
    """Return the bytes of a layer's projections that are divided by attention heads."""
    queries = _linear(a.num_heads * (a.qk_nope_head_dim + a.qk_rope_head_dim), a.q_lora_rank, stored)
    keys_values = _linear(a.num_heads * (a.qk_nope_head_dim + a.v_head_dim), a.kv_lora_rank, stored)
    return queries + keys_values + _linear(a.hidden_size, a.num_heads * a.v_head_dim, wo_stored)


def _whole_attention(a: Architecture, stored: Format) -> float:
    """Return the bytes of a layer's down-projections, norms and indexer, which every rank holds."""
    down = _linear(a.q_lora_rank, a.hidden_size, stored)
    down += _linear(a.kv_lora_rank + a.qk_rope_head_dim, a.hidden_size, stored)
    norms = (2 * a.hidden_size + a.q_lora_rank + a.kv_lora_rank) * 2
    if not a.is_sparse:
        return down + norms
    indexer = _linear(a.index_num_heads * a.index_head_dim, a.q_lora_rank, stored)
    indexer += _linear(a.index_head_dim, a.hidden_size, stored)
    return down + norms + indexer + _linear(a.index_num_heads, a.hidden_size, "bf16")


def _mtp_layer(a: Architecture, stored: Format) -> float:
    """Return the bytes of the MTP layer without routed experts and embeddings: the rest of a MoE layer, the projection
    that joins token and hidden state, and three more norms."""
    attention = _divided_attention(a, stored, stored) + _whole_attention(a, stored)
    joining = _linear(a.hidden_size, 2 * a.hidden_size, "bf16") + 3 * a.hidden_size * 2
    return attention + _experts(a, a.num_shared_experts, stored) + _router(a) + joining
