"""The settings and variables of a vLLM deployment, each with its reason."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from deepseek_triton_build.arithmetic.gpu_memory import GIB, Budget
from deepseek_triton_build.arithmetic.vllm_memory import bytes_beside
from deepseek_triton_build.build_errors import RefusedPlanError
from deepseek_triton_build.data.planned_settings import EnvironmentVariable, Omission, Setting
from deepseek_triton_build.data.type_strings import fits, in_words
from deepseek_triton_build.data.vllm import VllmVersion
from deepseek_triton_build.planning.choices.parallel_settings import WEIGHTS
from deepseek_triton_build.planning.embedded import ENGINE_REASONS, transaction_settings
from deepseek_triton_build.planning.release_settings import refuse_backend_setting, with_lists
from deepseek_triton_build.planning.triton_settings import answer_room, sampling_advice, warmup_settings, with_own
from deepseek_triton_build.planning.vllm_sizes import (
    GUIDE,
    LATENCY_TOKENS,
    PROMPT_HEAVY_TOKENS,
    VllmSizes,
    VllmTarget,
    is_prompt_heavy,
)
from deepseek_triton_build.text import nearest_name, short_repr

_LOST = "vLLM recipes, DeepSeek/DeepSeek-V3.md before a77fe44"
"""The guide's lines of environment variables, which later versions of vLLM take as arguments."""
_CONFIG = "vLLM vllm/config"


def vllm_arguments(target: VllmTarget, sizes: VllmSizes, budget: Budget) -> tuple[Setting, ...]:
    """Return vLLM's engine arguments, in writing order, before the user's own."""
    return (
        *_model(target),
        *_parallelism(target),
        *_limits(target, sizes, budget),
        *_kernels(target, sizes),
        *_speculation(sizes),
        Setting(
            "scheduling_policy",
            "priority",
            "lets requests have a priority; those without keep their order. It costs a heap for the waiting requests",
            source=f"{_CONFIG}/scheduler.py; vllm/v1/core/sched/request_queue.py",
        ),
    )


def _model(target: VllmTarget) -> Iterator[Setting]:
    model = target.request.model or target.checkpoint.model
    yield Setting("model", model, f"{target.variant.title}, {WEIGHTS[target.precision]}")
    reason = "the checkpoint holds no code"
    if not target.is_rehearsal:
        reason = "vLLM has the model and its configuration built in; the guide's true would run code of the checkpoint"
    yield Setting("trust_remote_code", False, reason)
    if target.architecture.is_sparse:
        reason = "V3.2's own chat format, which is not a template of the checkpoint"
        yield Setting("tokenizer_mode", "deepseek_v32", reason, source="vLLM recipes, DeepSeek-V3.2 usage guide")


def _parallelism(target: VllmTarget) -> Iterator[Setting]:
    number = target.num_gpus
    if target.data_parallel:
        asked = "asked for by --parallel" if target.request.parallel else "for many requests at once"
        if not target.request.parallel and target.profile.name != "throughput":
            asked = "as tensor parallelism can't share the heads and blocks evenly"
        reason = f"attention and dense layers whole on each of {number} GPUs, with requests of its own: {asked}"
        yield Setting("data_parallel_size", target.data_parallel_size, reason, source=GUIDE)
    else:
        ranks = target.tensor_parallel_size
        reason = (
            f"every layer over {ranks} GPUs: the shorter time per token" if ranks > 1 else "one GPU holds the model"
        )
        yield Setting("tensor_parallel_size", target.tensor_parallel_size, reason, source=GUIDE)
    reason = "each GPU has whole experts, its share of them" if number > 1 else "as with more GPUs; one has all experts"
    yield Setting("enable_expert_parallel", True, reason, source=GUIDE)
    if target.data_parallel and number > 1:
        reason = (
            "how tokens reach the experts of other GPUs: by NCCL alone, which every container has; the guide's "
            "deepep_high_throughput and deepep_low_latency are faster, and need DeepEP installed"
        )
        yield Setting("all2all_backend", "allgather_reducescatter", reason, source=f"{_CONFIG}/parallel.py; {_LOST}")
    if target.request.pipeline_parallel_size > 1:
        yield Setting("pipeline_parallel_size", target.request.pipeline_parallel_size, "asked for by --pp")
    if target.num_nodes > 1:
        reason = f"nodes of {target.gpu.gpus_per_node} GPUs, by vLLM's own processes; each node says which it is"
        yield Setting("nnodes", target.num_nodes, reason, source=f"{_CONFIG}/parallel.py, ParallelConfig.nnodes")


