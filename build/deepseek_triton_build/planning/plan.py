"""Variant, GPUs, profile and release -> every setting of a deployment, each with its reason.

It reads the catalogue, the release records and, for --model, the checkpoint's small JSON files. It writes nothing.

    names -> target.py                 which weights on which GPUs, or a refusal
          -> layout.py                 parallelism and the MoE back end
          -> batch_sizes.py            batch, token and length limits
          -> fitting.py                the same limits, made smaller until they fit the memory
          -> choices/                  the settings, under canonical keys, with their reasons
          -> release_settings.py       the same settings under the release's keys
          -> triton_settings.py        the backend's own settings
          -> server_environment.py     the environment variables
          -> rules/                    refuse what can't work and warn of what may not work

A plan for vLLM takes names and weights from target.py, sizes from vllm_sizes.py, and all settings from
vllm_settings.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from deepseek_triton_build.arithmetic.gpu_memory import GIB, LEAST_KV_TOKENS, Budget, Layout, host_memory_to_prefetch
from deepseek_triton_build.build_errors import RefusedPlanError, UnknownNameError
from deepseek_triton_build.data.catalog import Gpu, KnownCheckpoint, Variant, find_variant
from deepseek_triton_build.data.dynamo_releases import find_dynamo
from deepseek_triton_build.data.planned_settings import EnvironmentVariable, Omission, Setting, SettingsFile
from deepseek_triton_build.data.profiles import ANY_WORKLOAD, Profile, Recipe, Workload
from deepseek_triton_build.data.releases import Release, image_name, release_image_name
from deepseek_triton_build.data.spelling import canonical
from deepseek_triton_build.data.vllm import DEFAULT_VLLM, VllmVersion, vllm_image_name
from deepseek_triton_build.planning.batch_sizes import Sizes
from deepseek_triton_build.planning.choices import choose_settings
from deepseek_triton_build.planning.embedded import embedded_settings
from deepseek_triton_build.planning.fitting import choose_sizes
from deepseek_triton_build.planning.plan_request import ENGINES, OPTIONS, PlanRequest
from deepseek_triton_build.planning.release_settings import for_release, settings_files, with_overrides
from deepseek_triton_build.planning.server_environment import choose_environment, unset_environment
from deepseek_triton_build.planning.suggestion import ways_that_work
from deepseek_triton_build.planning.target import Target, refuse, resolve_target
from deepseek_triton_build.planning.triton_settings import triton_settings
from deepseek_triton_build.planning.vllm_settings import (
    vllm_arguments,
    vllm_environment,
    vllm_triton_settings,
    vllm_unset_environment,
    with_own_arguments,
)
from deepseek_triton_build.planning.vllm_sizes import VllmTarget, choose_vllm_sizes, resolve_vllm_target
from deepseek_triton_build.rules import violations, vllm_violations
from deepseek_triton_build.rules.memory_budget import deployment_budget
from deepseek_triton_build.rules.moe import shared_expert_bytes
from deepseek_triton_build.rules.rule import Deployment, Rule, Violation
from deepseek_triton_build.rules.vllm_deployment import VllmDeployment


@dataclass(frozen=True, kw_only=True)
class PlanWarning:
    """A broken rule that the plan is not refused for: a warning or a note."""

    rule: Rule
    violation: Violation


_ONE_GPU = Layout(tensor_parallel_size=1, expert_parallel_size=1)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything a repository is written from."""

    request: PlanRequest
    variant: Variant
    engine: str
    settings: tuple[Setting, ...]
    """All settings under the release's own keys, in writing order: LLM arguments, then triton_config.*."""
    canonical: Mapping[str, Any] = field(default_factory=dict)
    """The LLM arguments, those of `files` too, under the keys of rules.rule.CANONICAL_RELEASE; vLLM's under its own."""
    environment: tuple[EnvironmentVariable, ...] = ()
    files: tuple[SettingsFile, ...] = ()
    """Files that settings name by their paths. They lie beside the YAML that names them."""
    unset_environment: tuple[EnvironmentVariable, ...] = ()
    """Variables that the guides set and the plan does not, with the guides' values; the reason says why."""
    layout: Layout = _ONE_GPU
    num_nodes: int = 1
    gpu: Gpu | None = None
    release: Release | None = None
    vllm: VllmVersion | None = None
    checkpoint: KnownCheckpoint | None = None
    profile: Profile | None = None
    recipe: Recipe | None = None
    budget: Budget | None = None
    has_fp8_kv: bool = False
    """Whether TensorRT-LLM's KV cache is FP8, by the settings or the checkpoint."""
    workload: Workload = ANY_WORKLOAD
    max_concurrency: int = 0
    """Requests that decode together, in the whole instance."""
    host_memory: int = 0
    """Bytes of memory that a node should have available: for prefetching the checkpoint, and `shared_memory`."""
    shared_memory: int = 0
    """Bytes of the experts' copy in each node's /dev/shm, which the online load balancer makes."""
    warnings: tuple[PlanWarning, ...] = ()
    omissions: tuple[Omission, ...] = ()

    @property
    def world_size(self) -> int:
        """Number of GPUs of one instance, which is also its number of MPI ranks."""
        return self.layout.num_gpus

    @property
    def precision(self) -> str | None:
        return None if self.checkpoint is None else self.checkpoint.precision

    @property
    def carries_checkpoint(self) -> bool:
        """Whether the variant's own checkpoint lies in the repository. The simulated engine reads none."""
        return bool(self.variant.model) and not self.request.model and self.engine != "simulated"

    @property
    def image(self) -> str | None:
        """The container to run the plan in: the one asked for, else the newest with the release or the vLLM version.
        None: no published one has it."""
        if self.vllm is not None:
            tags = self.vllm.containers
            return vllm_image_name(self.request.container or tags[0]) if tags else None
        if self.release is None:
            return None
        asked, known = self.request.container, self.release.containers
        return image_name(asked if asked in known else known[0])

    def image_for(self, format: str) -> str | None:
        """The container to run a format's script in. TensorRT-LLM's own has its examples and benchmarks, too; vLLM has
        one of its own for every version."""
        if self.vllm is not None and format != "triton" and self.request.container is None:
            return f"vllm/vllm-openai:v{self.vllm.version}"
        if format == "dynamo":
            return find_dynamo(self.request.dynamo).image
        if format == "triton" or self.release is None or self.request.container is not None:
            return self.image
        return release_image_name(self.release.version)

    @property
    def gpus_per_node(self) -> int:
        return self.world_size // self.num_nodes


