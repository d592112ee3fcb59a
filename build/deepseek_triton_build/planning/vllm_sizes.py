"""Parallelism and limits of a vLLM deployment: the wanted ones, made smaller until a whole request fits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from deepseek_triton_build.arithmetic.gpu_memory import GIB, GPU_COUNTS, LEAST_KV_TOKENS, Budget, KvDtype, Layout
from deepseek_triton_build.arithmetic.vllm_memory import bytes_beside, vllm_budget
from deepseek_triton_build.build_errors import RefusedPlanError
from deepseek_triton_build.data.profiles import Workload
from deepseek_triton_build.data.releases import DEFAULT_RELEASE
from deepseek_triton_build.data.vllm import VllmVersion, load_vllm
from deepseek_triton_build.planning.batch_sizes import MAX_SEQ_LEN, TYPICAL, round_up
from deepseek_triton_build.planning.plan_request import PlanRequest
from deepseek_triton_build.planning.target import PlannedModel, refuse, resolve_model
from deepseek_triton_build.rules import vllm_violations
from deepseek_triton_build.rules.vllm_deployment import VllmDeployment

GUIDE = "vLLM recipes, DeepSeek-V3 (R1) usage guide"


@dataclass(frozen=True, kw_only=True)
class VllmTarget(PlannedModel):
    """Everything a plan for vLLM starts from."""

    vllm: VllmVersion
    num_gpus: int
    data_parallel: bool

    @property
    def num_nodes(self) -> int:
        return -(-self.num_gpus // self.gpu.gpus_per_node)

    @property
    def layout(self) -> Layout:
        stages = self.request.pipeline_parallel_size
        ranks = self.num_gpus // stages
        return Layout(
            tensor_parallel_size=ranks,
            expert_parallel_size=ranks,
            pipeline_parallel_size=stages,
            attention_dp=self.data_parallel,
        )

    @property
    def tensor_parallel_size(self) -> int:
        return 1 if self.data_parallel else self.layout.tensor_parallel_size

    @property
    def data_parallel_size(self) -> int:
        return self.layout.attention_dp_size

    @property
    def is_rehearsal(self) -> bool:
        return bool(self.variant.model)


@dataclass(frozen=True, kw_only=True)
class VllmSizes:
    """The numbers of a plan."""

    workload: Workload
    """The workload, filled in: both lengths are numbers; concurrency may be None."""
    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    """Requests of one rank; under data parallelism each has its own batch."""
    gpu_memory_utilization: float
    kv_cache_dtype: str
    num_draft_tokens: int
    shrunk: str = ""
    """The limits that were made smaller so that they fit, in words; empty when none was."""


@dataclass(frozen=True, kw_only=True)
class _Aim:
    """The limits of a profile."""

    workload: Workload
    max_num_seqs: int


_AIMS: Mapping[str, _Aim] = {
    "balanced": _Aim(workload=TYPICAL, max_num_seqs=128),
    "latency": _Aim(workload=TYPICAL, max_num_seqs=32),
    "throughput": _Aim(workload=TYPICAL, max_num_seqs=256),
    "long-64k": _Aim(workload=Workload(isl=65536, osl=1024), max_num_seqs=16),
    "long-128k": _Aim(workload=Workload(isl=131072, osl=1024), max_num_seqs=4),
    "rehearsal": _Aim(workload=Workload(isl=256, osl=256), max_num_seqs=8),
}
"""Profile -> its limits with vLLM. The other profiles are for TensorRT-LLM's own programs and its wide EP."""
VLLM_PROFILES = tuple(_AIMS)
PROMPT_HEAVY_TOKENS, BATCHED_TOKENS, LATENCY_TOKENS = 32768, 16384, 8192
"""The guide's three values of max_num_batched_tokens."""
REHEARSAL_TOKENS = 1024
PROMPT_HEAVY = 4
"""Input tokens for each output token from which a workload is prompt-heavy; the guide's one has eight."""


def resolve_vllm_target(request: PlanRequest) -> VllmTarget:
    """Return what a plan for `request` starts from, with the number of GPUs asked for, or the fewest that do.

    :raises UnknownNameError: for an unknown name.
    :raises RefusedPlanError: for what can't work under any settings.
    """
    model = resolve_model(request)
    _refuse_foreign(request)
    if model.profile.name not in _AIMS:
        known = ", ".join(name for name in VLLM_PROFILES if name != "rehearsal")
        raise RefusedPlanError(f"profile {model.profile.name} is for TensorRT-LLM; with vLLM there are {known}")
    wants_dp = request.parallel == "dp" or (request.parallel is None and model.profile.name == "throughput")
    target = VllmTarget(**vars(model), vllm=load_vllm(request.vllm), num_gpus=1, data_parallel=wants_dp)
    refuse(vllm_violations(_deployment(target), target_only=True))
    return _fewest(target) if request.num_gpus is None else _with_gpus(target, request.num_gpus)


