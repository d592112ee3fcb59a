"""Bytes of a checkpoint by the shapes: exact, 688,574,839,360 for DeepSeek-V3 in FP8.

So are those of V4-Flash-0731, 166,878,536,440, and V4-Pro-0813, 892,727,580,904: as many as the headers of their shards
say (bojieli/OpenTallas data/inventory).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

from deepseek_triton_build.data.catalog import Architecture, CompressedAttention, KnownCheckpoint, Precision


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
    mtp: float = 0
    """The part of the rest of the MTP layer, or of DSpark's layers, that tensor parallelism divides."""
    mtp_replicated: float = 0
    """The part that every rank holds whole."""
    hash_tables: float = 0
    """Tables from token to experts, which every rank holds in half as many bytes: int32 instead of int64."""

    @property
    def total(self) -> float:
        """Bytes of the whole checkpoint."""
        return float(sum(vars(self).values()))


# A search for the fewest GPUs asks for the same weights a hundred times, which took a tenth of `variants`.
@cache
def weights(architecture: Architecture, checkpoint: KnownCheckpoint) -> Weights:
    """Compute the parts of `checkpoint` from the shapes of `architecture` and the formats of its precision."""
    if architecture.part_bytes:
        return Weights(**architecture.part_bytes)
    if architecture.csa is not None:
        return _compressed_weights(architecture, architecture.csa, checkpoint.precision)
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


Format = Literal["bf16", "fp8", "fp8_ue8m0", "mxfp4", "nvfp4", "int4"]
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
    if stored in ("fp8", "fp8_ue8m0"):  # a scale for each block of 128 x 128, of 32 bits or of 8
        return values + (4 if stored == "fp8" else 1) * math.ceil(rows / 128) * math.ceil(columns / 128)
    if stored == "mxfp4":  # an 8-bit scale for every 32 values
        return values / 2 + values / 32
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
    if a.attention != "dsa":
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


_COMPRESSED_EXPERTS: Mapping[str, Format] = {"mxfp4": "mxfp4", "fp8": "fp8", "fp4": "nvfp4"}
"""Precision -> the format of the routed experts of V4. Those of an NVFP4 checkpoint's draft stay MXFP4
(hf_quant_config.json of nvidia/DeepSeek-V4-Flash-NVFP4: mtp* excluded)."""


def _compressed_weights(a: Architecture, csa: CompressedAttention, precision: Precision) -> Weights:
    """Compute the parts of a checkpoint of V4, whose FP8 scales are of one byte."""
    width, stored = csa.head_dim, _COMPRESSED_EXPERTS.get(precision, "mxfp4")
    experts = _experts(a, a.num_routed_experts, stored)
    if stored == "nvfp4":  # two 32-bit scales for each of an expert's three matrices
        experts += a.num_routed_experts * 3 * 2 * 4
    streams = csa.hc_mult * a.hidden_size
    collapse = (csa.hc_mult * streams + csa.hc_mult + 1) * 4
    divided = _fp8(a.num_heads * width, a.q_lora_rank) + a.num_heads * 4  # with attn_sink
    divided += _fp8(csa.o_groups * csa.o_lora_rank, a.num_heads * width // csa.o_groups)
    divided += _fp8(a.hidden_size, csa.o_groups * csa.o_lora_rank)
    shared = _experts(a, a.num_shared_experts, "fp8_ue8m0")
    mixes = csa.hc_mult * (csa.hc_mult + 2)  # into a block, out of it, and between the streams
    whole = _fp8(a.q_lora_rank, a.hidden_size) + _fp8(width, a.hidden_size)
    whole += (a.q_lora_rank + width + 2 * a.hidden_size) * 2  # norms
    whole += 2 * (mixes * streams + mixes + 3) * 4  # hyper-connections, before attention and before the experts
    whole += a.num_routed_experts * a.hidden_size * 2  # router
    num_hash, bias = min(csa.num_hash_layers, a.num_layers), a.num_routed_experts * 4
    joining, joined = 2 * _fp8(a.hidden_size, a.hidden_size) + 3 * a.hidden_size * 2 + collapse, 0
    if a.draft == "dspark":  # main_proj and its norm, the last norm, the confidence head; the tables of the Markov head
        joining = _fp8(a.hidden_size, 3 * a.hidden_size) + 2 * a.hidden_size * 2
        joining += collapse + (a.hidden_size + csa.markov_rank) * 2
        joined = 2 * a.vocab_size * csa.markov_rank * 2
    n = a.num_mtp_layers
    return Weights(
        routed_experts=a.num_layers * experts,
        attention=a.num_layers * divided,
        replicated=a.num_layers * whole
        + (a.num_layers - num_hash) * bias
        + sum(_compressor(a, width, ratio) for ratio in csa.compress_ratios)
        + a.hidden_size * 2
        + collapse,
        dense=a.num_layers * shared,
        embeddings=2 * a.vocab_size * a.hidden_size * 2,
        mtp_experts=n * _experts(a, a.num_routed_experts, "fp8" if stored == "fp8" else "mxfp4"),
        mtp=n * (divided + shared) + joined if n else 0,
        mtp_replicated=n * (whole + bias) + joining if n else 0,
        hash_tables=num_hash * a.vocab_size * a.num_experts_per_token * 8,
    )


def _compressor(a: Architecture, width: int, ratio: int) -> int:
    """Return the bytes of what makes one entry of `ratio` tokens: two projections, position biases and a norm. Groups
    of four tokens overlap, so that the channels are twice as many, and have an indexer with a compressor of its own."""

    def entries(width: int, channels: int) -> int:
        return 2 * channels * a.hidden_size * 2 + ratio * channels * 4 + width * 2

    if ratio == 0:
        return 0
    if ratio != 4:
        return entries(width, width)
    queries = _fp8(a.index_num_heads * a.index_head_dim, a.q_lora_rank) + a.index_num_heads * a.hidden_size * 2
    return entries(width, 2 * width) + int(queries) + entries(a.index_head_dim, 2 * a.index_head_dim)


def _fp8(rows: int, columns: int) -> int:
    return int(_linear(rows, columns, "fp8_ue8m0"))