def _limits(target: VllmTarget, sizes: VllmSizes, budget: Budget) -> Iterator[Setting]:
    shrunk = f"; {sizes.shrunk}" if sizes.shrunk else ""
    yield Setting("max_model_len", sizes.max_model_len, _model_len_reason(target, sizes) + shrunk, source=GUIDE)
    yield Setting(
        "max_num_batched_tokens", sizes.max_num_batched_tokens, _tokens_reason(target, sizes) + shrunk, source=GUIDE
    )
    each = f" on each of {target.data_parallel_size} ranks" if target.data_parallel_size > 1 else ""
    asked = target.request.workload.concurrency
    why = f"{asked:,} asked for" if asked else f"profile {target.profile.name}"
    reason = f"requests in a batch{each}: {why}. Without it, vLLM's default depends on who starts it"
    measured = target.request.why_measured("--concurrency")
    reason += f"; {measured}" if measured else ""
    yield Setting("max_num_seqs", sizes.max_num_seqs, reason, source="vLLM vllm/engine/arg_utils.py")
    yield Setting("gpu_memory_utilization", sizes.gpu_memory_utilization, _share_reason(target, sizes, budget))
    reason = "a beginning that requests share is computed once; for a benchmark `--set enable_prefix_caching=false`"
    yield Setting("enable_prefix_caching", True, reason, source=GUIDE)


def _model_len_reason(target: VllmTarget, sizes: VllmSizes) -> str:
    asked = target.request.workload
    if asked.isl is not None or asked.osl is not None:
        return f"{sizes.workload.isl:,} tokens in and {sizes.workload.osl:,} out, rounded up"
    if target.is_rehearsal:
        return "all that the model reads (max_position_embeddings)"
    return "tokens of prompt and answer together: enough for most uses, and it saves memory"


def _tokens_reason(target: VllmTarget, sizes: VllmSizes) -> str:
    what = "tokens of one iteration; longer prompts go in chunks"
    if target.is_rehearsal:
        return f"{what}, which prompts of the tiny model try, too"
    if target.data_parallel:
        return f"{what}. It is each rank's, and the experts get those of all {target.data_parallel_size} at once"
    if target.profile.name == "latency":
        return f"{what}: few, so that a prompt does not hold up other requests' tokens"
    if is_prompt_heavy(sizes.workload):
        return f"{what}: many, as the workload is mostly prompts"
    return f"{what}: between the guide's {PROMPT_HEAVY_TOKENS:,} for prompts and {LATENCY_TOKENS:,} for latency"


def _share_reason(target: VllmTarget, sizes: VllmSizes, budget: Budget) -> str:
    held = f"{budget.kv_cache / GIB:.1f} GiB for {budget.kv_tokens:,} KV tokens a GPU"
    if target.is_rehearsal:
        return f"a small share of the GPU is more than the model can fill: {held}"
    beside = bytes_beside(target.architecture, target.layout) / GIB
    return f"{held}; {budget.free / GIB:.1f} GiB stay for what is taken beside it, about {beside:.1f} with Triton"


def _kernels(target: VllmTarget, sizes: VllmSizes) -> Iterator[Setting]:
    yield Setting("kv_cache_dtype", sizes.kv_cache_dtype, *_kv_reason(target, sizes))
    if target.gpu.architecture != "blackwell" or target.is_rehearsal or target.precision == "w4a16":
        return
    if not target.architecture.is_sparse and not sizes.num_draft_tokens:
        reason = "the guide's kernel of MLA for Blackwell (once VLLM_ATTENTION_BACKEND)"
        yield Setting("attention_backend", "CUTLASS_MLA", reason, source=_LOST)
    reason = f"the guide's kernels of the experts (once VLLM_USE_FLASHINFER_MOE_{target.precision.upper()}=1)"
    yield Setting("moe_backend", "flashinfer_trtllm", reason, source=_LOST)


def _kv_reason(target: VllmTarget, sizes: VllmSizes) -> tuple[str, str]:
    mla = "vLLM vllm/v1/attention/backends/mla"
    if target.request.kv_dtype is not None:
        kernel = "; on Hopper vLLM takes FLASHMLA for it" if _is_fp8_on_hopper(target, sizes) else ""
        return f"asked for by --kv-cache-dtype{kernel}", mla
    if sizes.kv_cache_dtype == "fp8":
        return "half the size; the guide has it for the FP4 checkpoints", "vLLM recipes, DeepSeek-V3 on Blackwell"
    return "16 bits, as in the checkpoint: FLASH_ATTN_MLA, vLLM's first choice on Hopper, reads no FP8 cache", mla


