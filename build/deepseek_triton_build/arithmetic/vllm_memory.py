"""GPU memory under vLLM: it takes a share of the GPU, and what weights and one iteration leave of it is the KV cache.

Measured with vLLM 0.25.1 on H200s: R1 FP8 on eight, R1 W4A16 on four, 17 of R1's layers in FP8 on two, TP+EP and DP+EP,
and 32 of V4-Flash's on one. Tests hold the arithmetic to these figures.
"""

import math
from collections.abc import Mapping
from functools import cache

from deepseek_triton_build.arithmetic.block_pool import BLOCK_TOKENS, DS_MLA, block_pool
from deepseek_triton_build.arithmetic.gpu_memory import (
    CONTEXT_BYTES,
    GIB,
    Budget,
    KvDtype,
    Layout,
    kv_bytes_per_token,
    weight_bytes_per_gpu,
)
from deepseek_triton_build.data.catalog import Architecture, CompressedAttention, Gpu, KnownCheckpoint, Precision
from deepseek_triton_build.data.vllm import VllmVersion

# Memory that nvidia-smi counts and PyTorch does not: 140.4 against 139.8 GiB on an H200, 79.6 against 79.1 on an H100
# (the "total capacity" of public out-of-memory messages).
_DRIVER_BYTES = int(0.6 * GIB)
# A captured size. vLLM's graphs share one pool, so a size takes little: an estimate. V4's are whole ones and pieces:
# vLLM set 1.16 GiB aside for 19 sizes.
_GRAPH_BYTES, _CSA_GRAPH_BYTES = 20 * 2**20, 60 * 2**20
# Data parallelism adds this to vLLM's estimate of the graphs: 4.29 GiB were found for 19 sizes of two ranks.
_DP_GRAPH_BYTES = 4 * GIB
# Memory that is taken beside vLLM's share, as two H200s reported: 2.2 GiB of graphs above vLLM's estimate of them, 2.0
# of NCCL and others, 2.5 more through Triton.
_BESIDE_BYTES = int(6.7 * GIB)
_CONTEXT_TOKENS = 64 * 1024
"""Most tokens of earlier chunks whose keys and values are computed again at once (vLLM
vllm/model_executor/layers/attention/mla_attention.py, determine_chunked_prefill_workspace_size)."""
# What V4 takes on Blackwell besides all that is counted: a test has the log of eight B200s. An H200 needed none.
_MEGA_MOE_BYTES = int(1.5 * GIB)
# Copies of the experts' activations, where they are more than one: Marlin took as much again (the second of the
# measured rows).
_EXPERT_COPIES: Mapping[Precision, int] = {"w4a16": 2}


