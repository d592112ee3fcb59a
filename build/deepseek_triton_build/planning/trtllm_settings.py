"""The settings and variables of a TensorRT-LLM deployment, under canonical keys, each with its reason.

A recipe's settings come first; what it leaves open, or what had to change, is decided here.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from deepseek_triton_build.arithmetic.gpu_memory import FP8_BLOCK, GIB, Budget
from deepseek_triton_build.build_errors import RefusedPlanError
from deepseek_triton_build.data.planned_settings import DEPLOYMENT, GUIDE, EnvironmentVariable, Setting
from deepseek_triton_build.data.profiles import ANY_WORKLOAD
from deepseek_triton_build.planning.target import WEIGHTS, Target
from deepseek_triton_build.planning.trtllm_sizes import (
    LONGEST_ANSWER,
    WIDE_EP,
    Sizes,
    choose_moe_backend,
    fewer_tokens,
    fp8_kv_works,
    needs_attention_dp,
    seq_len_for,
)
from deepseek_triton_build.rules.attention import LOW_CONCURRENCY
from deepseek_triton_build.rules.disaggregation import BUFFER, buffer_tokens, longest_prompt
from deepseek_triton_build.rules.rule import Deployment
from deepseek_triton_build.rules.size_limits import OOM_NUM_TOKENS

_EXPLAINED_BY_KERNEL: tuple[str, ...] = ("kv_cache_config.dtype", "moe_config.backend")
"""Keys whose kernel depends on the GPU and the batch, which a recipe's own reason can't say."""
_EXPLAINED_BY_LAYOUT = ("moe_expert_parallel_size", "enable_attention_dp", "max_batch_size", "max_num_tokens")
"""Keys whose reason in a recipe holds on the recipe's own GPUs only."""
_EXPLAINED_BY_WORKLOAD = (
    "enable_attention_dp",
    "max_batch_size",
    "max_num_tokens",
    "max_seq_len",
    "enable_chunked_prefill",
    "cuda_graph_config.max_batch_size",
    "kv_cache_config.free_gpu_memory_fraction",
)
"""Keys whose reason in a recipe holds for the recipe's own workload only."""
_SWAP_AB_ROWS = {78: 64}
"""SM count -> rows per expert below which DeepGEMM uses its swapAB kernel; 32 for other Hopper GPUs (the guide)."""

_OUTPUT = (
    Setting("disable_overlap_scheduler", False, "the next iteration is scheduled while this one runs"),
    Setting(
        "stream_interval",
        1,
        "every token leaves the engine at once; the backend sends tokens that wait in one response",
    ),
    Setting("print_iter_log", False, "a log line per iteration is for debugging only"),
    Setting(
        "enable_iter_perf_stats",
        True,
        "without it the engine reports nothing about KV cache and draft tokens; its cost was not measured",
    ),
    Setting("guided_decoding_backend", "xgrammar", "without it guided_* fields are refused; its cost was not measured"),
)
_SAMPLER = Setting(
    "sampler_type",
    "TRTLLMSampler",
    "the C++ sampler honours seed, min_p, min_tokens and the penalties, which the default Torch sampler accepts and "
    "ignores",
    source="NVIDIA/TensorRT-LLM#16485, #16590, #17172",
)


