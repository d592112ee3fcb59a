"""dynamo.yaml: a plan as a DynamoGraphDeployment, with the engine file of each kind of worker in a ConfigMap."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from deepseek_triton_build.arithmetic.gpu_memory import GIB, ready_within_s
from deepseek_triton_build.build_errors import RefusedPlanError
from deepseek_triton_build.data.planned_settings import EnvironmentVariable, Setting
from deepseek_triton_build.data.releases import DynamoRelease, find_dynamo
from deepseek_triton_build.render import shell
from deepseek_triton_build.render.model_configuration import llm_arguments, settings_file_text, yaml_lines
from deepseek_triton_build.text import comment_lines, is_path, yaml_flow

if TYPE_CHECKING:
    from deepseek_triton_build.planning.disaggregated import DisaggregatedPlan
    from deepseek_triton_build.planning.plan import Plan

DYNAMO_YAML = "dynamo.yaml"
_CONFIG = "/config"
_CACHE = "/model-cache"
_PERIOD_S = 10
"""Seconds between the probes of a start, in templates/dynamo_main.yaml."""
_TWO_HOURS_S = 7200
"""The operator's own limit of a start."""
_DEFAULT_SHARED_GIB = 8
# Releases whose publisher of KV events gets a wrong block size, so that no block is published (ai-dynamo/dynamo#5015).
_BROKEN_EVENTS = ("0.7.0",)


def dynamo_mismatch(plan: Plan) -> str:
    """Say which release the keys are of, and which of them nothing public shows for Dynamo's build."""
    assert plan.release is not None  # a format of TensorRT-LLM
    dynamo = find_dynamo(plan.request.dynamo)
    unproven = ", ".join(dynamo.unproven([setting.key for setting in _llm_arguments(plan)], plan.release.version))
    if plan.release.version == dynamo.trtllm:
        proof = "proven: the keys that its documentation lists"
    elif dynamo.is_candidate:
        proof = "inferred: the candidate has the keys that the releases before and after it share"
    else:
        proof = f"proven: the keys that NVIDIA's own files for a {dynamo.final} build have"
    said = f"{proof}; unproven: {unproven or 'none'}"
    return (
        f"Dynamo {dynamo.version} has TensorRT-LLM {dynamo.trtllm}, the keys are those of "
        f"{plan.release.version}; {said}"
    )


def dynamo_yaml(plan: Plan, *, stamp: str) -> str:
    """Return the documents for `kubectl apply`: workers that each serve whole requests.

    :raises RefusedPlanError: for what is known to fail with Dynamo; the text says all of it.
    """
    return _text((_Worker(plan=plan, name="Worker"),), stamp)


def dynamo_pair_yaml(pair: DisaggregatedPlan, *, stamp: str) -> str:
    """Return the documents for `kubectl apply`: workers that read prompts, and workers that decode.

    :raises RefusedPlanError: as `dynamo_yaml` does.
    """
    prefill = _Worker(plan=pair.context, name="prefill", mode="prefill", replicas=pair.num_context)
    decode = _Worker(plan=pair.generation, name="decode", mode="decode", replicas=pair.num_generation)
    return _text((prefill, decode), stamp)


@dataclass(frozen=True, kw_only=True)
class _Worker:
    """One kind of worker, of which all replicas are alike."""

    plan: Plan
    name: str
    mode: Literal["prefill", "decode"] | None = None
    """Its half of each request; None: the whole."""
    replicas: int = 1

    @property
    def publishes(self) -> bool:
        """Whether the router chooses among these workers by their blocks: those that read prompts."""
        return self.plan.request.kv_routing and self.mode != "decode"

    def engine_of(self, deployment: str) -> str:
        """Return the name of the ConfigMap with the engine file."""
        return f"{deployment}-{self.mode or 'engine'}"


class _Shared(NamedTuple):
    """The facts that are the same for all workers of a deployment."""

    dynamo: DynamoRelease
    is_beta: bool
    """Whether Dynamo's API is v1beta1."""
    name: str
    model: str
    domain: bool
    """Whether the nodes share NVLink."""


