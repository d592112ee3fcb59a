"""Whether a deployment fits its GPUs, by the planner's own arithmetic."""

from __future__ import annotations

from collections.abc import Iterator

from deepseek_triton_build.arithmetic.gpu_memory import GIB, LEAST_KV_TOKENS, Layout, minimum_gpus
from deepseek_triton_build.check.codes import NO_ROOM_FOR_CACHE, WEIGHTS_TOO_LARGE
from deepseek_triton_build.check.finding import CheckCode
from deepseek_triton_build.data.catalog import Gpu
from deepseek_triton_build.rules.memory_budget import deployment_budget
from deepseek_triton_build.rules.rule import Deployment, UnknownFactError, Violation
from deepseek_triton_build.rules.well_typed import well_typed


def memory_problems(deployment: Deployment) -> Iterator[tuple[CheckCode, Violation]]:
    """Find weights or a KV cache that don't fit; nothing when a fact that they depend on is unknown."""
    deployment = well_typed(deployment)
    try:
        yield from _misfits(deployment)
    except UnknownFactError:
        return


def _misfits(deployment: Deployment) -> Iterator[tuple[CheckCode, Violation]]:
    gpu, architecture, checkpoint = deployment.gpu, deployment.architecture, deployment.checkpoint
    budget = deployment_budget(deployment)
    if budget is None or gpu is None or architecture is None or checkpoint is None:
        return
    held, context = budget.weights / GIB, budget.context / GIB
    has = f"a GPU has {budget.memory / GIB:.1f} GiB"
    if budget.weights + budget.context > budget.memory:
        message = f"{has}, of which the weights take {held:.1f} and a CUDA context about {context:.0f}"
        key = "enable_attention_dp" if deployment.layout.attention_dp else "tensor_parallel_size"
        fix = _more_gpus(gpu, minimum_gpus(gpu, architecture, checkpoint), deployment.layout)
        yield WEIGHTS_TOO_LARGE, Violation(key=key, message=message, fix=fix)
    elif budget.kv_tokens < min(LEAST_KV_TOKENS, deployment.get("max_seq_len") or LEAST_KV_TOKENS):
        message = (
            f"{has}, of which the weights take {held:.1f} and an iteration with its CUDA graphs about "
            f"{budget.workspace / GIB:.1f}; that leaves a KV cache of {budget.kv_tokens:,} tokens"
        )
        raised = "raise free_gpu_memory_fraction, " if budget.kv_cache > 0 else ""
        fix = f"{raised}lower max_num_tokens or max_batch_size, or take more GPUs"
        yield NO_ROOM_FOR_CACHE, Violation(key="max_num_tokens", message=message, fix=fix)


def _more_gpus(gpu: Gpu, least: int | None, layout: Layout) -> str:
    if least is None:
        return "take another GPU"
    if least <= layout.num_gpus:
        return f"use tensor parallelism alone, without attention DP and MTP: then {least} {gpu.name} hold the weights"
    return f"take {least} {gpu.name} or more, and raise tensor_parallel_size"