def make_plan(request: PlanRequest) -> Plan:
    """Make the plan for `request`.

    :raises UnknownNameError: for an unknown variant, GPU, precision, profile, engine or release.
    :raises RefusedPlanError: for a combination that can't work; its text and `suggestion` give the nearest that does.
    :raises UnusableCheckpointError: when a file of the checkpoint in `request.model` can't be read.
    """
    try:
        return _make_plan(request)
    except RefusedPlanError as refused:
        if refused.suggestion:
            raise
        ways = ways_that_work(request, _works)
        typed = ", or ".join(filter(None, map(_as_options, ways)))
        said = f"{refused.cause}; what works: {typed}" if typed else f"{refused}"
        raise RefusedPlanError(said, suggestion=ways[0] if ways else None) from None


@lru_cache(maxsize=65536)
def _works(request: PlanRequest) -> bool:
    try:
        _make_plan(request)
    except RefusedPlanError:
        return False
    return True


_DROPPED_OPTIONS = {
    **OPTIONS,
    "overrides": "--set",
    "relaxed_acceptance": "--relaxed-acceptance",
    "workload": "--isl, --osl or --concurrency",
}
"""Field of PlanRequest -> its option or options, for values that a suggestion leaves out."""


def _as_options(suggestion: Mapping[str, Any]) -> str:
    """Return the suggestion as command line options; empty where only --set or the workload is wrong, for which the
    refusal's own fix says more."""
    if suggestion.keys() <= {"overrides", "workload"}:
        return ""
    words, without = [], []
    for name, value in suggestion.items():
        if name == "allow_unpublished":
            words.append("--allow-unpublished")
        elif name in OPTIONS and value is not None:
            words.append(f"{OPTIONS[name]} {value}")
        else:
            without.append(_DROPPED_OPTIONS[name])
    return " ".join([*words, *(["without", " and ".join(without)] if without else [])])


