"""Parallelism and limits of a vLLM deployment: the wanted ones, made smaller until a whole request fits."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from deepseek_triton_build.arithmetic.gpu_memory import GIB, GPU_COUNTS, LEAST_KV_TOKENS, Budget
from deepseek_triton_build.arithmetic.vllm_memory import bytes_beside
from deepseek_triton_build.build_errors import RefusedPlanError
from deepseek_triton_build.data.profiles import Workload
from deepseek_triton_build.data.vllm import load_vllm, vllm_since
from deepseek_triton_build.planning.plan_request import PlanRequest
from deepseek_triton_build.planning.target import (
    MAX_SEQ_LEN,
    TYPICAL,
    VllmTarget,
    refuse,
    refuse_longer_than_the_model_reads,
    refuse_part_of_a_node,
    refuse_uneven_stages,
    resolve_model,
    round_up,
)
from deepseek_triton_build.rules import target_violations, violations
from deepseek_triton_build.rules.rule import VllmDeployment

GUIDE = "vLLM recipes, DeepSeek-V3 (R1) usage guide"


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


_AIMS: Mapping[str, tuple[Workload, int]] = {
    "balanced": (TYPICAL, 128),
    "latency": (TYPICAL, 32),
    "throughput": (TYPICAL, 256),
    "long-64k": (Workload(isl=65536, osl=1024), 16),
    "long-128k": (Workload(isl=131072, osl=1024), 4),
    "rehearsal": (Workload(isl=256, osl=256), 8),
}
"""Profile -> the workload and max_num_seqs that it aims at with vLLM. The other profiles are for TensorRT-LLM's own
programs and its wide EP."""
VLLM_PROFILES = tuple(_AIMS)
PROMPT_HEAVY_TOKENS, BATCHED_TOKENS, LATENCY_TOKENS = 32768, 16384, 8192
"""The guide's three values of max_num_batched_tokens."""
_HOPPER_TOKENS = 4096
"""The same for V4 on Hopper: Dynamo's recipes for V4-Pro on H200."""
REHEARSAL_TOKENS = 1024
PROMPT_HEAVY = 4
"""Input tokens for each output token from which a workload is prompt-heavy; the guide's one has eight."""
SHARES, REHEARSAL_SHARE = (0.95, 0.9, 0.85), 0.1
"""Parts of a GPU's memory for gpu_memory_utilization. The largest is the guide's."""
_OWN_ARGUMENTS = ("max_model_len", "max_num_batched_tokens", "max_num_seqs", "gpu_memory_utilization", "kv_cache_dtype")
_LEAST_TOKENS, _LEAST_COMPRESSED = 2048, 512
"""The second for V4, where tokens of a prompt take KV cache: InferenceX's dsv4_fp8_h200.sh."""


def resolve_vllm_target(request: PlanRequest) -> VllmTarget:
    """Return what a plan for `request` starts from, with the number of GPUs asked for, or the fewest that do.

    :raises UnknownNameError: for an unknown name.
    :raises RefusedPlanError: for what can't work under any settings.
    """
    model = resolve_model(request)
    if request.relaxed_acceptance:
        raise RefusedPlanError("vLLM has no relaxed acceptance: leave --relaxed-acceptance out")
    if request.release is not None:
        raise RefusedPlanError(f"TensorRT-LLM {request.release} is for --engine tensorrt_llm: leave --trtllm out")
    if model.profile.name not in _AIMS:
        known = ", ".join(name for name in VLLM_PROFILES if name != "rehearsal")
        raise RefusedPlanError(f"profile {model.profile.name} is for TensorRT-LLM; with vLLM there are {known}")
    vllm = load_vllm(request.vllm or vllm_since(model.variant.min_vllm))
    wants_dp = request.parallel == "dp" or (request.parallel is None and model.profile.name == "throughput")
    target = VllmTarget(**vars(model), vllm=vllm, num_gpus=1, data_parallel=wants_dp)
    refuse(target_violations(_shares(target)))
    if request.num_gpus is not None:
        return _with_gpus(target, request.num_gpus)
    # The fewest GPUs that share the model and hold a request; else the reason why the most don't.
    reason = RefusedPlanError(f"{target.variant.name} does not fit {GPU_COUNTS[-1]} x {target.gpu.name}")
    for count in GPU_COUNTS:
        with suppress(RefusedPlanError):
            chosen = _with_gpus(target, count)
            try:
                choose_vllm_sizes(chosen)
            except RefusedPlanError as refused:
                reason = refused
            else:
                return chosen
    raise reason


