"""The GPU memory of a deployment, from its settings alone."""

from __future__ import annotations

from deepseek_triton_build.arithmetic.gpu_memory import Budget, cuda_graph_batch_sizes, make_budget
from deepseek_triton_build.arithmetic.warmup_shapes import (
    DEFAULT_GRAPH_MAX_BATCH_SIZE,
    DEFAULT_MAX_BATCH_SIZE,
    DEFAULT_MAX_NUM_TOKENS,
)
from deepseek_triton_build.rules.rule import Deployment

_DEFAULT_FRACTION = 0.9
"""The engine's free_gpu_memory_fraction when the key is missing or null (llm_args.py)."""


def deployment_budget(deployment: Deployment) -> Budget | None:
    """Return the memory of one GPU; None when the GPU, the architecture or the weights are not known.

    :param deployment: one with well-typed settings (well_typed.py).
    """
    gpu, architecture, checkpoint = deployment.gpu, deployment.architecture, deployment.checkpoint
    if gpu is None or architecture is None or checkpoint is None:
        return None
    given = deployment.get
    graph_sizes = given("cuda_graph_config.batch_sizes") or cuda_graph_batch_sizes(
        given("cuda_graph_config.max_batch_size") or DEFAULT_GRAPH_MAX_BATCH_SIZE
    )
    return make_budget(
        gpu,
        architecture,
        checkpoint,
        deployment.layout,
        num_cuda_graphs=len(graph_sizes) if deployment.has_cuda_graphs else 0,
        max_num_tokens=given("max_num_tokens") or DEFAULT_MAX_NUM_TOKENS,
        moe_max_num_tokens=given("moe_config.max_num_tokens"),
        kv_dtype="fp8" if deployment.has_fp8_kv else "bf16",
        kv_fraction=given("kv_cache_config.free_gpu_memory_fraction") or _DEFAULT_FRACTION,
        mtp_layers=deployment.mtp_kv_layers,
        expert_slots=given("moe_config.load_balancer.num_slots") or 0,
        sampler_batch=(given("max_batch_size") or DEFAULT_MAX_BATCH_SIZE) if deployment.has_cpp_sampler else 0,
    )