def _text(workers: tuple[_Worker, ...], stamp: str) -> str:
    refused = list(dict.fromkeys(line for worker in workers for line in _refusals(worker)))
    if refused:
        raise RefusedPlanError("; ".join(refused))
    plan = workers[0].plan  # for what all workers share: the model and the kind of GPU
    dynamo = find_dynamo(plan.request.dynamo)
    nodes = sum(worker.replicas * worker.plan.num_nodes for worker in workers)
    shared = _Shared(
        dynamo=dynamo,
        is_beta=dynamo.api == "v1beta1",
        name=plan.variant.name.replace(".", "-"),
        model=next(str(setting.value) for setting in plan.settings if setting.key == "model"),
        # Nodes that share NVLink need a ComputeDomain.
        domain=plan.gpu is not None and plan.gpu.nvlink_domain > plan.gpu.gpus_per_node and nodes > 1,
    )
    graph = {
        "domain": shared.domain,
        "name": shared.name,
        "nodes": nodes,
        "api": dynamo.api,
        "beta": shared.is_beta,
        "image": dynamo.image,
        "kv_routing": plan.request.kv_routing,
    }
    described = [shell.filled("dynamo_worker.yaml", _worker_values(worker, shared)) for worker in workers]
    return "---\n".join(
        [
            *(shell.filled("dynamo_config_map.yaml", _config_map_values(worker, shared, stamp)) for worker in workers),
            "".join([shell.filled("dynamo_graph.yaml", graph), *described]),
        ]
    )


def _refusals(worker: _Worker) -> Iterator[str]:
    request = worker.plan.request
    model = request.model
    if model is not None and not PurePosixPath(model).is_absolute() and (is_path(model) or "/" not in model):
        expected = "an absolute path, under which the volume is mounted, or a Hugging Face name (owner/name)"
        yield f"--model {model}: expected {expected}; give one"
    if request.container is not None:
        yield f"--image {request.container}: a Triton container, and Dynamo has its own; use --dynamo, or --trtllm"
    if not worker.publishes:
        return
    version = find_dynamo(request.dynamo).version
    if version in _BROKEN_EVENTS:
        yield f"--kv-routing: Dynamo {version} publishes no KV events (ai-dynamo/dynamo#5015); use another --dynamo"
    architecture = worker.plan.variant.architecture
    if architecture is not None and architecture.csa:
        yield "--kv-routing: V4's KV cache reports no events (ai-dynamo/dynamo recipes/deepseek-v4); leave it out"
    elif not worker.plan.canonical.get("kv_cache_config.enable_block_reuse", True):
        side, option = ("plan", "--set") if worker.mode is None else ("context server", "--context-set")
        fix = f"add {option} kv_cache_config.enable_block_reuse=true"
        yield f"--kv-routing: the {side} has block reuse off, and without it there are no KV events; {fix}"


def _llm_arguments(plan: Plan) -> list[Setting]:
    """Return the plan's part of the engine file: the model is a flag, and files that settings name lie beside it."""
    names = {file.name for file in plan.files}
    return [
        replace(setting, value=f"{_CONFIG}/{setting.value}")
        if isinstance(setting.value, str) and setting.value in names
        else setting
        for setting in llm_arguments(plan)
        if setting.key != "model"
    ]


def _config_map_values(worker: _Worker, shared: _Shared, stamp: str) -> dict[str, Any]:
    settings, buffer = _llm_arguments(worker.plan), "kv_cache_config.event_buffer_max_size"
    if worker.publishes and not any(row.key == buffer for row in settings):
        reason = "without a buffer the engine makes no KV events, and a smaller one overflows under load"
        settings.append(Setting(buffer, 100_000, reason, source="ai-dynamo/dynamo PR 10300"))
    files: list[str] = []
    for file in worker.plan.files:
        text = textwrap.indent(settings_file_text(file, stamp=stamp), "  ")
        files += [f"{file.name}: |", *text.splitlines()]
    return {
        "stamp": f"# {stamp}",
        "mismatch": dynamo_mismatch(worker.plan),
        "engine": worker.engine_of(shared.name),
        "arguments": yaml_lines(settings),
        "files": files,
    }