def _with_gpus(target: VllmTarget, num_gpus: int) -> VllmTarget:
    """Return the target with that many GPUs.

    :raises RefusedPlanError: when they can't share the model.
    """
    if num_gpus not in GPU_COUNTS:
        counts = ", ".join(map(str, GPU_COUNTS))
        raise RefusedPlanError(f"{num_gpus} GPUs can't share the model evenly", fix=f"use {counts}")
    refuse_part_of_a_node(num_gpus, target.gpu)
    refuse_uneven_stages(num_gpus, target.request.pipeline_parallel_size)
    chosen = replace(target, num_gpus=num_gpus)
    ways = [chosen]
    if target.request.parallel is None:  # what the profile wants first
        ways.append(replace(chosen, data_parallel=not chosen.data_parallel))
        # V4 has one KV head, whose cache tensor parallelism can't divide. The guides have TP for V4.1, whose cache is
        # small, and without NVLink.
        is_tp = target.architecture.host_bytes or target.profile.name == "latency" or target.gpu.nvlink_domain == 1
        if target.architecture.csa and not is_tp:
            ways.sort(key=_held_requests, reverse=True)
    # The first way that no rule refuses; where all are refused, the reasons of the wanted one are of use.
    for way in ways:
        with suppress(RefusedPlanError):
            refuse(violations(_shares(way)))
            return way
    refuse(violations(_shares(chosen)))
    raise AssertionError("a refused layout breaks a rule")


def _held_requests(target: VllmTarget) -> int:
    """Return how many requests the KV caches hold; -1 where the model does not fit."""
    with suppress(RefusedPlanError):
        sizes, budget = choose_vllm_sizes(target)
        return budget.concurrent_requests(sizes.workload.isl or 0, sizes.workload.osl or 0)
    return -1


def _shares(target: VllmTarget) -> VllmDeployment:
    """Return how the ranks share the model, before the other arguments are chosen."""
    return replace(vllm_deployment(target, _parallelism(target)), unknown=frozenset({"kv_cache_dtype"}))


def _parallelism(target: VllmTarget) -> dict[str, Any]:
    return {
        "tensor_parallel_size": target.tensor_parallel_size,
        "pipeline_parallel_size": target.request.pipeline_parallel_size,
        "data_parallel_size": target.data_parallel_size,
        "enable_expert_parallel": True,
    }


def vllm_deployment(target: VllmTarget, arguments: Mapping[str, Any]) -> VllmDeployment:
    """Return the engine arguments as the rules look at them."""
    return VllmDeployment(settings=arguments, vllm=target.vllm, **target.judged)