def choose_settings(target: Target, sizes: Sizes, budget: Budget) -> dict[str, Setting]:
    """Return canonical key -> setting: the recipe's settings, completed, and replaced where they had to change."""
    recipe = {setting.key: setting for setting in target.recipe.settings}
    output = _OUTPUT if sizes.num_draft_tokens else (*_OUTPUT, _SAMPLER)
    computed = (
        *_model(target),
        *_parallelism(target, sizes, budget),
        *_limits(target, sizes),
        *_cuda_graphs(sizes, recipe),
        *_kv_cache(target, sizes, budget, recipe),
        *_experts(target, sizes),
        *_speculation(target, sizes, recipe),
        *_kv_transfer(target, sizes, recipe),
        *(setting for setting in output if setting.key not in recipe),
    )
    # Beginnings of keys of a recipe -> whether they go with the sizes.
    goes = {
        "attention_dp_config.": sizes.layout.attention_dp,
        "cuda_graph_config.batch_sizes": sizes.graph_sizes,
        "speculative_config.": sizes.num_draft_tokens,
        "moe_config.load_balancer.": sizes.moe_backend == WIDE_EP,
        "moe_config.max_num_tokens": sizes.moe_max_num_tokens is not None,
    }
    without = tuple(start for start, is_right in goes.items() if not is_right)
    chosen = {key: setting for key, setting in recipe.items() if not key.startswith(without)}
    explained = _EXPLAINED_BY_KERNEL
    layout, value = sizes.layout, target.recipe.value
    has_the_recipes_layout = (
        target.recipe.num_gpus in (None, target.num_gpus)
        and layout.pipeline_parallel_size == 1
        and layout.attention_dp == value("enable_attention_dp", False)
        and layout.expert_parallel_size == value("moe_expert_parallel_size", layout.expert_parallel_size)
        and sizes.expert_slots == value("moe_config.load_balancer.num_slots", 0)
    )
    if not has_the_recipes_layout:
        explained += _EXPLAINED_BY_LAYOUT
    if sizes.shrunk or (target.request.workload != ANY_WORKLOAD and not target.is_as_published):
        explained += _EXPLAINED_BY_WORKLOAD
    # A recipe's setting keeps its reason and source while its value and reason still hold.
    return chosen | {
        setting.key: setting
        for setting in computed
        if setting.key not in chosen or chosen[setting.key].value != setting.value or setting.key in explained
    }


def _model(target: Target) -> Iterator[Setting]:
    request, variant = target.request, target.variant
    yield Setting("model", request.model or target.checkpoint.model, f"{target.title}, {WEIGHTS[target.precision]}")
    yield Setting("backend", "pytorch", "the engine DeepSeek runs on in TensorRT-LLM", source=GUIDE)
    yield Setting("trust_remote_code", variant.trust_remote_code, variant.trust_remote_code_reason)


def _parallelism(target: Target, sizes: Sizes, budget: Budget) -> Iterator[Setting]:
    layout, share = sizes.layout, budget.weights / GIB
    tp, ep, pp = layout.tensor_parallel_size, layout.expert_parallel_size, layout.pipeline_parallel_size
    more = target.gpu.recommended_gpus.get(target.precision, 0)
    advice = f"; {more} GPUs are recommended for the best performance" if more > target.num_gpus else ""
    reason = f"{target.num_gpus} GPUs hold one copy of the weights, "
    reason += f"each {share:{'.1f' if share >= 0.1 else '.3f'}} of its {budget.memory / GIB:.1f} GiB{advice}"
    yield Setting("tensor_parallel_size", tp, reason)
    number = target.architecture.num_routed_experts
    reason = f"each GPU holds whole experts, {number} / {ep}"
    if ep != tp:
        reason = f"{number} experts in {ep} groups, each expert divided among {tp // ep} GPUs; "
        reason += "above 8 only wide EP's back end is published"
    yield Setting("moe_expert_parallel_size", ep, reason)
    reason = "off: tensor parallelism runs over one node's NVLink"
    if target.gpu.nvlink_domain == 1:
        reason = "off; tensor parallelism runs over PCIe, and stages (--pp) would send less for more latency"
    if pp > 1:
        reason = "as asked for: less traffic between nodes, more latency"
    elif target.num_nodes > 1:
        reason = f"off: tensor parallelism spans the {target.num_nodes} nodes, as in the two-node runs of the guide"
    yield Setting("pipeline_parallel_size", pp, reason)
    reason, source = sizes.attention_dp_reason, "TensorRT-LLM 0.19 examples/deepseek_v3/README.md"
    reason = reason or _attention_dp_reason(target, sizes)
    yield Setting("enable_attention_dp", layout.attention_dp, reason, source=source)