def _refuse_foreign(request: PlanRequest) -> None:
    if request.relaxed_acceptance:
        raise RefusedPlanError("vLLM has no relaxed acceptance: leave --relaxed-acceptance out")
    if request.release != DEFAULT_RELEASE:
        raise RefusedPlanError(f"TensorRT-LLM {request.release} is for --engine tensorrt_llm: leave --trtllm out")


def _fewest(target: VllmTarget) -> VllmTarget:
    """Return the target with the fewest GPUs that share the model and hold a request.

    :raises RefusedPlanError: of the largest number that could be tried.
    """
    reason = RefusedPlanError(f"{target.variant.name} does not fit {GPU_COUNTS[-1]} x {target.gpu.name}")
    for count in GPU_COUNTS:
        try:
            chosen = _with_gpus(target, count)
        except RefusedPlanError:
            continue
        try:
            choose_vllm_sizes(chosen)
        except RefusedPlanError as refused:
            reason = refused
            continue
        return chosen
    raise reason


def _with_gpus(target: VllmTarget, num_gpus: int) -> VllmTarget:
    """Return the target with that many GPUs.

    :raises RefusedPlanError: when they can't share the model.
    """
    stages, gpu = target.request.pipeline_parallel_size, target.gpu
    if num_gpus not in GPU_COUNTS:
        counts = ", ".join(map(str, GPU_COUNTS))
        raise RefusedPlanError(f"{num_gpus} GPUs can't share the model evenly", fix=f"use {counts}")
    if gpu.nvlink_domain < num_gpus and num_gpus % gpu.gpus_per_node:
        raise RefusedPlanError(
            f"{num_gpus} x {gpu.name} is not a whole number of nodes ({gpu.gpus_per_node} GPUs each)"
        )
    if stages < 1 or num_gpus % stages:
        raise RefusedPlanError(
            f"{num_gpus} GPUs can't be divided into {stages} equal pipeline stages", fix=f"use a divisor of {num_gpus}"
        )
    chosen = replace(target, num_gpus=num_gpus)
    ways = [chosen]
    if target.request.parallel is None:  # what the profile wants first
        ways.append(replace(chosen, data_parallel=not chosen.data_parallel))
    for way in ways:
        if not any(rule.severity == "error" for rule, _ in vllm_violations(_deployment(way))):
            return way
    refuse(vllm_violations(_deployment(chosen)))
    raise AssertionError("a refused layout breaks a rule")


def _deployment(target: VllmTarget) -> VllmDeployment:
    """Return the deployment as far as it is known: model, GPUs and parallelism."""
    return VllmDeployment(
        settings={
            "tensor_parallel_size": target.tensor_parallel_size,
            "pipeline_parallel_size": target.request.pipeline_parallel_size,
            "data_parallel_size": target.data_parallel_size,
            "enable_expert_parallel": True,
        },
        vllm=target.vllm,
        variant=target.variant,
        architecture=target.architecture,
        checkpoint=target.checkpoint,
        gpu=target.gpu,
    )


def choose_vllm_sizes(target: VllmTarget) -> tuple[VllmSizes, Budget]:
    """Return the sizes that fit, and the memory they take.

    :raises RefusedPlanError: when even the smallest sizes don't fit.
    """
    wanted = _wanted(target)
    for sizes in _smaller_and_smaller(target, wanted):
        budget = _budget(target, sizes)
        if budget.kv_tokens >= sizes.max_model_len:
            return sizes, budget
    budget = _budget(target, wanted)
    share = wanted.gpu_memory_utilization * budget.memory
    raise RefusedPlanError(
        f"{target.variant.name} ({target.precision}) on {target.num_gpus} x {target.gpu.name}, "
        f"{'DP' if target.data_parallel else 'TP'}+EP: weights take {budget.weights / GIB:.1f} GiB a GPU and workspace "
        f"{budget.workspace / GIB:.1f}, of {share / GIB:.1f} GiB that vLLM gets, which leaves no room for a request of "
        f"{min(wanted.max_model_len, LEAST_KV_TOKENS):,} tokens",
        fix="use more GPUs or shorter requests",
    )