@lru_cache(maxsize=512)
def _make_plan(request: PlanRequest) -> Plan:
    variant = find_variant(request.variant)
    engine = _engine(request, variant)
    if engine == "vllm":
        return _vllm_plan(resolve_vllm_target(request))
    if engine != "tensorrt_llm":
        settings = embedded_settings(request, variant, engine)
        return Plan(request=request, variant=variant, engine=engine, settings=settings)
    return _tensorrt_llm_plan(resolve_target(request))


def _engine(request: PlanRequest, variant: Variant) -> str:
    engine = request.engine or variant.engines[0]
    if engine not in ENGINES:
        raise UnknownNameError("engine", engine, ENGINES)
    if engine not in variant.engines:
        raise RefusedPlanError(
            f"{variant.name} is not served on the {engine} engine here; it runs on: {', '.join(variant.engines)}"
        )
    if request.preset and engine != "simulated":
        said = f"--preset paces the simulated engine; the {engine} engine has its own pace"
        raise RefusedPlanError(said, suggestion={"preset": None})
    if engine != "vllm" and (request.vllm != DEFAULT_VLLM or request.parallel is not None):
        given = "--parallel" if request.vllm == DEFAULT_VLLM else "--vllm"
        without = {"vllm": DEFAULT_VLLM, "parallel": None}
        raise RefusedPlanError(f"{given} is for --engine vllm; leave it out, or add that", suggestion=without)
    if request.preset and not request.preset.endswith(".json") and request.preset not in variant.presets:
        raise UnknownNameError("preset", request.preset, variant.presets)
    return engine


def _tensorrt_llm_plan(target: Target) -> Plan:
    sizes, budget = choose_sizes(target)
    if target.request.overrides:  # the reasons quote the memory that is left in the end
        budget = _budget_with_overrides(target, sizes, budget)
    environment = choose_environment(target, sizes)
    wanted = choose_settings(target, sizes, budget)
    chosen, omitted = for_release(target, wanted)
    chosen, own = with_overrides(target, chosen)
    files = settings_files(wanted, chosen)
    triton, unsampled = triton_settings(target, sizes, budget, chosen, own)
    deployment = dataclasses.replace(
        _deployment(target, chosen, triton, environment, files),
        assumed_isl=_assumed_isl(target, sizes),
        concurrency=target.request.workload.concurrency,
        held_requests=budget.concurrent_requests(sizes.workload.isl or 0, sizes.workload.osl or 0),
    )
    found = list(violations(deployment))
    refuse(found)
    return Plan(
        request=target.request,
        variant=target.variant,
        engine="tensorrt_llm",
        settings=(*chosen, *triton),
        canonical=deployment.settings,
        environment=environment,
        files=files,
        unset_environment=unset_environment(target, environment),
        layout=deployment.layout,
        num_nodes=target.num_nodes,
        gpu=target.gpu,
        release=target.release,
        checkpoint=target.checkpoint,
        profile=target.profile,
        recipe=target.recipe,
        budget=budget,
        has_fp8_kv=deployment.has_fp8_kv,
        workload=sizes.workload,
        max_concurrency=deployment.get("max_batch_size") * deployment.layout.attention_dp_size,
        host_memory=host_memory_to_prefetch(target.checkpoint) + shared_expert_bytes(deployment),
        shared_memory=shared_expert_bytes(deployment),
        warnings=tuple(PlanWarning(rule=rule, violation=violation) for rule, violation in found),
        omissions=(*omitted, *unsampled),
    )


