"""The GPUs of a model: which of them its instances take, and whether the model fits their memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from deepseek_triton_build.arithmetic.gpu_memory import GIB, LEAST_KV_TOKENS, Layout, minimum_gpus
from deepseek_triton_build.check import codes
from deepseek_triton_build.check.pbtxt import ModelConfig
from deepseek_triton_build.check.scripts import ShellScript
from deepseek_triton_build.data.catalog import Gpu
from deepseek_triton_build.rules.finding import Code, Finding
from deepseek_triton_build.rules.rule import Deployment, UnknownFactError, Violation, VllmDeployment
from deepseek_triton_build.text import short_repr

PARAMETER = "gpu_device_ids"
KIND_CPU = "KIND_CPU"
TRTLLM_RANKS = "tensor x pipeline parallelism"
VLLM_RANKS = "tensor x pipeline x data parallelism"
_VISIBLE = "CUDA_VISIBLE_DEVICES"
# vLLM's smallest defaults, which AsyncLLM has by itself (vllm/engine/arg_utils.py, get_batch_defaults).
_LEAST_LIMITS: Mapping[str, Any] = {"max_num_batched_tokens": 2048, "max_num_seqs": 128}


def check_gpus(config: ModelConfig, *, num_ranks: int | None, num_gpus: int | None) -> Iterator[Finding]:
    """Find wrong kinds of instances, and instances whose GPUs are missing, shared, too few or too many.

    :param num_ranks: tensor x pipeline parallelism; None when model.yaml gives no valid numbers.
    :param num_gpus: the GPUs of one instance, when the user or the stamp says so.
    """
    yield from check_kinds(config, KIND_CPU)
    text = config.message.parameters[PARAMETER].string_value if PARAMETER in config.message.parameters else ""
    count = sum(group.count or 1 for group in config.message.instance_group) or 1
    if not text:
        if count > 1:
            message = f"{count} instances need the parameter {PARAMETER}, with the GPUs of each instance"
            yield config.finding(codes.NO_GPUS, message, _example(count, num_ranks), at="instance_group")
        elif num_ranks and num_gpus:
            yield from count_findings(num_ranks, num_gpus, "the instance", **config.at("instance_group"))
        return
    instances = [[_gpu(gpu) for gpu in part.split(",") if gpu.strip()] for part in text.split(";")]
    if len(instances) != count or not all(instances):
        wanted = "one instance" if count == 1 else f"{count} instances, separated by semicolons"
        message = f"expected the GPUs of {wanted}, found {short_repr(text)}"
        yield config.finding(codes.NO_GPUS, message, _example(count, num_ranks), at=PARAMETER)
    uses = Counter(gpu for gpus in instances for gpu in gpus)
    if twice := [gpu for gpu, times in uses.items() if times > 1]:
        message = f"GPU {', '.join(twice)} is given more than once in {short_repr(text)}"
        yield config.finding(codes.GPUS_SHARED, message, "give each GPU to one instance", at=PARAMETER)
    for index, gpus in enumerate(instances):
        if num_ranks and gpus:
            yield from count_findings(num_ranks, len(gpus), f"instance {index}", **config.at(PARAMETER))


def check_vllm_gpus(config: ModelConfig, *, num_ranks: int | None, num_gpus: int | None) -> Iterator[Finding]:
    """Find more than one instance, and one whose GPUs are too few or too many.

    :param num_ranks: tensor x pipeline x data parallelism; None when the arguments give no valid numbers.
    """
    count = sum(group.count or 1 for group in config.message.instance_group) or 1
    if count > 1:
        message = f"{count} instances would all take the same GPUs, because each loads a vLLM of its own"
        fix = "write count: 1, and raise data_parallel_size for more engines"
        yield config.finding(codes.GPUS_SHARED, message, fix, at="instance_group")
    elif num_ranks and num_gpus:
        yield from count_findings(num_ranks, num_gpus, "the instance", **config.at("instance_group"), way=VLLM_RANKS)


def hidden_gpus(script: ShellScript, num_ranks: int, gpu: Gpu | None, way: str = TRTLLM_RANKS) -> Iterator[Finding]:
    """Find a CUDA_VISIBLE_DEVICES that shows the ranks of a node fewer GPUs than they need."""
    variable = script.variables.get(_VISIBLE)
    if variable is None or variable.value is None:
        return
    shown = len([name for name in variable.value.split(",") if name.strip()])
    needed = min(num_ranks, gpu.gpus_per_node) if gpu is not None else num_ranks
    if shown < needed:
        message = f"{_VISIBLE}={variable.value} shows {shown} GPUs to {needed} ranks ({way})"
        fix = f"name {needed} GPUs, or remove the variable"
        yield codes.TOO_FEW_GPUS.finding(message, fix, file=script.file, line=variable.line, key=_VISIBLE)


def check_kinds(config: ModelConfig, wanted: str) -> Iterator[Finding]:
    """Find instances of another kind than `wanted`."""
    groups = config.message.instance_group
    if not groups:
        fix = f"write instance_group [ {{ count: 1, kind: {wanted} }} ]"
        yield config.finding(codes.WRONG_KIND, "there is no instance_group", fix, at="instance_group")
    for number in sorted({group.kind for group in groups}):
        kind = groups[0].DESCRIPTOR.enum_types_by_name["Kind"].values_by_number.get(number)
        if kind is None:
            yield config.unknown_number("kind", number, at="kind")
        elif kind.name != wanted:
            message = f"expected instances of {wanted}, found {kind.name}"
            yield config.finding(codes.WRONG_KIND, message, f"write kind: {wanted}", at="kind")


def _gpu(name: str) -> str:
    """Return the GPU's name without leading zeros: 0 and 00 are the same GPU."""
    name = name.strip()
    return str(int(name)) if name.isdecimal() and len(name) < 10 else name


