"""The GPU memory of a deployment, whoever wrote its settings."""

from __future__ import annotations

from deepseek_triton_build.arithmetic.gpu_memory import Budget, cuda_graph_batch_sizes, make_budget
from deepseek_triton_build.rules.rule import Deployment

_GRAPH_SIZE = 128
_NUM_TOKENS = 8192
_FRACTION = 0.9
"""What the engine takes where nothing is said, or null (llm_args.py)."""


def deployment_budget(deployment: Deployment) -> Budget | None:
    """The memory of one GPU; None where the GPU, the architecture or the weights are not known.

    :param deployment: with well-typed settings (rules.typed).
    """
    gpu, architecture, checkpoint = deployment.gpu, deployment.architecture, deployment.checkpoint
    if gpu is None or architecture is None or checkpoint is None:
        return None
    given = deployment.get
    graph_sizes = given("cuda_graph_config.batch_sizes") or cuda_graph_batch_sizes(
        given("cuda_graph_config.max_batch_size") or _GRAPH_SIZE
    )
    return make_budget(
        gpu,
        architecture,
        checkpoint,
        deployment.layout,
        num_cuda_graphs=len(graph_sizes) if deployment.has_cuda_graphs else 0,
        max_num_tokens=given("max_num_tokens") or _NUM_TOKENS,
        moe_max_num_tokens=given("moe_config.max_num_tokens"),
        kv_dtype="fp8" if deployment.has_fp8_kv else "bf16",
        kv_fraction=given("kv_cache_config.free_gpu_memory_fraction") or _FRACTION,
        mtp=deployment.num_draft_tokens > 0,
        expert_slots=given("moe_config.load_balancer.num_slots") or 0,
    )