def _worker_values(worker: _Worker, shared: _Shared) -> dict[str, Any]:
    plan = worker.plan
    assert plan.checkpoint is not None  # a plan for GPUs has one
    within_s = ready_within_s(plan.checkpoint.weight_bytes)
    mount = str(PurePosixPath(shared.model).parent) if is_path(shared.model) else _CACHE
    # Variables that Dynamo needs; those of the plan count more.
    variables = {variable.name: variable for variable in (*_variables(plan, shared), *plan.environment)}
    shared_gib = max(_DEFAULT_SHARED_GIB, plan.gpus_per_node + -(-plan.shared_memory // GIB))
    return {
        "beta": shared.is_beta,
        "name": shared.name,
        "worker": worker.name,
        "type": worker.mode or "worker",
        "mode": worker.mode,
        "replicas": worker.replicas,
        "several_nodes": plan.num_nodes > 1,
        "nodes": plan.num_nodes,
        "world_size": plan.world_size,
        "gpus_per_node": plan.gpus_per_node,
        "claims": ", claims: [{name: channel}]" if shared.domain else "",
        "and_the_copy": " and the load balancer's copy of the experts" if plan.shared_memory else "",
        "shared_memory": f"{shared_gib}Gi",
        "image": shared.dynamo.image,
        "model_flag": "--model" if shared.is_beta else "--model-path",
        # Kubernetes replaces $(NAME) in an argument, unless the dollar sign is doubled.
        "model": yaml_flow(shared.model.replace("$(", "$$(")),
        "served_name": yaml_flow(plan.checkpoint.model or plan.variant.name),
        "expert_parallel_size": plan.layout.expert_parallel_size,
        "publishes": worker.publishes,
        "block_size": plan.canonical.get("kv_cache_config.tokens_per_block"),
        "publish_flag": "--publish-kv-events" if shared.is_beta else "--publish-events-and-metrics",
        "environment": [
            line
            for variable in variables.values()
            for line in (*comment_lines(variable.comment), f'- {{name: {variable.name}, value: "{variable.value}"}}')
        ],
        "within": f"{within_s:,}",
        "tries": max(_TWO_HOURS_S // _PERIOD_S, -(-within_s // _PERIOD_S)),
        "mount": mount,
        "mount_path": yaml_flow(mount),
        "engine": worker.engine_of(shared.name),
    }


def _variables(plan: Plan, shared: _Shared) -> Iterator[EnvironmentVariable]:
    if not is_path(shared.model):
        yield EnvironmentVariable("HF_HOME", _CACHE, "the checkpoint is downloaded onto the volume")
    if plan.num_nodes > 1:
        source = "ai-dynamo/dynamo examples/backends/trtllm/deploy/v1beta1/disagg-multinode.yaml"
        for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"):
            yield EnvironmentVariable(name, "1", "the operator starts the ranks by mpirun, as root", source=source)
    if not shared.domain:
        return
    source = "ai-dynamo/dynamo recipes/deepseek-r1/trtllm/disagg/wide_ep/gb200"
    for name in ("NCCL_MNNVL_ENABLE", "NCCL_CUMEM_ENABLE", "TRTLLM_MOE_ENABLE_ALLTOALL_WITHOUT_ALLGATHER"):
        yield EnvironmentVariable(name, "1", "the ranks exchange tokens over the NVLink of several nodes", source)
    if not shared.dynamo.is_candidate and plan.layout.attention_dp:  # 1.3 and newer
        reason = "TensorRT-LLM may choose DeepEP by itself, which fails on GB200"
        source = "ai-dynamo/dynamo PR 9914; recipes/deepseek-v32-fp4"
        yield EnvironmentVariable("TRTLLM_FORCE_COMM_METHOD", "NVLINK_TWO_SIDED", reason, source=source)