def count_findings(
    num_ranks: int,
    num_gpus: int,
    what: str,
    way: str = TRTLLM_RANKS,
    *,
    file: str,
    line: int | None,
    key: str,
) -> Iterator[Finding]:
    """Find more or fewer GPUs than ranks.

    :param way: what multiplies to the number of ranks.
    """
    message = f"{what} has {num_gpus} GPUs for {num_ranks} ranks ({way})"
    if num_gpus < num_ranks:
        fix = f"give it {num_ranks} GPUs, or make {way} {num_gpus}"
        yield codes.TOO_FEW_GPUS.finding(message, fix, file=file, line=line, key=key)
    elif num_gpus > num_ranks:
        fix = f"raise tensor_parallel_size, or name {num_ranks} GPUs"
        yield codes.IDLE_GPUS.finding(message, fix, file=file, line=line, key=key)


def _example(count: int, num_ranks: int | None) -> str:
    """Return a fix that shows what to write for the first two of `count` instances, at most 16 GPUs of each."""
    size = num_ranks or 1
    lists = [",".join(map(str, range(first, first + min(size, 16)))) for first in range(0, min(count, 2) * size, size)]
    more = ";..." if count > 2 else ",..." if size > 16 else ""
    parameter = f'parameters [ {{ key: "{PARAMETER}", value: {{ string_value: "{";".join(lists)}{more}" }} }} ]'
    if count == 1:
        return f"write {parameter}, or leave the parameter out"
    return f"write {parameter}, with the GPUs of this machine, or count: 1 for one instance"


def memory_problems(deployment: Deployment) -> Iterator[tuple[Code, Violation]]:
    """Find weights or a KV cache that don't fit; nothing when a fact that they depend on is unknown."""
    deployment = deployment.well_typed()
    with suppress(UnknownFactError):
        gpu, architecture, checkpoint = deployment.gpu, deployment.architecture, deployment.checkpoint
        budget = deployment.budget()
        if budget is None or gpu is None or architecture is None or checkpoint is None:
            return
        held, context = budget.weights / GIB, budget.context / GIB
        has = f"a GPU has {budget.memory / GIB:.1f} GiB"
        if budget.weights + budget.context > budget.memory:
            message = f"{has}, of which the weights take {held:.1f} and a CUDA context about {context:.0f}"
            key = "enable_attention_dp" if deployment.layout.attention_dp else "tensor_parallel_size"
            fix = _more_gpus(gpu, minimum_gpus(gpu, architecture, checkpoint), deployment.layout)
            yield codes.WEIGHTS_TOO_LARGE, Violation(key=key, message=message, fix=fix)
        elif budget.kv_tokens < min(LEAST_KV_TOKENS, deployment.get("max_seq_len") or LEAST_KV_TOKENS):
            message = (
                f"{has}, of which the weights take {held:.1f} and an iteration with its CUDA graphs about "
                f"{budget.workspace / GIB:.1f}; that leaves a KV cache of {budget.kv_tokens:,} tokens"
            )
            raised = "raise free_gpu_memory_fraction, " if budget.kv_cache > 0 else ""
            fix = f"{raised}lower max_num_tokens or max_batch_size, or take more GPUs"
            yield codes.NO_ROOM_FOR_CACHE, Violation(key="max_num_tokens", message=message, fix=fix)


def vllm_memory_problems(deployment: VllmDeployment) -> Iterator[tuple[Code, Violation]]:
    """Find weights or a KV cache that don't fit under vLLM; nothing when a fact that they depend on is unknown."""
    deployment = replace(deployment, settings={**_LEAST_LIMITS, **deployment.settings})
    with suppress(UnknownFactError):
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
            yield codes.WEIGHTS_TOO_LARGE, Violation(key=key, message=held, fix=fix)
        elif budget.kv_tokens < longest:
            share = deployment.get("gpu_memory_utilization")
            message = (
                f"{held} and an iteration with its CUDA graphs about {budget.workspace / GIB:.1f}; within the share of "
                f"{share} that leaves a KV cache of {max(0, budget.kv_tokens):,} tokens, and vLLM does not start with "
                f"less than max_model_len {longest:,}"
            )
            fix = "lower max_model_len or max_num_batched_tokens, raise gpu_memory_utilization, or take more GPUs"
            yield codes.NO_ROOM_FOR_CACHE, Violation(key="max_model_len", message=message, fix=fix)


def _more_gpus(gpu: Gpu, least: int | None, layout: Layout) -> str:
    if least is None:
        return "take another GPU"
    if least <= layout.num_gpus:
        return f"use tensor parallelism alone, without attention DP and MTP: then {least} {gpu.name} hold the weights"
    return f"take {least} {gpu.name} or more, and raise tensor_parallel_size"
