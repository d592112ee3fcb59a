"""Whether a deployment fits its GPUs, by the planner's own arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from deepseek_triton_build.arithmetic.gpu_memory import GIB, LEAST_KV_TOKENS, Layout, minimum_gpus
from deepseek_triton_build.check.codes import NO_ROOM_FOR_CACHE, WEIGHTS_TOO_LARGE
from deepseek_triton_build.check.finding import CheckCode
from deepseek_triton_build.data.catalog import Gpu
from deepseek_triton_build.rules.memory_budget import deployment_budget
from deepseek_triton_build.rules.rule import Deployment, UnknownFactError, Violation
from deepseek_triton_build.rules.vllm_deployment import VllmDeployment
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


def vllm_memory_problems(deployment: VllmDeployment) -> Iterator[tuple[CheckCode, Violation]]:
    """Find weights or a KV cache that don't fit under vLLM; nothing when a fact that they depend on is unknown."""
    deployment = replace(deployment, settings={**_LEAST_LIMITS, **deployment.settings})
    with suppress(UnknownFactError):
        yield from _vllm_misfits(deployment)


_LEAST_LIMITS: Mapping[str, Any] = {"max_num_batched_tokens": 2048, "max_num_seqs": 128}
"""vLLM's smallest defaults, which AsyncLLM has by itself (vllm/engine/arg_utils.py, get_batch_defaults)."""


def _vllm_misfits(deployment: VllmDeployment) -> Iterator[tuple[CheckCode, Violation]]:
    gpu, architecture, checkpoint = deployment.gpu, deployment.architecture, deployment.checkpoint
    budget = deployment.budget()
    if budget is None or gpu is None or architecture is None or checkpoint is None:
        return
    held = f"a GPU has {budget.memory / GIB:.1f} GiB, of which the weights take {budget.weights / GIB:.1f}"
    longest = deployment.get("max_model_len")
    longest = longest if isinstance(longest, int) and longest > 0 else architecture.max_position_embeddings
    if budget.weights + budget.context > budget.memory:
        key = "data_parallel_size" if deployment.layout.attention_dp else "tensor_parallel_size"
        fix = _more_gpus(gpu, minimum_gpus(gpu, architecture, checkpoint), deployment.layout)
        yield WEIGHTS_TOO_LARGE, Violation(key=key, message=held, fix=fix)
    elif budget.kv_tokens < longest:
        share = deployment.get("gpu_memory_utilization")
        message = (
            f"{held} and an iteration with its CUDA graphs about {budget.workspace / GIB:.1f}; within the share of "
            f"{share} that leaves a KV cache of {max(0, budget.kv_tokens):,} tokens, and vLLM does not start with less "
            f"than max_model_len {longest:,}"
        )
        fix = "lower max_model_len or max_num_batched_tokens, raise gpu_memory_utilization, or take more GPUs"
        yield NO_ROOM_FOR_CACHE, Violation(key="max_model_len", message=message, fix=fix)


def _more_gpus(gpu: Gpu, least: int | None, layout: Layout) -> str:
    if least is None:
        return "take another GPU"
    if least <= layout.num_gpus:
        return f"use tensor parallelism alone, without attention DP and MTP: then {least} {gpu.name} hold the weights"
    return f"take {least} {gpu.name} or more, and raise tensor_parallel_size"