def _is_fp8_on_hopper(target: VllmTarget, sizes: VllmSizes) -> bool:
    return sizes.kv_cache_dtype == "fp8" and target.gpu.architecture == "hopper" and not target.architecture.is_sparse


def _speculation(sizes: VllmSizes) -> Iterator[Setting]:
    if sizes.num_draft_tokens:
        source = f"{_CONFIG}/speculative.py"
        yield Setting("speculative_config.method", "mtp", "the checkpoint's own draft layer, by --mtp", source=source)
        yield Setting(
            "speculative_config.num_speculative_tokens",
            sizes.num_draft_tokens,
            "draft tokens a step, by --mtp; requests with min_p are refused then",
            source=source,
        )


def vllm_environment(target: VllmTarget) -> tuple[EnvironmentVariable, ...]:
    """Return the variables that the server is started with."""
    return (
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


def vllm_unset_environment(target: VllmTarget) -> tuple[EnvironmentVariable, ...]:
    """Return the guide's variables that the plan leaves unset, with the guide's values and why they are not set."""
    if target.is_rehearsal:
        return ()
    wanted = {"VLLM_ALL2ALL_BACKEND": "deepep_high_throughput"} if target.data_parallel else {}
    if target.gpu.architecture == "blackwell":
        wanted |= {"VLLM_ATTENTION_BACKEND": "CUTLASS_MLA", f"VLLM_USE_FLASHINFER_MOE_{target.precision.upper()}": "1"}
    gone = target.vllm.replaced_environment
    rows = [
        EnvironmentVariable(name, value, f"vLLM {target.vllm.version} has the argument {gone[name].by}", source=_LOST)
        for name, value in wanted.items()
        if name in gone
    ]
    if target.gpu.architecture == "hopper" and target.precision == "fp8":
        reason = "on by itself where DeepGEMM is installed; 0 turns it off"
        rows.append(EnvironmentVariable("VLLM_USE_DEEP_GEMM", "1", reason, source=f"{_LOST}; vLLM vllm/envs.py"))
    return tuple(rows)


_NOT_BY_HAND = {
    "model": "other settings depend on it; use --model",
    "tensor_parallel_size": "other settings depend on it; use --gpus and --parallel",
    "data_parallel_size": "other settings depend on it; use --gpus and --parallel",
    "pipeline_parallel_size": "other settings depend on it; use --pp",
    "nnodes": "it follows from the GPUs; use --gpus",
}
_NUMBERS = ("max_model_len", "max_num_batched_tokens", "max_num_seqs")
"""Arguments that vLLM would choose by itself when they are null or -1."""
_TRITON = "triton_config."


def with_own_arguments(target: VllmTarget, chosen: tuple[Setting, ...]) -> tuple[tuple[Setting, ...], dict[str, Any]]:
    """Return the arguments with the user's own put in, and the user's own for triton_config apart.

    :raises RefusedPlanError: for a key that vLLM or the backend doesn't have, or a value that it doesn't take.
    """
    merged = {setting.key: setting for setting in chosen}
    triton = {}
    for key, given in target.request.overrides:
        value = with_lists(given)
        if key.startswith(_TRITON):
            refuse_backend_setting(key.removeprefix(_TRITON), value)
            triton[key] = value
            continue
        _refuse_argument(target.vllm, key, value)
        before = f" instead of {short_repr(merged[key].value)}" if key in merged else ""
        for other in [name for name in merged if name.startswith(f"{key}.") or key.startswith(f"{name}.")]:
            del merged[other]
        merged[key] = Setting(key, value, f"set by hand{before}")
    # A section is written in one piece, so a new key goes to where its section is.
    sections = list(dict.fromkeys(key.partition(".")[0] for key in merged))
    return tuple(sorted(merged.values(), key=lambda setting: sections.index(setting.key.partition(".")[0]))), triton


def _refuse_argument(vllm: VllmVersion, key: str, value: Any) -> None:
    if key in _NOT_BY_HAND:
        raise RefusedPlanError(f"--set {key}: {_NOT_BY_HAND[key]}")
    found = vllm.find(key)
    if found is None and _is_in_mapping(vllm, key, value):
        return
    if found is None:
        raise RefusedPlanError(f"vLLM {vllm.version} has no argument {key}{_hint(vllm, key)}")
    if not fits(value, found.type):
        raise RefusedPlanError(f"{key}: expected {in_words(found.type)}, got {short_repr(value)}")
    if key in _NUMBERS and (value is None or value < 1):
        raise RefusedPlanError(
            f"{key}: expected a whole number from 1, as other settings are computed from it, got {short_repr(value)}"
        )


def _is_in_mapping(vllm: VllmVersion, key: str, value: Any) -> bool:
    """Tell whether `key` lies in an argument that is a mapping, such as hf_overrides, whose keys no record has."""
    name, dot, below = key.partition(".")
    argument = vllm.find(name)
    return bool(dot) and name not in vllm.sections and argument is not None and fits({below: value}, argument.type)


def _hint(vllm: VllmVersion, key: str) -> str:
    moved = vllm.moved_arguments.get(key)
    if moved is not None:
        return f"; it has {moved.by}" if moved.by else f": {moved.why}"
    section = key.rpartition(".")[0]
    known = [f"{section}.{name}" for name in vllm.sections[section]] if section in vllm.sections else vllm.arguments
    near = nearest_name(key, known)
    return f"; did you mean {near}?" if near else ""


def vllm_triton_settings(
    target: VllmTarget, sizes: VllmSizes, budget: Budget, arguments: Mapping[str, Any], own: Mapping[str, Any]
) -> tuple[tuple[Setting, ...], list[Omission]]:
    """Return the settings under triton_config, and the advised sampling fields that vLLM would refuse.

    :param arguments: the engine arguments by name.
    :param own: the user's own settings under triton_config.
    """
    sampling, ignored = _default_sampling(target, arguments)
    rows = [
        Setting("triton_config.engine", "vllm", ENGINE_REASONS["vllm"]),
        *transaction_settings(target.request),
        _default_max_tokens(target, sizes, budget, arguments),
        *sampling,
        *warmup_settings(
            _warmup_shapes(target, arguments),
            "pairs of concurrent requests and prompt tokens of each, which run before the model is ready; few, as vLLM "
            "has captured its graphs and run its largest iteration by then",
        ),
    ]
    return with_own(rows, own, target.request), ignored


def _default_max_tokens(target: VllmTarget, sizes: VllmSizes, budget: Budget, arguments: Mapping[str, Any]) -> Setting:
    key = "triton_config.default_max_tokens"
    isl, osl, longest = sizes.workload.isl or 0, sizes.workload.osl or 0, arguments["max_model_len"]
    if target.request.workload.osl:
        return Setting(key, osl, "the output length that was asked for")
    requests = max(1, min(arguments["max_num_seqs"], budget.kv_tokens // (isl + osl)))
    return Setting(
        key,
        answer_room(budget, requests, isl, longest),
        f"for requests without max_tokens: {budget.kv_tokens:,} KV tokens / {requests:,} requests, less a prompt of "
        f"{isl:,}, rounded down, within max_model_len",
    )


def _default_sampling(target: VllmTarget, arguments: Mapping[str, Any]) -> tuple[list[Setting], list[Omission]]:
    advice, source = sampling_advice(target)
    drafts = arguments.get("speculative_config.num_speculative_tokens")
    refused = target.vllm.limits.get("speculative_config", {}).get("refuses", ()) if drafts else ()
    written = [
        Setting(f"triton_config.default_sampling.{name}", value, source)
        for name, value in advice.items()
        if name not in refused
    ]
    reason = f"vLLM {target.vllm.version} refuses it with MTP"
    ignored = [
        Omission(key=f"triton_config.default_sampling.{name}", value=value, reason=reason)
        for name, value in advice.items()
        if name in refused
    ]
    return written, ignored


_SHORT, _LONG, _MOST = 64, 1024, 64


def _warmup_shapes(target: VllmTarget, arguments: Mapping[str, Any]) -> list[list[int]]:
    """Return a single request, a longer prompt, and a batch for every rank."""
    long = max(1, min(_LONG, arguments["max_model_len"] // 2, arguments["max_num_batched_tokens"]))
    batch = min(_MOST, arguments["max_num_seqs"]) * target.data_parallel_size
    shapes = {(1, min(_SHORT, long)), (1, long), (batch, min(_SHORT, long))}
    return [list(shape) for shape in sorted(shapes, key=lambda shape: (shape[0] * shape[1], shape))]
