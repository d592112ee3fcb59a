"""The settings of the model and of parallelism."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from deepseek_triton_build.arithmetic.gpu_memory import GIB, Budget
from deepseek_triton_build.arithmetic.shares import FP8_BLOCK
from deepseek_triton_build.data.planned_settings import GUIDE, Setting
from deepseek_triton_build.planning.batch_sizes import Sizes
from deepseek_triton_build.planning.layout import needs_attention_dp
from deepseek_triton_build.planning.target import Target
from deepseek_triton_build.rules.attention import LOW_CONCURRENCY


def model_settings(target: Target) -> Iterable[Setting]:
    request, variant = target.request, target.variant
    other = target.checkpoint.published_for
    title = f"{other}, planned as {variant.name}, whose architecture it has" if other else variant.title
    yield Setting("model", request.model or target.checkpoint.model, f"{title}, {WEIGHTS[target.precision]}")
    yield Setting("backend", "pytorch", "the engine DeepSeek runs on in TensorRT-LLM", source=GUIDE)
    yield Setting("trust_remote_code", variant.trust_remote_code, variant.trust_remote_code_reason)


WEIGHTS: Mapping[str, str] = {
    "fp8": "FP8 weights",
    "fp4": "NVFP4 weights",
    "w4a8": "INT4 experts with FP8 activations",
    "w4a16": "INT4 weights with 16-bit activations",
}
"""Precision -> the weights in words."""


def parallelism_settings(target: Target, sizes: Sizes, budget: Budget) -> Iterable[Setting]:
    layout, each = sizes.layout, budget.weights / GIB
    yield Setting(
        "tensor_parallel_size",
        layout.tensor_parallel_size,
        f"{target.num_gpus} GPUs hold one copy of the weights, each {each:{'.1f' if each >= 0.1 else '.3f'}} of its "
        f"{budget.memory / GIB:.1f} GiB{_recommended(target)}",
    )
    yield Setting(
        "moe_expert_parallel_size",
        layout.expert_parallel_size,
        _expert_reason(target, layout.tensor_parallel_size, layout.expert_parallel_size),
    )
    yield Setting(
        "pipeline_parallel_size", layout.pipeline_parallel_size, _pipeline_reason(target, layout.pipeline_parallel_size)
    )
    yield Setting(
        "enable_attention_dp",
        layout.attention_dp,
        _attention_dp_reason(target, sizes),
        source="TensorRT-LLM 0.19 examples/deepseek_v3/README.md",
    )


def _recommended(target: Target) -> str:
    more = target.gpu.recommended_gpus.get(target.precision, 0)
    return f"; {more} GPUs are recommended for the best performance" if more > target.num_gpus else ""


def _expert_reason(target: Target, tp: int, ep: int) -> str:
    number = target.architecture.num_routed_experts
    if ep == tp:
        return f"each GPU holds whole experts, {number} / {ep}"
    divided = f"{number} experts in {ep} groups, each expert divided among {tp // ep} GPUs"
    return f"{divided}; above 8 only wide EP's back end is published"


def _pipeline_reason(target: Target, pp: int) -> str:
    if pp > 1:
        return "as asked for: less traffic between nodes, more latency"
    if target.num_nodes > 1:
        return f"off: tensor parallelism spans the {target.num_nodes} nodes, as in the two-node runs of the guide"
    return "off: tensor parallelism runs over one node's NVLink"


def _attention_dp_reason(target: Target, sizes: Sizes) -> str:
    if sizes.attention_dp_reason:
        return sizes.attention_dp_reason
    if sizes.layout.attention_dp and needs_attention_dp(target):
        a = target.architecture
        return (
            f"each GPU attends to requests of its own, because {sizes.layout.tensor_parallel_size} GPUs can't share "
            f"{a.num_heads} heads of {a.qk_nope_head_dim + a.qk_rope_head_dim} columns in whole FP8 blocks of "
            f"{FP8_BLOCK}"
        )
    if sizes.layout.attention_dp:
        return (
            f"each GPU attends to requests of its own: above {LOW_CONCURRENCY} concurrent requests the KV cache, which "
            "tensor parallelism would copy to every GPU, matters more"
        )
    if (target.request.workload.concurrency or 0) > LOW_CONCURRENCY:
        return "off: all GPUs work on every request's attention, which shortens a step; profile throughput turns it on"
    return f"off: up to {LOW_CONCURRENCY} concurrent requests are faster without it, with CUDA graphs"