def _vllm_plan(target: VllmTarget) -> Plan:
    sizes, budget = choose_vllm_sizes(target)
    arguments, own = with_own_arguments(target, vllm_arguments(target, sizes, budget))
    deployment = VllmDeployment(
        settings={setting.key: setting.value for setting in arguments},
        vllm=target.vllm,
        variant=target.variant,
        architecture=target.architecture,
        checkpoint=target.checkpoint,
        gpu=target.gpu,
        isl=target.request.workload.isl,
        concurrency=target.request.workload.concurrency,
    )
    if target.request.overrides:  # the reasons quote the memory that is left in the end
        budget = _vllm_budget_with_overrides(deployment)
        arguments, own = with_own_arguments(target, vllm_arguments(target, sizes, budget))
    triton, refused = vllm_triton_settings(target, sizes, budget, deployment.settings, own)
    deployment = dataclasses.replace(
        deployment,
        triton={setting.key.removeprefix("triton_config."): setting.value for setting in triton},
        held_requests=budget.concurrent_requests(sizes.workload.isl or 0, sizes.workload.osl or 0),
    )
    found = list(vllm_violations(deployment))
    refuse(found)
    return Plan(
        request=target.request,
        variant=target.variant,
        engine="vllm",
        settings=(*arguments, *triton),
        canonical=deployment.settings,
        environment=vllm_environment(target),
        unset_environment=vllm_unset_environment(target),
        layout=target.layout,
        num_nodes=target.num_nodes,
        gpu=target.gpu,
        vllm=target.vllm,
        checkpoint=target.checkpoint,
        profile=target.profile,
        budget=budget,
        workload=sizes.workload,
        max_concurrency=deployment.get("max_num_seqs") * target.data_parallel_size,
        host_memory=host_memory_to_prefetch(target.checkpoint),
        warnings=tuple(PlanWarning(rule=rule, violation=violation) for rule, violation in found),
        omissions=tuple(refused),
    )


def _vllm_budget_with_overrides(deployment: VllmDeployment) -> Budget:
    """Return the memory after the user's own arguments have replaced the planner's.

    :raises RefusedPlanError: when those leave no room for a request of max_model_len.
    """
    left = deployment.budget()
    assert left is not None  # a target knows its GPU and its weights
    longest = deployment.get("max_model_len")
    if left.kv_tokens < longest:
        raise RefusedPlanError(
            f"--set leaves room for {left.kv_tokens:,} KV tokens a GPU, and vLLM does not start with less than one "
            f"request of max_model_len, {longest:,}: weights take {left.weights / GIB:.1f} GiB and workspace "
            f"{left.workspace / GIB:.1f}",
            fix="set smaller values",
        )
    return left


def _assumed_isl(target: Target, sizes: Sizes) -> int | None:
    """Return the input length that is planned for though none was asked for; a generation server gets no prompts."""
    asked = target.request.workload.isl is not None or target.takes_over
    return None if asked else sizes.workload.isl


def _budget_with_overrides(target: Target, sizes: Sizes, budget: Budget) -> Budget:
    """Return the memory after the user's own settings have replaced the planner's.

    :raises RefusedPlanError: when those settings leave no room for a request.
    """
    wanted = choose_settings(target, sizes, budget)
    chosen, _ = for_release(target, wanted)
    chosen, _ = with_overrides(target, chosen)
    left = deployment_budget(_deployment(target, chosen, (), (), settings_files(wanted, chosen)))
    assert left is not None  # a target knows its GPU and its weights
    if left.kv_tokens < LEAST_KV_TOKENS:
        raise RefusedPlanError(
            f"--set leaves room for {left.kv_tokens:,} KV tokens a GPU, and a request needs {LEAST_KV_TOKENS:,}: of "
            f"{left.memory / GIB:.0f} GiB, weights take {left.weights / GIB:.1f} and workspace "
            f"{left.workspace / GIB:.1f}",
            fix="set smaller values",
        )
    return left


def _deployment(
    target: Target,
    llm: Iterable[Setting],
    triton: Iterable[Setting],
    environment: Iterable[EnvironmentVariable],
    files: Iterable[SettingsFile],
) -> Deployment:
    """Return the settings as the rules look at them."""
    in_files = {setting.key: setting.value for file in files for setting in file.settings}
    return Deployment(
        settings=canonical({setting.key: setting.value for setting in llm}, target.release.version) | in_files,
        release=target.release,
        variant=target.variant,
        architecture=target.architecture,
        checkpoint=target.checkpoint,
        gpu=target.gpu,
        triton={setting.key.removeprefix("triton_config."): setting.value for setting in triton},
        environment={variable.name: variable.value for variable in environment},
        isl=target.request.workload.isl,
        takes_over=target.takes_over,
    )