def _attention_dp_reason(target: Target, sizes: Sizes) -> str:
    on = "each GPU attends to requests of its own"
    if sizes.layout.attention_dp and needs_attention_dp(target):
        a = target.architecture
        return (
            f"{on}, because {sizes.layout.tensor_parallel_size} GPUs can't share {a.num_heads} heads of "
            f"{a.qk_nope_head_dim + a.qk_rope_head_dim} columns in whole FP8 blocks of {FP8_BLOCK}"
        )
    if sizes.layout.attention_dp:
        return (
            f"{on}: above {LOW_CONCURRENCY} concurrent requests the KV cache, which "
            "tensor parallelism would copy to every GPU, matters more"
        )
    if (target.request.workload.concurrency or 0) > LOW_CONCURRENCY:
        return "off: all GPUs work on every request's attention, which shortens a step; profile throughput turns it on"
    return f"off: up to {LOW_CONCURRENCY} concurrent requests are faster without it, with CUDA graphs"


def _limits(target: Target, sizes: Sizes) -> Iterator[Setting]:
    per = " on each rank" if sizes.layout.attention_dp else ""
    further = "".join(f"; {why}" for why in (sizes.shrunk, target.request.why_measured("--concurrency")) if why)
    reason = f"requests that decode together{per}, {sizes.max_concurrency:,} in all{further}"
    yield Setting("max_batch_size", sizes.max_batch_size, reason)
    fewer = fewer_tokens(sizes)
    less = f"; {fewer} if memory runs out" if fewer == OOM_NUM_TOKENS < sizes.max_num_tokens else ""
    reason = f"tokens of one iteration: {_num_tokens_reason(target, sizes)}{less}"
    yield Setting("max_num_tokens", sizes.max_num_tokens, reason, source=GUIDE)
    asked = target.request.workload.isl or target.request.workload.osl
    short = ""  # max_seq_len may be short though nobody asked for these lengths
    if not asked and sizes.max_seq_len == seq_len_for(sizes.max_num_tokens):
        short = f": no prompt is longer than {sizes.max_num_tokens:,}, and answers have up to {LONGEST_ANSWER:,}"
    most = target.architecture.max_position_embeddings
    reason = f"prompt and answer together{short}; the model reads up to {most:,}"
    yield Setting("max_seq_len", sizes.max_seq_len, reason)
    yield Setting("enable_chunked_prefill", sizes.chunked_prefill, _chunked_reason(target, sizes))


def _num_tokens_reason(target: Target, sizes: Sizes) -> str:
    if sizes.chunked_prefill:
        return "longer prompts are processed in chunks of this size, a whole number of KV blocks"
    draft = f" x {1 + sizes.num_draft_tokens}" if sizes.num_draft_tokens else ""
    decoding = f"{sizes.max_batch_size}{draft}"
    longest = "no prompt that it computes itself" if target.takes_over else "no prompt"
    return f"a whole prompt of {sizes.workload.isl:,} beside {decoding} that decode; {longest} may be longer than this"


def _chunked_reason(target: Target, sizes: Sizes) -> str:
    if target.architecture.attention == "dsa" and sizes.chunked_prefill:
        return "V3.2 crashes in iterations above 8,192 tokens, so longer prompts need it, though the guide turns it off"
    if sizes.chunked_prefill:
        return "for prompts longer than max_num_tokens; supported for MLA on this GPU and release"
    where = ", if it has to compute them itself" if target.takes_over else ""
    longer = f"prompts of more than {sizes.max_num_tokens:,} tokens are refused{where}"
    if target.architecture.attention == "dsa":
        return f"off, as the guide's known issues say for V3.2-Exp; {longer}"
    if sizes.layout.attention_dp and target.release.is_before("1.1"):
        return f"off: with attention DP it hung before 1.1.0 (NVIDIA/TensorRT-LLM#5267); {longer}"
    if target.recipe.value("enable_chunked_prefill"):
        return f"off: TensorRT-LLM {target.release.version} lacks it for MLA on {target.gpu.name}; {longer}"
    return f"off, as published; {longer}"


