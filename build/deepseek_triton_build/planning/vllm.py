"""The engine vLLM in a plan: its arguments and variables, each with its reason, and what becomes of --set."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, ClassVar, Literal

from deepseek_triton_build.arithmetic.gpu_memory import GIB, Budget
from deepseek_triton_build.arithmetic.vllm_memory import bytes_beside
from deepseek_triton_build.build_errors import RefusedPlanError
from deepseek_triton_build.data.finding import Code
from deepseek_triton_build.data.own_files import load_yaml
from deepseek_triton_build.data.planned_settings import EnvironmentVariable, Setting
from deepseek_triton_build.data.type_strings import fits
from deepseek_triton_build.data.vllm import VllmVersion
from deepseek_triton_build.planning.backend_settings import Arguments, EngineLimits, refuse_misfit, with_own_arguments
from deepseek_triton_build.planning.target import WEIGHTS, VllmTarget
from deepseek_triton_build.planning.vllm_sizes import (
    GUIDE,
    LATENCY_TOKENS,
    PROMPT_HEAVY_TOKENS,
    VllmSizes,
    is_prompt_heavy,
    vllm_deployment,
)
from deepseek_triton_build.rules import violations
from deepseek_triton_build.rules.known_issues import hold
from deepseek_triton_build.rules.rule import Violation, VllmDeployment
from deepseek_triton_build.text import nearest_name, short_repr

_LOST = "vLLM recipes, DeepSeek/DeepSeek-V3.md before a77fe44"
"""The guide's lines of environment variables, which later versions of vLLM take as arguments."""
_CONFIG = "vLLM vllm/config"
_MLA = "vLLM vllm/v1/attention/backends/mla"
_TOKENS_OF_V4 = "Hopper: ai-dynamo/dynamo recipes/deepseek-v4; Blackwell: vllm-project/vllm#51454"
_NOT_BY_HAND = {
    "model": "other settings depend on it; use --model",
    "tensor_parallel_size": "other settings depend on it; use --gpus and --parallel",
    "data_parallel_size": "other settings depend on it; use --gpus and --parallel",
    "pipeline_parallel_size": "other settings depend on it; use --pp",
    "nnodes": "it follows from the GPUs; use --gpus",
}
_NUMBERS = ("max_model_len", "max_num_batched_tokens", "max_num_seqs")
"""Arguments that vLLM would choose by itself when they are null or -1."""
_ENVIRONMENT = (
    EnvironmentVariable(
        "VLLM_WORKER_MULTIPROC_METHOD",
        "spawn",
        "vLLM would fork the process that has loaded it, whose other threads hold locks",
        source="vLLM vllm/envs.py",
    ),
    EnvironmentVariable(
        "VLLM_NO_USAGE_STATS", "1", "sends nothing about this machine", source="vLLM vllm/usage/usage_lib.py"
    ),
)
_SHORT, _LONG, _MOST = 64, 1024, 64
"""Tokens of the prompts that warm it up, and most of them at once."""