def choose_vllm_sizes(target: VllmTarget) -> tuple[VllmSizes, Budget]:
    """Return the sizes that fit, and the memory they take.

    :raises RefusedPlanError: when even the smallest sizes don't fit.
    """
    wanted = _wanted(target)
    least = _LEAST_COMPRESSED if target.architecture.csa else _LEAST_TOKENS
    fewest = max(least, round_up(wanted.max_num_seqs * (1 + wanted.num_draft_tokens), 64))
    why = "made smaller until one request of max_model_len fits the KV cache"
    why += ", and a batch beside a prompt" if target.architecture.csa else ""
    for sizes in _smaller_and_smaller(wanted, fewest, why):
        budget = _budget(target, sizes)
        isl, osl = sizes.workload.isl or 0, sizes.workload.osl or 0
        # Blocks for a prompt of V4 should leave room for a batch, or for nearly as many requests as without.
        held, is_fewer = budget.pool.requests(isl, osl) if budget.pool else (0, False)
        is_enough = sizes.max_num_batched_tokens // 2 < fewest or held >= sizes.max_num_seqs or not is_fewer
        if budget.longest_start >= sizes.max_model_len and is_enough:
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
    request, (usual, max_num_seqs) = target.request, _AIMS[target.profile.name]
    asked, drafts = request.workload, request.mtp or 0
    workload = asked.filled_from(usual)
    needed = round_up((workload.isl or 0) + (workload.osl or 0), 256)
    longest = min(max(MAX_SEQ_LEN, needed), target.architecture.max_position_embeddings)
    if asked.isl is not None or asked.osl is not None:
        longest = needed
    refuse_longer_than_the_model_reads(target, workload, longest)
    batch = max_num_seqs if asked.concurrency is None else -(-asked.concurrency // target.data_parallel_size)
    beside = bytes_beside(target.architecture, target.layout)
    tokens = PROMPT_HEAVY_TOKENS if is_prompt_heavy(workload) else BATCHED_TOKENS
    if target.profile.name == "latency" or target.data_parallel:
        tokens = LATENCY_TOKENS
    if target.architecture.csa:
        tokens = _HOPPER_TOKENS if target.gpu.architecture == "hopper" else LATENCY_TOKENS
    if target.is_rehearsal:
        tokens = REHEARSAL_TOKENS
    # vLLM counts on the rest of the memory being free, and then takes some of it.
    share = next((share for share in SHARES if target.gpu.memory * (1 - share) >= beside), SHARES[-1])
    return VllmSizes(
        workload=workload,
        max_model_len=longest,
        max_num_batched_tokens=max(tokens, round_up(batch * (1 + drafts), 64)),
        max_num_seqs=batch,
        gpu_memory_utilization=REHEARSAL_SHARE if target.is_rehearsal else share,
        kv_cache_dtype=request.kv_dtype or ("fp8" if target.precision == "fp4" or target.architecture.csa else "auto"),
        num_draft_tokens=drafts,
    )


def is_prompt_heavy(workload: Workload) -> bool:
    """Tell whether reading prompts is most of the work."""
    return (workload.isl or 0) >= PROMPT_HEAVY * (workload.osl or 1)


def _smaller_and_smaller(wanted: VllmSizes, fewest: int, why: str) -> Iterator[VllmSizes]:
    """Yield `wanted`, then fewer tokens an iteration, at least `fewest`, then shorter requests, unless the requests are
    longer."""
    yield wanted
    sizes = wanted
    while sizes.max_num_batched_tokens // 2 >= fewest:
        fewer = sizes.max_num_batched_tokens // 2
        sizes = replace(sizes, max_num_batched_tokens=fewer, shrunk=f"max_num_batched_tokens {why}")
        yield sizes
    needed = round_up((wanted.workload.isl or 0) + (wanted.workload.osl or 0), 256)
    while sizes.max_model_len // 2 >= max(LEAST_KV_TOKENS, needed):
        shorter = sizes.max_model_len // 2
        sizes = replace(sizes, max_model_len=shorter, shrunk=f"max_num_batched_tokens and max_model_len {why}")
        yield sizes


def _budget(target: VllmTarget, sizes: VllmSizes) -> Budget:
    arguments = _parallelism(target) | {key: getattr(sizes, key) for key in _OWN_ARGUMENTS}
    if sizes.num_draft_tokens:
        drafts = {"method": target.architecture.draft, "num_speculative_tokens": sizes.num_draft_tokens}
        arguments |= {f"speculative_config.{key}": value for key, value in drafts.items()}
    budget = vllm_deployment(target, arguments).budget()
    assert budget is not None  # a target knows its GPU and its weights
    return budget