def _cuda_graphs(sizes: Sizes, recipe: Mapping[str, Setting]) -> Iterator[Setting]:
    if "cuda_graph_config" in recipe:
        return
    if "cuda_graph_config.enable_padding" not in recipe and not sizes.as_published:
        reason = "a batch between two captured sizes runs in the next larger graph"
        yield Setting("cuda_graph_config.enable_padding", True, reason, source=DEPLOYMENT)
    if not sizes.graph_sizes:
        reason = "the same as max_batch_size, because larger batches would run without a graph"
        yield Setting("cuda_graph_config.max_batch_size", sizes.graph_max_batch_size, reason, source=DEPLOYMENT)


def _kv_cache(target: Target, sizes: Sizes, budget: Budget, recipe: Mapping[str, Setting]) -> Iterator[Setting]:
    yield Setting("kv_cache_config.dtype", sizes.kv_setting, _kv_reason(target, sizes, budget), source=GUIDE)
    reason = f"of the memory free after loading: {budget.kv_cache / GIB:.0f} GiB, {budget.kv_tokens:,} tokens a GPU"
    yield Setting("kv_cache_config.free_gpu_memory_fraction", sizes.kv_fraction, reason, source=DEPLOYMENT)
    if target.architecture.csa:  # its recipes say the rest
        return
    size, reuse = "kv_cache_config.tokens_per_block", "kv_cache_config.enable_block_reuse"
    if target.architecture.attention == "dsa":
        reason = "the sparse attention's kernel reads KV blocks of 64 tokens"
        yield Setting(size, 64, reason, source=GUIDE)
        reason = "off for V3.2, a known issue of the guide; newer releases have it, and the check then warns"
        yield Setting(reuse, False, reason, source=GUIDE)
        return
    if target.gpu.architecture == "hopper":
        reason = "FlashMLA sets this size in any case"
        yield Setting(size, 64, reason, source="TensorRT-LLM py_executor_creator.py")
    else:
        yield Setting(size, 32, "the engine's default")
    if target.profile.name == "ctx" and not target.release.is_before("1.2"):
        reason = "off: a block may be evicted before it has been sent, and the generation server waits for it for ever"
        yield Setting(reuse, False, reason, source="NVIDIA/TensorRT-LLM#12540, #12542 (1.2.0rc6.post2)")
    elif reuse not in recipe:
        reason = "prompts that begin alike share blocks; turn it off if none do, as it costs MLA copies and GEMMs"
        yield Setting(reuse, True, reason, source=GUIDE)


def _kv_reason(target: Target, sizes: Sizes, budget: Budget) -> str:
    a_token = f"{budget.kv_bytes_per_token:,} bytes a token"
    if target.architecture.csa:
        hopper = "; V4 has no other on Hopper, of which rc29's own matrix does not know yet"
        return f"about {a_token} beside windows and states{hopper if sizes.kv_setting == 'fp8_ds_mla' else ''}"
    if sizes.kv_setting == "fp8":
        kernel = {"hopper": "FlashMLA", "rtx_blackwell": "XQA"}.get(target.gpu.architecture, "trtllm-gen")
        return f"{a_token}, half of 16 bit, for under 1% of GPQA accuracy; {kernel} has an FP8 kernel"
    if sizes.kv_dtype == "fp8":
        return f"the checkpoint's own, FP8: {a_token}"
    if fp8_kv_works(target):
        return f"the checkpoint's own, 16 bit: {a_token}"
    what = f"{target.variant.name} ({target.precision}) on {target.gpu.name} with {target.release.version}"
    return f"16 bit, {a_token}: FP8 is not known to work for {what}"