@dataclass(frozen=True)
class VllmEngine:
    """vLLM's part of a plan; each method is as TrtllmEngine's."""

    target: VllmTarget
    sizes: VllmSizes
    budget: Budget
    batch_key: ClassVar[str] = "max_num_seqs"

    def arguments(self, budget: Budget) -> Arguments:
        target, sizes = self.target, self.sizes
        reason = "lets requests have a priority; those without keep their order. "
        reason += "It costs a heap for the waiting requests"
        source = f"{_CONFIG}/scheduler.py; vllm/v1/core/sched/request_queue.py"
        chosen = (
            *_model(target),
            *_parallelism(target),
            *_limits(target, sizes, budget),
            Setting("kv_cache_dtype", sizes.kv_cache_dtype, *_kv_reason(target, sizes)),
            *_speculation(target, sizes),
        )
        deployment = vllm_deployment(target, {setting.key: setting.value for setting in chosen})
        chosen = (
            *chosen,
            *(Setting(name, value, why, source) for name, value, why, source in _of_guides(deployment, "settings")),
            Setting("scheduling_policy", "priority", reason, source=source),
        )
        settings, own = with_own_arguments(target.request, chosen, lambda key, value: _check(target.vllm, key, value))
        return Arguments(settings=settings, own=own, canonical={setting.key: setting.value for setting in settings})

    @property
    def environment(self) -> tuple[EnvironmentVariable, ...]:
        rows = _of_guides(vllm_deployment(self.target, {}), "environment")
        return (*_ENVIRONMENT, *(EnvironmentVariable(*row) for row in rows))

    @property
    def unset_environment(self) -> tuple[EnvironmentVariable, ...]:
        target = self.target
        if target.is_rehearsal or target.architecture.csa:  # V4's guides have none
            return ()
        known = {"VLLM_ALL2ALL_BACKEND": "deepep_high_throughput"} if target.data_parallel else {}
        if target.gpu.architecture == "blackwell":
            experts = f"VLLM_USE_FLASHINFER_MOE_{target.precision.upper()}"
            known |= {"VLLM_ATTENTION_BACKEND": "CUTLASS_MLA", experts: "1"}
        gone = target.vllm.replaced_environment
        has = f"vLLM {target.vllm.version} has the argument"
        lost = [name for name in known if name in gone]
        rows = [EnvironmentVariable(name, known[name], f"{has} {gone[name].by}", source=_LOST) for name in lost]
        if target.gpu.architecture == "hopper" and target.precision == "fp8":
            reason = "on by itself where DeepGEMM is installed; 0 turns it off"
            rows.append(EnvironmentVariable("VLLM_USE_DEEP_GEMM", "1", reason, source=f"{_LOST}; vLLM vllm/envs.py"))
        return tuple(rows)

    def limits(self, arguments: Arguments) -> EngineLimits:
        canonical = arguments.canonical
        drafts = bool(canonical.get("speculative_config.num_speculative_tokens"))
        long = max(1, min(_LONG, canonical["max_model_len"] // 2, canonical["max_num_batched_tokens"]))
        batch = min(_MOST, canonical["max_num_seqs"]) * self.target.data_parallel_size
        shapes = {(1, min(_SHORT, long)), (1, long), (batch, min(_SHORT, long))}
        return EngineLimits(
            batch=canonical["max_num_seqs"],
            longest=canonical["max_model_len"],
            within="max_model_len",
            why_left_out=partial(self.target.vllm.why_refused, drafts=drafts),
            warmup=(
                [list(shape) for shape in sorted(shapes, key=lambda shape: (shape[0] * shape[1], shape))],
                "pairs of concurrent requests and prompt tokens of each, which run before the model is ready; few, as "
                "vLLM has captured its graphs and run its largest iteration by then",
            ),
        )

    def _deployment(self, arguments: Arguments, **more: Any) -> VllmDeployment:
        asked = self.target.request.workload
        deployment = vllm_deployment(self.target, arguments.canonical)
        return replace(deployment, isl=asked.isl, concurrency=asked.concurrency, **more)

    def left_by_own(self, arguments: Arguments) -> Budget:
        deployment = self._deployment(arguments)
        left = deployment.budget()
        assert left is not None  # a target knows its GPU and its weights
        longest = deployment.get("max_model_len")
        if left.longest_start < longest:
            raise RefusedPlanError(
                f"--set leaves room for {left.longest_start:,} KV tokens a GPU, and vLLM does not start with less than "
                f"one request of max_model_len, {longest:,}: weights take {left.weights / GIB:.1f} GiB and workspace "
                f"{left.workspace / GIB:.1f}",
                fix="set smaller values",
            )
        return left

    def judged(
        self, arguments: Arguments, **more: Any
    ) -> tuple[VllmDeployment, list[tuple[Code, Violation]], dict[str, Any]]:
        deployment = self._deployment(arguments, **more)
        target = self.target
        tables = target.architecture.host_bytes // target.num_nodes
        shared = tables if target.layout.attention_dp_size > 1 else 0  # dp_shared_memory, which is on by itself
        facts = {"vllm": target.vllm, "layout": target.layout, "host_tables": tables, "shared_memory": shared}
        return deployment, list(violations(deployment)), facts


def _model(target: VllmTarget) -> Iterator[Setting]:
    model = target.request.model or target.checkpoint.model
    yield Setting("model", model, f"{target.title}, {WEIGHTS[target.precision]}")
    reason = "the checkpoint holds no code"
    if not target.is_rehearsal:
        reason = "vLLM has the model and its configuration built in; the guide's true would run code of the checkpoint"
    yield Setting("trust_remote_code", False, reason)


def _guide(target: VllmTarget) -> str:
    return target.variant.min_vllm_source or GUIDE


def _parallelism(target: VllmTarget) -> Iterator[Setting]:
    number = target.num_gpus
    if target.data_parallel:
        asked, guide = "asked for by --parallel" if target.request.parallel else "for many requests at once", GUIDE
        if not target.request.parallel and target.architecture.csa:
            asked = "V4 has one KV head, so that tensor parallelism would keep the same KV cache on every GPU"
            guide = f"{_guide(target)}; for Flash on eight B200 vllm-project/vllm#51454"
        elif not target.request.parallel and target.profile.name != "throughput":
            asked = "as tensor parallelism can't share the heads and blocks evenly"
        reason = f"attention and dense layers whole on each of {number} GPUs, with requests of its own: {asked}"
        yield Setting("data_parallel_size", target.data_parallel_size, reason, source=guide)
    else:
        ranks = target.tensor_parallel_size
        reason = (
            f"every layer over {ranks} GPUs: the shorter time per token" if ranks > 1 else "one GPU holds the model"
        )
        yield Setting("tensor_parallel_size", target.tensor_parallel_size, reason, source=_guide(target))
    reason = "each GPU has whole experts, its share of them" if number > 1 else "as with more GPUs; one has all experts"
    yield Setting("enable_expert_parallel", True, reason, source=_guide(target))
    if target.request.pipeline_parallel_size > 1:
        yield Setting("pipeline_parallel_size", target.request.pipeline_parallel_size, "asked for by --pp")
    if target.num_nodes > 1:
        reason = f"nodes of {target.gpu.gpus_per_node} GPUs, by vLLM's own processes; each node says which it is"
        yield Setting("nnodes", target.num_nodes, reason, source=f"{_CONFIG}/parallel.py, ParallelConfig.nnodes")


def _limits(target: VllmTarget, sizes: VllmSizes, budget: Budget) -> Iterator[Setting]:
    asked = target.request.workload
    shrunk = f"; {sizes.shrunk}" if sizes.shrunk else ""
    reason = "tokens of prompt and answer together: enough for most uses, and it saves memory"
    if target.architecture.csa:
        reason += "; answers at the effort max want 393,216 (--isl, --osl)"
    if asked.isl is not None or asked.osl is not None:
        reason = f"{sizes.workload.isl:,} tokens in and {sizes.workload.osl:,} out, rounded up"
    elif target.is_rehearsal:
        reason = "all that the model reads (max_position_embeddings)"
    yield Setting("max_model_len", sizes.max_model_len, reason + shrunk, source=_guide(target))
    yield Setting(
        "max_num_batched_tokens",
        sizes.max_num_batched_tokens,
        _tokens_reason(target, sizes) + shrunk,
        source=_TOKENS_OF_V4 if target.architecture.csa else GUIDE,
    )
    ranks = f" on each of {target.data_parallel_size} ranks" if target.data_parallel_size > 1 else ""
    why = f"{asked.concurrency:,} asked for" if asked.concurrency else f"profile {target.profile.name}"
    reason = f"requests in a batch{ranks}: {why}. Without it, vLLM's default depends on who starts it"
    measured = target.request.why_measured("--concurrency")
    reason += f"; {measured}" if measured else ""
    yield Setting("max_num_seqs", sizes.max_num_seqs, reason, source="vLLM vllm/engine/arg_utils.py")
    beside = bytes_beside(target.architecture, target.layout) / GIB
    held = f"{budget.kv_cache / GIB:.1f} GiB for {budget.kv_tokens:,} KV tokens a GPU"
    if budget.pool is not None:
        held = f"{budget.kv_cache / GIB:.1f} GiB for {budget.pool.num_blocks:,} blocks of KV cache a GPU"
    reason = f"{held}; {budget.free / GIB:.1f} GiB stay for what is taken beside it, about {beside:.1f} with Triton"
    if target.is_rehearsal:
        reason = f"a small share of the GPU is more than the model can fill: {held}"
    yield Setting("gpu_memory_utilization", sizes.gpu_memory_utilization, reason)
    reason = "a beginning that requests share is computed once; for a benchmark `--set enable_prefix_caching=false`"
    yield Setting("enable_prefix_caching", True, reason, source=_guide(target))


def _tokens_reason(target: VllmTarget, sizes: VllmSizes) -> str:
    what = "tokens of one iteration; longer prompts go in chunks"
    if target.is_rehearsal:
        return f"{what}, which prompts of the tiny model try, too"
    if target.architecture.csa:
        return f"{what}: few, as each takes KV cache of windows and compressors while a prompt is read"
    if target.data_parallel:
        return f"{what}. It is each rank's, and the experts get those of all {target.data_parallel_size} at once"
    if target.profile.name == "latency":
        return f"{what}: few, so that a prompt does not hold up other requests' tokens"
    if is_prompt_heavy(sizes.workload):
        return f"{what}: many, as the workload is mostly prompts"
    return f"{what}: between the guide's {PROMPT_HEAVY_TOKENS:,} for prompts and {LATENCY_TOKENS:,} for latency"


_guides = cache(partial(load_yaml, "vllm_settings.yaml"))


def _of_guides(d: VllmDeployment, kind: Literal["settings", "environment"]) -> Iterator[tuple[str, Any, str, str]]:
    """Yield name, value, reason and source of what data/vllm_settings.yaml has for a deployment."""
    for row in _guides():
        is_known = not d.vllm.is_before(row.get("since", "0")) and d.vllm.is_before(row.get("until", "999"))
        if is_known and hold(d, row["when"]):
            for name, line in row.get(kind, {}).items():
                yield name, line["value"], line["why"], line.get("source", row["source"])


def _kv_reason(target: VllmTarget, sizes: VllmSizes) -> tuple[str, str]:
    if target.architecture.csa:
        reason = "V4's own form of the cache: 448 values of an entry in FP8 and 64 in 16 bits, 584 bytes (fp8_ds_mla)"
        if target.architecture.host_bytes:
            reason = "V4.1's own form of the cache: 584 bytes an entry on Hopper, on Blackwell fewer, NVFP4 too"
        return reason, f"vLLM vllm/models/{target.architecture.model_type}/attention.py"
    if target.request.kv_dtype is not None:
        is_mla_on_hopper = target.gpu.architecture == "hopper" and target.architecture.attention != "dsa"
        kernel = "; on Hopper vLLM takes FLASHMLA for it" if sizes.kv_cache_dtype == "fp8" and is_mla_on_hopper else ""
        return f"asked for by --kv-cache-dtype{kernel}", _MLA
    if sizes.kv_cache_dtype == "fp8":
        return "half the size; the guide has it for the FP4 checkpoints", "vLLM recipes, DeepSeek-V3 on Blackwell"
    return "16 bits, as in the checkpoint: FLASH_ATTN_MLA, vLLM's first choice on Hopper, reads no FP8 cache", _MLA


_DRAFTS = {
    "mtp": ("2 in V4's guides, 1 for Flash on Hopper", "vLLM recipes, DeepSeek-V4-Flash and DeepSeek-V4-Pro"),
    "dspark": (
        "5, DSpark's block, or more: answers of V4-Pro took 3.61, 3.77 and 3.73 tokens a step with 5, 6 and 7",
        "SemiAnalysisAI/InferenceX golden_al_distribution@843c625",
    ),
}
"""Kind of draft in V4 -> how many tokens are of use, and who says so."""


def _speculation(target: VllmTarget, sizes: VllmSizes) -> Iterator[Setting]:
    if not sizes.num_draft_tokens:
        return
    a, source = target.architecture, f"{_CONFIG}/speculative.py"
    advice, measured = _DRAFTS[a.draft] if a.csa else ("", "")
    yield Setting("speculative_config.method", a.draft, "the checkpoint's own draft, by --mtp", source=source)
    yield Setting(
        "speculative_config.num_speculative_tokens",
        sizes.num_draft_tokens,
        "draft tokens a step, by --mtp; requests with min_p are refused then" + (f". {advice}" if advice else ""),
        source=f"{source}; {measured}" if measured else source,
    )


def _check(vllm: VllmVersion, key: str, value: Any) -> tuple[str, ...]:
    """Let a setting by hand pass; it excludes no other key.

    :raises RefusedPlanError: when it can't be set by hand, vLLM doesn't have it, or the value doesn't fit.
    """
    if key in _NOT_BY_HAND:
        raise RefusedPlanError(f"--set {key}: {_NOT_BY_HAND[key]}")
    argument = vllm.find(key)
    if argument is None:
        # An argument may be a mapping, such as hf_overrides, whose keys no record has.
        name, dot, below = key.partition(".")
        holder = None if name in vllm.sections else vllm.find(name)
        if not dot or holder is None or not fits({below: value}, holder.type):
            section, gone = key.rpartition(".")[0], vllm.moved_arguments.get(key)
            rows = vllm.sections.get(section)
            near = nearest_name(key, [f"{section}.{name}" for name in rows] if rows is not None else vllm.arguments)
            hint = f"; did you mean {near}?" if near else ""
            if gone is not None:
                hint = f"; it has {gone.by}" if gone.by else f": {gone.why}"
            raise RefusedPlanError(f"vLLM {vllm.version} has no argument {key}{hint}")
        return ()
    refuse_misfit(key, value, argument.type)
    if key in _NUMBERS and (value is None or value < 1):
        raise RefusedPlanError(
            f"{key}: expected a whole number from 1, as other settings are computed from it, got {short_repr(value)}"
        )
    return ()
