"""How one model instance is divided among its GPUs: parallelism, attention DP, and the MoE back end."""

from __future__ import annotations

from deepseek_triton_build.arithmetic.gpu_memory import Layout
from deepseek_triton_build.arithmetic.shares import LARGEST_EXPERT_PARALLEL, divides_attention
from deepseek_triton_build.build_errors import RefusedPlanError
from deepseek_triton_build.data.catalog import MoeBackendRow, find_moe_backends
from deepseek_triton_build.data.spelling import spell
from deepseek_triton_build.planning.target import Target
from deepseek_triton_build.rules.attention import LOW_CONCURRENCY
from deepseek_triton_build.rules.moe import BALANCER

WIDE_EP = "WIDEEP"


def choose_layout(target: Target, *, attention_dp: bool) -> Layout:
    """Return the parallelism of the target, or raise RefusedPlanError if its stages don't divide its GPUs."""
    stages = target.request.pipeline_parallel_size
    if stages < 1 or target.num_gpus % stages:
        number = target.num_gpus
        raise RefusedPlanError(
            f"{number} GPUs can't be divided into {stages} equal pipeline stages", fix=f"use a divisor of {number}"
        )
    tensor = target.num_gpus // stages
    published = target.recipe.value("moe_expert_parallel_size")
    if published is not None and target.recipe.num_gpus in (None, target.num_gpus):
        expert = min(published, tensor)
    else:
        expert = min(tensor, LARGEST_EXPERT_PARALLEL)
    return Layout(
        tensor_parallel_size=tensor,
        expert_parallel_size=expert,
        pipeline_parallel_size=stages,
        attention_dp=attention_dp,
    )


def needs_attention_dp(target: Target) -> bool:
    """Tell whether tensor parallelism can't divide the attention of the target."""
    ranks = max(1, target.num_gpus // max(1, target.request.pipeline_parallel_size))
    return not divides_attention(target.architecture, target.precision, ranks)


def wants_attention_dp(target: Target) -> bool:
    """Tell whether attention DP should be on: as set by hand or else as published, but for another concurrency on for
    many requests and off for few, which it serves slower. Wide EP doesn't run without it, and neither do GPUs that
    can't share the heads."""
    if needs_attention_dp(target):
        return True
    given = dict(target.request.overrides).get("enable_attention_dp")
    if isinstance(given, bool):  # the sizes that fit depend on it
        return given
    published = bool(target.recipe.value("enable_attention_dp", False))
    asked = target.request.workload.concurrency
    is_wide = target.recipe.value("moe_config.backend") == WIDE_EP
    if asked is None or target.is_as_published or is_wide or target.profile.name == "latency":
        return published
    return asked > LOW_CONCURRENCY


def choose_moe_backend(target: Target, layout: Layout) -> tuple[str, MoeBackendRow]:
    """Return the MoE back end and its line in the support matrix.

    The back end is the recipe's where the line has it, else the line's default.

    :raises RefusedPlanError: where no back end is published.
    """
    row = find_moe_backends(target.gpu, target.precision, layout.expert_parallel_size)
    if row is None:
        raise RefusedPlanError(
            f"no MoE back end is published for {target.precision} on {target.gpu.name} with expert parallelism "
            f"{layout.expert_parallel_size} (support matrix of the TensorRT-LLM deployment guide for DeepSeek-R1)"
        )
    published = target.recipe.value("moe_config.backend")
    return (published if published in row.backends else row.default), row


def expert_slots(target: Target, backend: str) -> int:
    """Return the slots of the online load balancer where back end and release have one, else 0."""
    if backend != WIDE_EP or not any(map(target.release.find_key, spell({BALANCER: None}, target.release.version))):
        return 0
    return int(target.recipe.value(f"{BALANCER}.num_slots", 0))