def _wanted(target: VllmTarget) -> VllmSizes:
    """Return the sizes that are wanted, before any of them is made smaller to fit."""
    asked, aim = target.request.workload, _AIMS[target.profile.name]
    workload = asked.filled_from(aim.workload)
    batch = aim.max_num_seqs if asked.concurrency is None else -(-asked.concurrency // target.data_parallel_size)
    drafts = target.request.mtp or 0
    return VllmSizes(
        workload=workload,
        max_model_len=_model_len(target, workload),
        max_num_batched_tokens=max(_batched_tokens(target, workload), round_up(batch * (1 + drafts), 64)),
        max_num_seqs=batch,
        gpu_memory_utilization=_utilization(target),
        kv_cache_dtype=target.request.kv_dtype or _usual_kv_dtype(target),
        num_draft_tokens=drafts,
    )


def _model_len(target: VllmTarget, workload: Workload) -> int:
    asked, longest = target.request.workload, target.architecture.max_position_embeddings
    needed = round_up((workload.isl or 0) + (workload.osl or 0), 256)
    is_asked = asked.isl is not None or asked.osl is not None
    chosen = needed if is_asked else min(max(MAX_SEQ_LEN, needed), longest)
    if chosen > longest:
        raise RefusedPlanError(
            f"{workload.isl:,} input and {workload.osl:,} output tokens are more than the {longest:,} that "
            f"{target.variant.name} reads (max_position_embeddings)",
            fix="use a smaller --isl or --osl",
        )
    return chosen


def _batched_tokens(target: VllmTarget, workload: Workload) -> int:
    if target.is_rehearsal:
        return REHEARSAL_TOKENS
    if target.profile.name == "latency" or target.data_parallel:
        return LATENCY_TOKENS
    return PROMPT_HEAVY_TOKENS if is_prompt_heavy(workload) else BATCHED_TOKENS


def is_prompt_heavy(workload: Workload) -> bool:
    """Tell whether reading prompts is most of the work."""
    return (workload.isl or 0) >= PROMPT_HEAVY * (workload.osl or 1)


SHARES, REHEARSAL_SHARE = (0.95, 0.9, 0.85), 0.1
"""Parts of a GPU's memory for gpu_memory_utilization. The largest is the guide's."""


def _utilization(target: VllmTarget) -> float:
    if target.is_rehearsal:
        return REHEARSAL_SHARE
    beside = bytes_beside(target.architecture, target.layout)
    return next((share for share in SHARES if target.gpu.memory * (1 - share) >= beside), SHARES[-1])


def _usual_kv_dtype(target: VllmTarget) -> str:
    return "fp8" if target.precision == "fp4" else "auto"


def _smaller_and_smaller(target: VllmTarget, wanted: VllmSizes) -> Iterator[VllmSizes]:
    """Yield `wanted`, then fewer tokens an iteration, then shorter requests, unless the requests are longer."""
    yield wanted
    sizes = wanted
    fewest = max(_LEAST_TOKENS, round_up(sizes.max_num_seqs * (1 + sizes.num_draft_tokens), 64))
    while sizes.max_num_batched_tokens // 2 >= fewest:
        fewer = sizes.max_num_batched_tokens // 2
        sizes = replace(sizes, max_num_batched_tokens=fewer, shrunk=_shrunk("max_num_batched_tokens"))
        yield sizes
    needed = round_up((wanted.workload.isl or 0) + (wanted.workload.osl or 0), 256)
    while sizes.max_model_len // 2 >= max(LEAST_KV_TOKENS, needed):
        shorter = sizes.max_model_len // 2
        sizes = replace(sizes, max_model_len=shorter, shrunk=_shrunk("max_num_batched_tokens and max_model_len"))
        yield sizes


_LEAST_TOKENS = 2048


def _shrunk(what: str) -> str:
    return f"{what} made smaller until one request of max_model_len fits the KV cache"


def _budget(target: VllmTarget, sizes: VllmSizes) -> Budget:
    kv_dtype: KvDtype = "fp8" if sizes.kv_cache_dtype == "fp8" or _is_fp8_by_checkpoint(target, sizes) else "bf16"
    return vllm_budget(
        target.gpu,
        target.architecture,
        target.checkpoint,
        target.layout,
        gpu_memory_utilization=sizes.gpu_memory_utilization,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        max_num_seqs=sizes.max_num_seqs,
        kv_dtype=kv_dtype,
        num_draft_tokens=sizes.num_draft_tokens,
        mtp=sizes.num_draft_tokens > 0,
    )


def _is_fp8_by_checkpoint(target: VllmTarget, sizes: VllmSizes) -> bool:
    return sizes.kv_cache_dtype == "auto" and target.checkpoint.kv_cache_quant_algo == "FP8"