def vllm_budget(
    gpu: Gpu,
    architecture: Architecture,
    checkpoint: KnownCheckpoint,
    layout: Layout,
    *,
    gpu_memory_utilization: float,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    kv_dtype: KvDtype,
    vllm: VllmVersion,
    max_model_len: int | None = None,
    num_draft_tokens: int = 0,
    mtp: bool = False,
    cuda_graphs: bool = True,
    mla: bool = True,
    kv_form: str = "",
) -> Budget:
    """Return how a rank's memory is used. A negative KV cache means that it doesn't fit.

    :param layout: DP+EP is `attention_dp` here, too: every rank holds attention and dense layers whole.
    :param max_num_seqs: requests of one rank.
    :param max_model_len: None for all that the model reads; only V4's buffers depend on it.
    :param num_draft_tokens: tokens that are drafted a step, by any method.
    :param mtp: whether the checkpoint's own draft is used, which vLLM loads then. Another method's own weights are not
        counted.
    :param mla: False where VLLM_MLA_DISABLE makes it ordinary attention, whose KV cache holds keys and values of each
        head, as wide as the keys (vLLM vllm/model_executor/models/deepseek_v2.py, DeepseekV2Attention).
    :param kv_form: how V4's cache is stored, in block_pool's words; empty for what takes most of the usual ones.
    """
    a, csa = architecture, architecture.csa
    heads = _heads(a, layout)
    held = weight_bytes_per_gpu(a, checkpoint, layout, mtp=mtp)
    # MLA's decode uses kv_b_proj in 16 bits: a copy, but of weights that have 16 bits a view.
    if mla and not csa and checkpoint.precision in ("fp8", "w4a8"):
        held += int(a.num_layers * heads * (a.qk_nope_head_dim + a.v_head_dim) * a.kv_lora_rank * 2)
    # V4's MegaMoE on Blackwell sends a token to the ranks of its experts alone.
    together = 1 if csa and gpu.architecture == "blackwell" else layout.attention_dp_size
    graphs = 0
    if cuda_graphs:
        shared = _DP_GRAPH_BYTES if together > 1 else 0
        each = _CSA_GRAPH_BYTES if csa else _GRAPH_BYTES
        graphs = shared + len(captured_sizes(max_num_seqs, num_draft_tokens)) * each
    # The queries, a copy with the rotated part, and the output.
    if csa:
        attention = _of_compressed(a, csa, heads, max_num_batched_tokens, max_model_len or a.max_position_embeddings)
    else:
        key = a.qk_nope_head_dim + a.qk_rope_head_dim
        attention = int(max_num_batched_tokens * heads * (2 * key + a.v_head_dim) * 2)
        attention += mla * int(_CONTEXT_TOKENS * heads * (a.qk_nope_head_dim + a.v_head_dim) * 2)
    # Each token goes to several experts, of which vLLM keeps input, gate and up in 16 bits. Under data parallelism the
    # experts get the tokens of every rank, in one piece (vllm/model_executor/layers/fused_moe/modular_kernel.py).
    each = a.num_experts_per_token * (a.hidden_size + 2 * a.moe_intermediate_size) * 2
    experts = each * _EXPERT_COPIES.get(checkpoint.precision, 1) * max_num_batched_tokens * together
    activations = attention + experts + (_MEGA_MOE_BYTES if csa and gpu.architecture == "blackwell" else 0)
    kv_bytes = kv_bytes_per_token(
        a,
        kv_dtype,
        mtp_layers=int(mtp),  # vLLM runs the checkpoint's one layer again for each draft token
        pipeline_parallel_size=layout.pipeline_parallel_size,
    )
    if not mla:
        # MLA's latent of one layer -> keys and values of this rank's heads.
        of_heads = 2 * math.ceil(heads) * (a.qk_nope_head_dim + a.qk_rope_head_dim)
        kv_bytes = kv_bytes // (a.kv_lora_rank + a.qk_rope_head_dim) * of_heads
    share = int((gpu.memory - _DRIVER_BYTES) * gpu_memory_utilization)
    kv_cache = share - held - CONTEXT_BYTES - graphs - activations
    pool = None
    if csa:
        usual = "mxfp8" if csa.kv_source_layers and gpu.architecture == "blackwell" else DS_MLA
        windows, form = a.num_layers + mtp * a.num_mtp_layers, kv_form or usual
        tokens, drafts = max_num_batched_tokens, num_draft_tokens
        pool = block_pool(max(0, kv_cache), csa, windows, vllm, tokens=tokens, drafts=drafts, form=form)
    return Budget(
        memory=gpu.memory,
        weights=held,
        context=CONTEXT_BYTES,
        cuda_graphs=graphs,
        activations=activations,
        sampler=0,
        kv_cache=kv_cache,
        kv_bytes_per_token=pool.bytes_per_block // BLOCK_TOKENS if pool else kv_bytes,
        attention_dp_size=layout.attention_dp_size,
        pool=pool,
    )


def bytes_beside(architecture: Architecture, layout: Layout) -> int:
    """Return what vLLM takes beside its share of a GPU. A prompt in chunks makes the keys of 64K earlier tokens in one
    piece, for which vLLM sets nothing aside (_compute_prefill_context in mla_attention.py)."""
    a = architecture
    if a.csa:
        return _BESIDE_BYTES
    return _BESIDE_BYTES + int(_CONTEXT_TOKENS * _heads(a, layout) * (a.qk_nope_head_dim + a.qk_rope_head_dim) * 2)


def _of_compressed(a: Architecture, csa: CompressedAttention, heads: float, tokens: int, longest: int) -> int:
    """Return the bytes of an iteration's attention and streams in V4, 16 bits a value (vllm/models/deepseek_v4)."""
    # FlashMLA takes 64 heads or 128. The residual stream is there hc_mult times, and once more for the draft.
    values = 3 * (64 if heads <= 64 else 128) * csa.head_dim + 3 * csa.hc_mult * a.hidden_size
    chosen, metadata = a.index_topk * 4, 2 * (longest // 128) * 4
    # Four requests' entries in 16 bits (nvidia/flashmla.py), the indexer's scores (VLLM_SPARSE_INDEXER_MAX_LOGITS_MB).
    gathered = 4 * (longest // 4 + tokens) * csa.head_dim * 2 + 2**29
    return tokens * (values * 2 + chosen + metadata) + gathered


def _heads(architecture: Architecture, layout: Layout) -> float:
    """Return the attention heads of a GPU."""
    return architecture.num_heads if layout.attention_dp else architecture.num_heads / layout.tensor_parallel_size


_LARGEST_GRAPH = 512


@cache
def captured_sizes(max_num_seqs: int, num_draft_tokens: int) -> tuple[int, ...]:
    """Return the numbers of tokens that vLLM captures: 1, 2, 4, multiples of 8 to 256, then of 16, up to twice a full
    batch's tokens and 512 (vLLM vllm/config/vllm.py, _set_cudagraph_sizes)."""
    largest = min(max_num_seqs * (1 + num_draft_tokens) * 2, _LARGEST_GRAPH)
    return tuple(size for size in (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)) if size <= largest)