def _experts(target: Target, sizes: Sizes) -> Iterator[Setting]:
    _, row = choose_moe_backend(target, sizes.layout)
    if sizes.moe_max_num_tokens is not None:
        reason = f"the experts process the tokens of all {sizes.layout.attention_dp_size} ranks in parts of this size, "
        reason += "because all activations at once would leave too little for the KV cache"
        yield Setting("moe_config.max_num_tokens", sizes.moe_max_num_tokens, reason)
    reason = f"by the support matrix for {target.precision} on {target.gpu.name}{_gemm_kernel(target, sizes)}"
    yield Setting("moe_config.backend", sizes.moe_backend, reason, source=row.source)


def _gemm_kernel(target: Target, sizes: Sizes) -> str:
    if target.gpu.architecture != "hopper" or target.precision != "fp8":
        return ""
    a, tokens = target.architecture, sizes.max_concurrency * (1 + sizes.num_draft_tokens)
    rows = tokens * a.num_experts_per_token / a.num_routed_experts
    limit = _SWAP_AB_ROWS.get(target.gpu.sm_count, 32)
    kernel = "fp8_gemm_kernel_swapAB" if rows < limit else "fp8_gemm_kernel"
    number = f"{rows:,.0f} rows" if rows >= 1 else "less than one row"
    return f"; a full batch gives each expert {number}, where DeepGEMM runs {kernel} (swapAB below {limit})"


def _speculation(target: Target, sizes: Sizes, recipe: Mapping[str, Setting]) -> Iterator[Setting]:
    if not sizes.num_draft_tokens:
        if target.request.relaxed_acceptance:
            cause = "relaxed acceptance needs MTP's draft tokens, and MTP is off"
            raise RefusedPlanError(cause, fix="add --mtp 3")
        return
    prefix = "speculative_config."
    yield Setting(f"{prefix}decoding_type", "MTP", "the checkpoint's own draft layer", source=GUIDE)
    reason = "draft tokens a step, all made by the checkpoint's one MTP layer"
    yield Setting(f"{prefix}num_nextn_predict_layers", sizes.num_draft_tokens, reason, source=GUIDE)
    relaxed, advanced = f"{prefix}use_relaxed_acceptance_for_thinking", f"{prefix}allow_advanced_sampling"
    if target.request.relaxed_acceptance:
        reason = "while the model reasons, a draft token among the likeliest tokens is accepted"
        yield Setting(relaxed, True, reason, source=GUIDE)
        source = "TensorRT-LLM examples/configs/curated/deepseek-r1-latency.yaml"
        reason = "the number of likeliest tokens that a draft token may be among"
        yield Setting(f"{prefix}relaxed_topk", 10, reason, source=source)
        reason = "how far a draft token's probability may lie below that of the likeliest token"
        yield Setting(f"{prefix}relaxed_delta", 0.6, reason, source=source)
    elif relaxed not in recipe and target.release.find_key(advanced):
        reason = "without it MTP decodes greedily, whatever temperature a request asks for"
        yield Setting(advanced, True, reason, source="NVIDIA/TensorRT-LLM#10019")


def _kv_transfer(target: Target, sizes: Sizes, recipe: Mapping[str, Setting]) -> Iterator[Setting]:
    if BUFFER not in recipe:
        return
    limits = {"enable_chunked_prefill": sizes.chunked_prefill, "max_num_tokens": sizes.max_num_tokens}
    longest = longest_prompt(Deployment(settings=limits, isl=target.request.workload.isl)) or 0
    source = "TensorRT-LLM 1.2.0 documentation, features/disagg-serving"
    size = max(recipe[BUFFER].value, buffer_tokens(longest))
    yield Setting(BUFFER, size, "at least the longest prompt, in whole KV blocks", source=source)


# Environment variables

_COMPILER = "TensorRT-LLM cpp/tensorrt_llm/deep_gemm/compiler.cuh"
_UCX = "TRTLLM_USE_UCX_KVCACHE"
_USE_NVCC = "TRTLLM_DG_JIT_USE_NVCC"
_PDL = EnvironmentVariable(
    "TRTLLM_ENABLE_PDL",
    "1",
    "programmatic dependent launch, which TensorRT-LLM turns on by itself from 1.2",
    source="TensorRT-LLM release notes 1.2",
)


