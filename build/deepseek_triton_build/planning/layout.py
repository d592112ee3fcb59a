"""How one model instance lies on its GPUs: tensor, expert and pipeline parallelism, attention DP, the MoE back end."""

from __future__ import annotations

from deepseek_triton_build.arithmetic.gpu_memory import Layout
from deepseek_triton_build.build_errors import RefusedPlanError
from deepseek_triton_build.data.catalog import Gpu, MoeBackendRow, moe_backend_rows
from deepseek_triton_build.planning.target import Target

LOW_CONCURRENCY = 128
"""Up to here attention DP off and CUDA graphs on are faster (TensorRT-LLM 0.19, examples/deepseek_v3/README.md)."""
LARGEST_EXPERT_PARALLEL = 8
"""Past it the support matrix of MoE back ends knows wide EP only."""
WIDE_EP = "WIDEEP"


def choose_layout(target: Target, *, attention_dp: bool) -> Layout:
    """:raises RefusedPlanError: when the pipeline stages that are asked for do not divide the GPUs."""
    stages = target.request.pipeline_parallel_size
    if stages < 1 or target.num_gpus % stages:
        number = target.num_gpus
        raise RefusedPlanError(
            f"{number} GPUs do not make {stages} pipeline stages of one size; use a divisor of {number}"
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


def wants_attention_dp(target: Target) -> bool:
    """As published, but for another number of requests at once: those that few GPUs' worth of attention DP serve badly
    go without, and many with it. Wide EP can't go without."""
    published = bool(target.recipe.value("enable_attention_dp", False))
    asked = target.request.workload.concurrency
    is_wide = target.recipe.value("moe_config.backend") == WIDE_EP
    if asked is None or target.is_as_published or is_wide or target.profile.name == "latency":
        return published
    return asked > LOW_CONCURRENCY


def choose_moe_backend(target: Target, layout: Layout) -> tuple[str, MoeBackendRow]:
    """The recipe's back end where the support matrix has it, else the matrix' own; and the line of the matrix.

    :raises RefusedPlanError: where nothing is published.
    """
    row = moe_row(target.gpu, target.precision, layout.expert_parallel_size)
    if row is None:
        raise RefusedPlanError(
            f"no MoE back end is published for {target.precision} on {target.gpu.name} with expert parallelism "
            f"{layout.expert_parallel_size} (support matrix of the TensorRT-LLM deployment guide for DeepSeek-R1)"
        )
    published = target.recipe.value("moe_config.backend")
    return (published if published in row.backends else row.default), row


def moe_row(gpu: Gpu, precision: str, expert_parallel_size: int) -> MoeBackendRow | None:
    """The line of the support matrix; None where nothing is published."""
    rows = (row for row in moe_backend_rows() if row.holds_for(gpu, precision, expert_parallel_size))
    return next(rows, None)


def expert_slots(target: Target, backend: str) -> int:
    """Of the online load balancer, where back end and release have it; else 0."""
    key = "moe_config.load_balancer.num_slots"
    if backend != WIDE_EP or target.release.find_key(key) is None:
        return 0
    return int(target.recipe.value(key, 0))
