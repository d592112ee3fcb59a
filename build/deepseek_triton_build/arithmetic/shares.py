"""The shares that parallelism makes of a model: which numbers of GPUs get equal ones.

FP8 weights have a scale for each block of 128 x 128 values. TensorRT-LLM divides the values and the scales among the
ranks each for themselves, and rounds up (load_weight_shard in tensorrt_llm/_torch/modules/linear.py), so a share has to
be whole blocks. The vocabulary need not divide: the engine pads it (tensorrt_llm/_torch/modules/embedding.py). Neither
need the dense layers and the shared experts: as many ranks divide them as get whole blocks (_compute_mlp_tp_size and
_compute_shared_expert_tp_size in tensorrt_llm/_torch/models/modeling_deepseekv3.py).
"""

from __future__ import annotations

from deepseek_triton_build.data.catalog import Architecture

FP8_BLOCK = 128
"""Rows and columns of an FP8 weight that share a scale."""
LARGEST_EXPERT_PARALLEL = 8
"""Ranks of expert parallelism above which the support matrix of MoE back ends has wide EP only."""


def cut_attention_blocks(architecture: Architecture, tensor_parallel_size: int) -> str:
    """Return which FP8 blocks of attention such a division cuts, in words; an empty string for none.

    The heads have to be divisible by the size.
    """
    a = architecture
    heads = a.num_heads // tensor_parallel_size
    widths = {
        "q_b_proj": a.qk_nope_head_dim + a.qk_rope_head_dim,
        "kv_b_proj": a.qk_nope_head_dim + a.v_head_dim,
        "o_proj": a.v_head_dim,
    }
    cut = (f"{heads} x {width} of {name}" for name, width in widths.items() if heads * width % FP8_BLOCK)
    return next(cut, "")


def divides_attention(architecture: Architecture, precision: str, tensor_parallel_size: int) -> bool:
    """Tell whether each rank gets an equal share of the heads, and of FP8 projections whole blocks."""
    if architecture.num_heads % tensor_parallel_size:
        return False
    return precision == "fp4" or not cut_attention_blocks(architecture, tensor_parallel_size)


def divides_experts(architecture: Architecture, precision: str, tensor_parallel_size: int) -> bool:
    """Tell whether each rank gets an equal share of the experts, of up to LARGEST_EXPERT_PARALLEL groups of ranks."""
    expert_parallel_size = min(tensor_parallel_size, LARGEST_EXPERT_PARALLEL)
    if architecture.num_routed_experts % expert_parallel_size or tensor_parallel_size % expert_parallel_size:
        return False
    ranks = tensor_parallel_size // expert_parallel_size
    return precision != "fp8" or architecture.moe_intermediate_size % (FP8_BLOCK * ranks) == 0
