"""dynamo.yaml: a plan as a DynamoGraphDeployment, with the engine file of each kind of worker in a ConfigMap."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Literal

from deepseek_triton_build.arithmetic.gpu_memory import GIB
from deepseek_triton_build.arithmetic.load_time import ready_within_s
from deepseek_triton_build.build_errors import RefusedPlanError
from deepseek_triton_build.data.dynamo_releases import DynamoRelease, find_dynamo
from deepseek_triton_build.data.planned_settings import EnvironmentVariable, Setting
from deepseek_triton_build.render.model_yaml import llm_arguments
from deepseek_triton_build.render.yaml_text import settings_file_text, yaml_lines
from deepseek_triton_build.text import comment_lines, is_path, yaml_flow

if TYPE_CHECKING:
    from deepseek_triton_build.planning.disaggregated import DisaggregatedPlan
    from deepseek_triton_build.planning.plan import Plan

DYNAMO_YAML = "dynamo.yaml"
_CONFIG = "/config"
_CACHE = "/model-cache"
_PERIOD_S = 10
_DEFAULT_SHARED_GIB = 8
_BROKEN_EVENTS = ("0.7.0",)
"""Releases whose publisher of KV events gets a wrong block size, so that no block is published
(ai-dynamo/dynamo#5015)."""


def dynamo_mismatch(plan: Plan) -> str:
    """Say which release the keys are of, and which of them nothing public shows for Dynamo's build."""
    assert plan.release is not None  # a format of TensorRT-LLM
    dynamo = find_dynamo(plan.request.dynamo)
    unproven = ", ".join(dynamo.unproven([setting.key for setting in _llm_arguments(plan)], plan.release.version))
    if dynamo.is_candidate:
        proof = "inferred: the candidate has the keys that the releases before and after it share"
    else:
        proof = "proven: the keys that NVIDIA's own files for a 1.3.0 build have"
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
    def nodes(self) -> int:
        return self.replicas * self.plan.num_nodes

    @property
    def publishes(self) -> bool:
        """Whether the router chooses among these workers by their blocks: those that read prompts."""
        return self.plan.request.kv_routing and self.mode != "decode"


def _text(workers: tuple[_Worker, ...], stamp: str) -> str:
    refused = list(dict.fromkeys(line for worker in workers for line in _refusals(worker)))
    if refused:
        raise RefusedPlanError("; ".join(refused))
    deployment = _Deployment(workers=workers, dynamo=find_dynamo(workers[0].plan.request.dynamo), stamp=stamp)
    return "---\n".join("\n".join(lines) + "\n" for lines in deployment.documents())


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
    if not worker.plan.canonical.get("kv_cache_config.enable_block_reuse", True):
        side, fix = ("plan", "add --set kv_cache_config.enable_block_reuse=true")
        if worker.mode is not None:
            side, fix = ("context server", "leave --kv-routing out (rule G010 is about block reuse there)")
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


def _arguments(worker: _Worker) -> list[Setting]:
    settings = _llm_arguments(worker.plan)
    if worker.publishes and not any(row.key == "kv_cache_config.event_buffer_max_size" for row in settings):
        reason = "without a buffer the engine makes no KV events, and a smaller one overflows under load"
        source = "ai-dynamo/dynamo PR 10300"
        settings.append(Setting("kv_cache_config.event_buffer_max_size", 100_000, reason, source=source))
    return settings


@dataclass(frozen=True, kw_only=True)
class _Deployment:
    workers: tuple[_Worker, ...]
    dynamo: DynamoRelease
    stamp: str

    @property
    def _plan(self) -> Plan:
        """The plan for what all workers share: the model and the kind of GPU."""
        return self.workers[0].plan

    @property
    def _name(self) -> str:
        return self._plan.variant.name.replace(".", "-")

    @property
    def _model(self) -> str:
        return next(str(setting.value) for setting in self._plan.settings if setting.key == "model")

    @property
    def _is_beta(self) -> bool:
        return self.dynamo.api == "v1beta1"

    @property
    def _mount(self) -> str:
        return str(PurePosixPath(self._model).parent) if is_path(self._model) else _CACHE

    @property
    def _domain(self) -> bool:
        """Whether nodes share NVLink, for which they need a ComputeDomain."""
        gpu = self._plan.gpu
        return gpu is not None and gpu.name.startswith("gb200") and self._nodes > 1

    @property
    def _nodes(self) -> int:
        return sum(worker.nodes for worker in self.workers)

    def _engine_of(self, worker: _Worker) -> str:
        return f"{self._name}-{worker.mode or 'engine'}"

    def documents(self) -> Iterator[list[str]]:
        for worker in self.workers:
            yield self._config_map(worker)
        if self._domain:
            yield self._compute_domain()
        yield list(self._graph())

    def _config_map(self, worker: _Worker) -> list[str]:
        plan = worker.plan
        lines = [
            f"# {self.stamp}",
            *comment_lines(f"{dynamo_mismatch(plan)}."),
            "apiVersion: v1",
            "kind: ConfigMap",
            f"metadata: {{name: {self._engine_of(worker)}}}",
            "data:",
            "  engine.yaml: |",
            *_indented(yaml_lines(_arguments(worker)), 4),
        ]
        for file in plan.files:
            lines += [f"  {file.name}: |", *_indented(settings_file_text(file, stamp=self.stamp).splitlines(), 4)]
        return lines

    def _compute_domain(self) -> list[str]:
        return [
            *comment_lines("The nodes that share NVLink; the claim gives a pod its channel (Dynamo's GB200 recipe)."),
            "apiVersion: resource.nvidia.com/v1beta1",
            "kind: ComputeDomain",
            f"metadata: {{name: {self._name}}}",
            "spec:",
            f"  numNodes: {self._nodes}",
            f"  channel: {{resourceClaimTemplate: {{name: {self._name}-channel}}}}",
        ]

    def _graph(self) -> Iterator[str]:
        yield f"apiVersion: nvidia.com/{self.dynamo.api}"
        yield "kind: DynamoGraphDeployment"
        yield f"metadata: {{name: {self._name}}}"
        yield "spec:"
        yield "  backendFramework: trtllm"
        yield from self._beta() if self._is_beta else self._alpha()

    def _beta(self) -> Iterator[str]:
        yield "  components:"
        yield "  - name: Frontend"
        yield "    type: frontend"
        yield "    replicas: 1"
        yield "    podTemplate:"
        yield "      spec:"
        yield "        containers:"
        yield "        - name: main"
        yield from _indented(self._frontend(), 10)
        for worker in self.workers:
            yield f"  - name: {worker.name}"
            yield f"    type: {worker.mode or 'worker'}"
            yield from _indented(_counts(worker), 4)
            yield from _indented(_shared_memory(worker.plan), 4)
            yield f"    sharedMemorySize: {_shared_memory_size(worker.plan)}"
            yield "    podTemplate:"
            yield "      spec:"
            yield "        containers:"
            yield "        - name: main"
            yield from _indented(self._main(worker), 10)
            yield f'          resources: {{limits: {{nvidia.com/gpu: "{worker.plan.gpus_per_node}"}}{self._claims}}}'
            yield from _indented(self._volumes(worker), 8)

    def _alpha(self) -> Iterator[str]:
        yield "  services:"
        yield "    Frontend:"
        yield "      componentType: frontend"
        yield "      replicas: 1"
        yield "      extraPodSpec:"
        yield "        mainContainer:"
        yield from _indented(self._frontend(), 10)
        for worker in self.workers:
            yield f"    {worker.name}:"
            yield "      componentType: worker"
            if worker.mode is not None:
                yield f"      subComponentType: {worker.mode}"
            yield from _indented(_counts(worker), 6)
            yield from _indented(_shared_memory(worker.plan), 6)
            yield f"      sharedMemory: {{size: {_shared_memory_size(worker.plan)}}}"
            yield f'      resources: {{limits: {{gpu: "{worker.plan.gpus_per_node}"}}{self._claims}}}'
            yield "      extraPodSpec:"
            yield "        mainContainer:"
            yield from _indented(self._main(worker), 10)
            yield from _indented(self._volumes(worker), 8)

    @property
    def _claims(self) -> str:
        return ", claims: [{name: channel}]" if self._domain else ""

    def _frontend(self) -> Iterator[str]:
        yield f"image: {self.dynamo.image}"
        yield "command: [python3, -m, dynamo.frontend]"
        by_blocks = self._plan.request.kv_routing
        if by_blocks:
            yield from comment_lines("kv: a request goes to the replica that has most of its prompt's blocks.")
        else:
            yield from comment_lines("round-robin: each replica gets a request in turn.")
        yield f'args: [--router-mode, {"kv" if by_blocks else "round-robin"}, --http-port, "8000"]'

    def _main(self, worker: _Worker) -> Iterator[str]:
        plan = worker.plan
        yield f"image: {self.dynamo.image}"
        yield "command: [python3, -m, dynamo.trtllm]"
        yield "args:"
        yield f"- {'--model' if self._is_beta else '--model-path'}"
        # Kubernetes replaces $(NAME) in an argument, unless the dollar sign is doubled.
        yield f"- {yaml_flow(self._model.replace('$(', '$$('))}"
        yield from comment_lines("The name that clients ask for.")
        yield "- --served-model-name"
        yield f"- {yaml_flow((plan.checkpoint and plan.checkpoint.model) or plan.variant.name)}"
        yield "- --extra-engine-args"
        yield f"- {_CONFIG}/engine.yaml"
        yield from comment_lines("As in the engine file; AIConfigurator, which checks deployments, reads it here only.")
        yield "- --expert-parallel-size"
        yield f'- "{plan.layout.expert_parallel_size}"'
        if worker.mode is not None:
            yield "- --disaggregation-mode"
            yield f"- {worker.mode}"
        if worker.publishes:
            yield from comment_lines("The router knows blocks of one size only, and must be told the engine's.")
            yield "- --kv-block-size"
            yield f'- "{plan.canonical["kv_cache_config.tokens_per_block"]}"'
            yield f"- {'--publish-kv-events' if self._is_beta else '--publish-events-and-metrics'}"
        yield from self._environment(worker)
        assert plan.checkpoint is not None  # a plan for GPUs has one
        within_s = ready_within_s(plan.checkpoint.weight_bytes)
        yield from comment_lines(
            f"{within_s:,} s to load the weights and compile kernels, or the operator's two hours if that is longer."
        )
        yield (
            f"startupProbe: {{httpGet: {{path: /live, port: 9090}}, periodSeconds: {_PERIOD_S}, timeoutSeconds: 5, "
            f"failureThreshold: {max(720, -(-within_s // _PERIOD_S))}}}"
        )
        yield "volumeMounts:"
        yield f"- {{name: model-cache, mountPath: {yaml_flow(self._mount)}}}"
        yield f"- {{name: engine, mountPath: {_CONFIG}, readOnly: true}}"

    def _environment(self, worker: _Worker) -> Iterator[str]:
        variables = {variable.name: variable for variable in (*self._variables(worker.plan), *worker.plan.environment)}
        if variables:
            yield "env:"
        for variable in variables.values():
            yield from comment_lines(variable.comment)
            yield f'- {{name: {variable.name}, value: "{variable.value}"}}'

    def _variables(self, plan: Plan) -> Iterator[EnvironmentVariable]:
        """Yield the variables that Dynamo needs; one that the plan has too is the plan's."""
        if not is_path(self._model):
            yield EnvironmentVariable("HF_HOME", _CACHE, "the checkpoint is downloaded onto the volume")
        if plan.num_nodes > 1:
            source = "ai-dynamo/dynamo examples/backends/trtllm/deploy/v1beta1/disagg-multinode.yaml"
            for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"):
                yield EnvironmentVariable(name, "1", "the operator starts the ranks by mpirun, as root", source=source)
        if not self._domain:
            return
        source = "ai-dynamo/dynamo recipes/deepseek-r1/trtllm/disagg/wide_ep/gb200"
        for name in ("NCCL_MNNVL_ENABLE", "NCCL_CUMEM_ENABLE", "TRTLLM_MOE_ENABLE_ALLTOALL_WITHOUT_ALLGATHER"):
            yield EnvironmentVariable(name, "1", "the ranks exchange tokens over the NVLink of several nodes", source)
        if self.dynamo.trtllm.startswith("1.3.0") and plan.layout.attention_dp:
            reason = "TensorRT-LLM may choose DeepEP by itself, which fails on GB200"
            source = "ai-dynamo/dynamo PR 9914; recipes/deepseek-v32-fp4"
            yield EnvironmentVariable("TRTLLM_FORCE_COMM_METHOD", "NVLINK_TWO_SIDED", reason, source=source)

    def _volumes(self, worker: _Worker) -> Iterator[str]:
        if self._domain:
            yield f"resourceClaims: [{{name: channel, resourceClaimTemplateName: {self._name}-channel}}]"
        yield "volumes:"
        yield from comment_lines(f"Make this claim first; {self._mount} is its root, with the checkpoint in it.")
        yield "- {name: model-cache, persistentVolumeClaim: {claimName: model-cache}}"
        yield f"- {{name: engine, configMap: {{name: {self._engine_of(worker)}}}}}"


def _counts(worker: _Worker) -> Iterator[str]:
    yield from comment_lines("Each replica is a whole copy of the model.")
    yield f"replicas: {worker.replicas}"
    if worker.plan.num_nodes > 1:
        yield from comment_lines(f"{worker.plan.world_size} GPUs, {worker.plan.gpus_per_node} on each node.")
        yield f"multinode: {{nodeCount: {worker.plan.num_nodes}}}"


def _shared_memory_size(plan: Plan) -> str:
    return f"{max(_DEFAULT_SHARED_GIB, plan.gpus_per_node + -(-plan.shared_memory // GIB))}Gi"


def _shared_memory(plan: Plan) -> list[str]:
    copy = " and the load balancer's copy of the experts" if plan.shared_memory else ""
    return comment_lines(
        f"/dev/shm: 1 GiB for each rank of a node{copy}, and no less than {_DEFAULT_SHARED_GIB}Gi, the operator's size."
    )


def _indented(lines: Iterator[str] | list[str], spaces: int) -> list[str]:
    return textwrap.indent("\n".join(lines), " " * spaces).splitlines()