def choose_environment(target: Target, sizes: Sizes) -> tuple[EnvironmentVariable, ...]:
    """Return the variables that the server is started with: the recipe's, then those for the GPU and the release."""
    chosen = {variable.name: variable for variable in target.recipe.environment}
    if target.gpu.architecture == "blackwell" and not target.supports("pdl_default"):
        chosen.setdefault(_PDL.name, _PDL)
    else:
        chosen.pop(_PDL.name, None)
    if target.release.find_key("cache_transceiver_config.backend"):
        chosen.pop(_UCX, None)  # the key replaces this variable
    if target.gpu.name == "h200" and (sizes.workload.isl or 0) >= 8192:
        reason = "keeps PyTorch's allocator from fragmenting memory, which is known to run out at 8K/1K on H200"
        # PyTorch renamed the variable between the containers of TensorRT-LLM 1.0 and 1.2; 1.1 reads either.
        is_read = {
            "PYTORCH_CUDA_ALLOC_CONF": target.release.is_before("1.2"),
            "PYTORCH_ALLOC_CONF": not target.release.is_before("1.1"),
        }
        chosen |= {
            name: EnvironmentVariable(name, "max_split_size_mb:8192", reason, source=DEPLOYMENT)
            for name in is_read
            if is_read[name]
        }
    return tuple(chosen.values())


def unset_environment(target: Target, chosen: Iterable[EnvironmentVariable]) -> tuple[EnvironmentVariable, ...]:
    """Return the variables of the guides that the plan leaves unset, with the guides' values and why they are not set.

    :param chosen: the variables that the plan sets.
    """
    names = {variable.name for variable in chosen}
    unset: list[EnvironmentVariable] = []
    if target.gpu.architecture == "blackwell" and _PDL.name not in names:
        unset.append(replace(_PDL, reason="TensorRT-LLM turns it on by itself from 1.2; 0 turns it off"))
    if ucx := [variable for variable in target.recipe.environment if variable.name == _UCX and _UCX not in names]:
        unset.append(replace(ucx[0], reason="cache_transceiver_config.backend says it in this release"))
    if target.gpu.architecture == "hopper" and (target.checkpoint.precision == "fp8" or _USE_NVCC in names):
        unset += _of_deepgemm(uses_nvcc=_USE_NVCC in names)
    return tuple(unset)


def _of_deepgemm(*, uses_nvcc: bool) -> Iterator[EnvironmentVariable]:
    """DeepGEMM has the FP8 kernels of Hopper, and compiles them while the server starts."""
    source = f"{GUIDE}, DeepGEMM"
    reason = "DeepGEMM is on by itself; 0 turns it off, if its kernels fail"
    yield EnvironmentVariable("TRTLLM_DG_ENABLED", "1", reason, source=source)
    if uses_nvcc:
        home = "the container's own is used: DeepGEMM runs $CUDA_HOME/bin/nvcc, or without CUDA_HOME the nvcc on PATH"
        dump = "without effect here, because NVCC's kernels are always kept on disk"
    else:
        nvcc = "NVCC makes slightly faster kernels than NVRTC, but needs CUDA 12.3 or later and compiles longer"
        yield EnvironmentVariable(_USE_NVCC, "1", nvcc, source=source)
        home = f"only NVCC needs it, and DeepGEMM compiles with NVRTC unless {_USE_NVCC} is 1"
        dump = "for debugging, and to keep NVRTC's kernels on disk: each start compiles them again otherwise"
    yield EnvironmentVariable("CUDA_HOME", "/usr/local/cuda", home, source=_COMPILER)
    yield EnvironmentVariable("TRTLLM_DG_JIT_DUMP_CUBIN", "1", dump, source=source)
    debug = "for debugging: prints how each kernel is compiled, if DeepGEMM's compiler fails"
    yield EnvironmentVariable("TRTLLM_DG_JIT_DEBUG", "1", debug, source=source)
