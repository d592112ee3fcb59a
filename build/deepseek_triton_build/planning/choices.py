"""The settings of a plan, under canonical keys, each with its reason: what is not in the recipe is decided here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from deepseek_triton_build.catalog import Gpu, MoeBackendRow, moe_backend_rows
from deepseek_triton_build.errors import RefusedPlanError
from deepseek_triton_build.memory import GIB, Budget
from deepseek_triton_build.planning.sizes import LOW_CONCURRENCY, OOM_NUM_TOKENS, Sizes, fp8_kv_works
from deepseek_triton_build.planning.target import Target
from deepseek_triton_build.settings import Setting

_GUIDE = "TensorRT-LLM examples/models/core/deepseek_v3/README.md"
_DEPLOYMENT = "TensorRT-LLM deployment guide for DeepSeek-R1"


def choose_settings(target: Target, sizes: Sizes, budget: Budget) -> dict[str, Setting]:
    """Canonical key -> setting: the recipe's own, and in their place what it leaves open or what had to change."""
    chosen = {setting.key: setting for setting in target.recipe.settings}
    rows: list[Setting] = [
        *_model(target),
        *_parallelism(target, sizes, budget),
        *_limits(target, sizes),
        *_cuda_graphs(sizes, chosen),
        *_kv_cache(target, sizes, budget, chosen),
        *_moe(target, sizes, chosen),
        *_speculation(target, sizes, chosen),
        *_transfer(sizes, chosen),
        *_output(target, sizes, chosen),
    ]
    computed = {setting.key: setting for setting in rows}
    for key in _contradicted(sizes, chosen):
        del chosen[key]
    return _kept(chosen, computed)


_EXPLAINED_BY_KERNEL = ("kv_cache_config.dtype", "moe_config.backend")
"""What runs under these depends on the GPU and the batch, which a recipe's own line can't say."""


def _kept(recipe: dict[str, Setting], computed: dict[str, Setting]) -> dict[str, Setting]:
    """A recipe's line keeps its own reason and source where the value stayed the same."""
    merged = dict(recipe)
    for key, setting in computed.items():
        if key not in recipe or recipe[key].value != setting.value or key in _EXPLAINED_BY_KERNEL:
            merged[key] = setting
    return merged


def _contradicted(sizes: Sizes, recipe: dict[str, Setting]) -> list[str]:
    """Lines of the recipe that no longer hold."""
    gone = []
    if not sizes.layout.attention_dp:
        gone += [key for key in recipe if key.startswith("attention_dp_config.")]
    if not sizes.graph_sizes:
        gone += [key for key in recipe if key == "cuda_graph_config.batch_sizes"]
    if not sizes.num_draft_tokens:
        gone += [key for key in recipe if key.startswith("speculative_config.")]
    return gone


def _model(target: Target) -> Iterable[Setting]:
    request, variant = target.request, target.variant
    yield Setting(
        key="model", value=request.model or target.checkpoint.model, reason=f"{variant.title}, {_weights_title(target)}"
    )
    yield Setting(key="backend", value="pytorch", reason="the engine DeepSeek runs on in TensorRT-LLM", source=_GUIDE)
    yield Setting(
        key="trust_remote_code",
        value=variant.trust_remote_code,
        reason=variant.trust_remote_code_reason,
    )


def _weights_title(target: Target) -> str:
    return {"fp8": "FP8 weights", "fp4": "NVFP4 weights", "w4a8": "INT4 experts with FP8 activations"}[target.precision]


def _parallelism(target: Target, sizes: Sizes, budget: Budget) -> Iterable[Setting]:
    layout, each = sizes.layout, budget.weights / GIB
    yield Setting(
        key="tensor_parallel_size",
        value=layout.tensor_parallel_size,
        reason=f"{target.num_gpus} GPUs hold one copy of the weights, {each:.1f} of {budget.memory / GIB:.1f} GiB each",
    )
    yield Setting(
        key="moe_expert_parallel_size",
        value=layout.expert_parallel_size,
        reason=_expert_reason(layout.tensor_parallel_size, layout.expert_parallel_size),
    )
    yield Setting(
        key="pipeline_parallel_size",
        value=layout.pipeline_parallel_size,
        reason=_pipeline_reason(target, layout.pipeline_parallel_size),
    )
    yield Setting(
        key="enable_attention_dp",
        value=layout.attention_dp,
        reason=_attention_dp_reason(sizes),
        source="TensorRT-LLM 0.19 examples/deepseek_v3/README.md",
    )


def _expert_reason(tp: int, ep: int) -> str:
    if ep == tp:
        return f"whole experts on each GPU: 256 / {ep}, no expert is cut"
    cut = f"256 experts over {ep} groups, each expert cut over {tp // ep} GPUs"
    return f"{cut}; past 8 only wide EP's back end is published"


def _pipeline_reason(target: Target, pp: int) -> str:
    if pp > 1:
        return "as asked: less traffic between nodes, more latency"
    if target.num_nodes > 1:
        return f"no stages: tensor parallelism spans the {target.num_nodes} nodes, as in the two-node runs of the guide"
    return "no stages: one node's NVLink carries tensor parallelism"


def _attention_dp_reason(sizes: Sizes) -> str:
    if sizes.shrunk.startswith("attention DP"):
        return sizes.shrunk
    if sizes.layout.attention_dp:
        return (
            f"each GPU attends to requests of its own: past {LOW_CONCURRENCY} at once the KV cache, which tensor "
            "parallelism would copy to every GPU, counts for more"
        )
    return f"off: up to {LOW_CONCURRENCY} requests at once, CUDA graphs without it are faster"


def _limits(target: Target, sizes: Sizes) -> Iterable[Setting]:
    per = " on each rank" if sizes.layout.attention_dp else ""
    shrunk = f"; {sizes.shrunk}" if sizes.shrunk and not sizes.shrunk.startswith("attention DP") else ""
    yield Setting(
        key="max_batch_size",
        value=sizes.max_batch_size,
        reason=f"requests decoding together{per}, {sizes.max_concurrency:,} in all{shrunk}",
    )
    yield Setting(
        key="max_num_tokens",
        value=sizes.max_num_tokens,
        reason=f"tokens of one iteration: {_num_tokens_reason(sizes)}; {OOM_NUM_TOKENS} if memory runs out",
        source=_GUIDE,
    )
    yield Setting(
        key="max_seq_len",
        value=sizes.max_seq_len,
        reason=f"prompt and answer together; the checkpoint goes to {target.architecture.max_position_embeddings:,}",
    )
    yield Setting(key="enable_chunked_prefill", value=sizes.chunked_prefill, reason=_chunked_reason(target, sizes))


def _num_tokens_reason(sizes: Sizes) -> str:
    if sizes.chunked_prefill:
        return "longer prompts go in chunks of this size, which is whole KV blocks"
    draft = f" x {1 + sizes.num_draft_tokens}" if sizes.num_draft_tokens else ""
    decoding = f"{sizes.max_batch_size}{draft}"
    return f"a whole prompt of {sizes.workload.isl:,} beside {decoding} that decode, no prompt may be longer"


def _chunked_reason(target: Target, sizes: Sizes) -> str:
    if target.architecture.is_sparse and sizes.chunked_prefill:
        return "the one way to prompts past 8,192 tokens with V3.2; newer than the guide, which turns it off"
    if sizes.chunked_prefill:
        return "for prompts longer than max_num_tokens; MLA has it on this GPU and release"
    if target.architecture.is_sparse:
        return "off, as the guide's known issues have it for V3.2-Exp"
    if sizes.layout.attention_dp and target.release.version < "1.1":
        return "off: beside attention DP it hung before 1.1.0 (NVIDIA/TensorRT-LLM#5267)"
    return "off: every prompt fits one iteration"


def _cuda_graphs(sizes: Sizes, recipe: dict[str, Setting]) -> Iterable[Setting]:
    if "cuda_graph_config" in recipe:
        return
    if "cuda_graph_config.enable_padding" not in recipe and not sizes.as_published:
        yield Setting(
            key="cuda_graph_config.enable_padding",
            value=True,
            reason="a batch between two captured sizes runs in the next larger graph",
            source=_DEPLOYMENT,
        )
    if not sizes.graph_sizes:
        yield Setting(
            key="cuda_graph_config.max_batch_size",
            value=sizes.graph_max_batch_size,
            reason="as max_batch_size: larger batches would run without a graph",
            source=_DEPLOYMENT,
        )


def _kv_cache(target: Target, sizes: Sizes, budget: Budget, recipe: dict[str, Setting]) -> Iterable[Setting]:
    yield Setting(
        key="kv_cache_config.dtype", value=sizes.kv_setting, reason=_kv_reason(target, sizes, budget), source=_GUIDE
    )
    yield Setting(
        key="kv_cache_config.free_gpu_memory_fraction",
        value=sizes.kv_fraction,
        reason=f"of what is free after loading: {budget.kv_cache / GIB:.0f} GiB, {budget.kv_tokens:,} tokens a GPU",
        source=_DEPLOYMENT,
    )
    yield from _kv_blocks(target, recipe)


def _kv_blocks(target: Target, recipe: dict[str, Setting]) -> Iterable[Setting]:
    size, reuse = "kv_cache_config.tokens_per_block", "kv_cache_config.enable_block_reuse"
    if target.architecture.is_sparse:
        reason = "the sparse attention's kernel reads KV blocks of 64 tokens"
        yield Setting(key=size, value=64, reason=reason, source=_GUIDE)
        reason = "not with V3.2-Exp, a known issue of the guide; releases that can have it warn"
        yield Setting(key=reuse, value=False, reason=reason, source=_GUIDE)
        return
    if target.gpu.architecture == "hopper":
        reason = "what FlashMLA makes of it in any case"
        yield Setting(key=size, value=64, reason=reason, source="TensorRT-LLM py_executor_creator.py")
    else:
        yield Setting(key=size, value=32, reason="the engine's default")
    if reuse not in recipe:
        reason = "prompts that begin alike share their blocks; off where none do, for it costs MLA copies and GEMMs"
        yield Setting(key=reuse, value=True, reason=reason, source=_GUIDE)


def _kv_reason(target: Target, sizes: Sizes, budget: Budget) -> str:
    kernel = "FlashMLA" if target.gpu.architecture == "hopper" else "trtllm-gen"
    if sizes.kv_setting == "fp8":
        return (
            f"{budget.kv_bytes_per_token:,} bytes a token, half of 16 bit, at under 1% on GPQA; {kernel}'s FP8 kernel "
            "reads it"
        )
    if sizes.kv_dtype == "fp8":
        return f"the checkpoint's own, FP8: {budget.kv_bytes_per_token:,} bytes a token"
    if fp8_kv_works(target):
        return f"the checkpoint's own, 16 bit: {budget.kv_bytes_per_token:,} bytes a token"
    return f"16 bit, {budget.kv_bytes_per_token:,} bytes a token: FP8 is not known to work for {_what(target)}"


def _what(target: Target) -> str:
    return f"{target.variant.name} ({target.precision}) on {target.gpu.name} with {target.release.version}"


def _moe(target: Target, sizes: Sizes, recipe: dict[str, Setting]) -> Iterable[Setting]:
    row = moe_row(target.gpu, target.precision, sizes.layout.expert_parallel_size)
    if row is None:
        raise RefusedPlanError(
            f"no MoE back end is published for {target.precision} on {target.gpu.name} with expert parallelism "
            f"{sizes.layout.expert_parallel_size} (support matrix of the {_DEPLOYMENT})"
        )
    published = recipe.get("moe_config.backend")
    backend = published.value if published and published.value in row.backends else row.default
    yield Setting(
        key="moe_config.backend",
        value=backend,
        reason=f"in the support matrix for {target.precision} on {target.gpu.name}{_gemm_kernel(target, sizes)}",
        source=row.source,
    )


def moe_row(gpu: Gpu, precision: str, expert_parallel_size: int) -> MoeBackendRow | None:
    """The line of the support matrix; None where nothing is published."""
    rows = (row for row in moe_backend_rows() if row.holds_for(gpu, precision, expert_parallel_size))
    return next(rows, None)


_SWAP_AB_ROWS = {78: 64}
"""SM count -> rows per expert below which DeepGEMM takes its swapAB kernel; 32 on other Hopper GPUs (the guide)."""


def _gemm_kernel(target: Target, sizes: Sizes) -> str:
    if target.gpu.architecture != "hopper" or target.precision != "fp8":
        return ""
    rows = sizes.max_concurrency * target.architecture.num_experts_per_token / target.architecture.num_routed_experts
    limit = _SWAP_AB_ROWS.get(target.gpu.sm_count, 32)
    kernel = "fp8_gemm_kernel_swapAB" if rows < limit else "fp8_gemm_kernel"
    return f"; a full batch gives each expert {rows:.0f} rows, where DeepGEMM runs {kernel} (swapAB below {limit})"


def _speculation(target: Target, sizes: Sizes, recipe: dict[str, Setting]) -> Iterable[Setting]:
    if not sizes.num_draft_tokens:
        if target.request.relaxed_acceptance:
            raise RefusedPlanError("relaxed acceptance is about MTP's drafts, and there are none; add --mtp 3")
        return
    yield Setting(
        key="speculative_config.decoding_type", value="MTP", reason="the checkpoint's own draft layer", source=_GUIDE
    )
    yield Setting(
        key="speculative_config.num_nextn_predict_layers",
        value=sizes.num_draft_tokens,
        reason="drafts a step, all by the one MTP layer of the checkpoint",
        source=_GUIDE,
    )
    if target.request.relaxed_acceptance:
        yield from _relaxed_acceptance()
    elif "speculative_config.use_relaxed_acceptance_for_thinking" not in recipe:
        yield from _advanced_sampling(target)


def _relaxed_acceptance() -> Iterable[Setting]:
    source = "TensorRT-LLM examples/configs/curated/deepseek-r1-latency.yaml"
    prefix = "speculative_config."
    yield Setting(
        key=f"{prefix}use_relaxed_acceptance_for_thinking",
        value=True,
        reason="while it thinks, a draft among the likeliest tokens is accepted",
        source=_GUIDE,
    )
    yield Setting(key=f"{prefix}relaxed_topk", value=10, reason="the tokens a draft may be among", source=source)
    yield Setting(
        key=f"{prefix}relaxed_delta", value=0.6, reason="and how far below the likeliest its probability", source=source
    )


def _advanced_sampling(target: Target) -> Iterable[Setting]:
    key = "speculative_config.allow_advanced_sampling"
    if target.release.find_key(key) and target.variant.default_sampling:
        yield Setting(
            key=key,
            value=True,
            reason="MTP decodes greedily without it, against the model card's advice on sampling",
            source="NVIDIA/TensorRT-LLM#10019",
        )


def _transfer(sizes: Sizes, recipe: dict[str, Setting]) -> Iterable[Setting]:
    key = "cache_transceiver_config.max_tokens_in_buffer"
    if key in recipe and not sizes.as_published:
        yield Setting(
            key=key,
            value=max(recipe[key].value, sizes.max_num_tokens),
            reason="no less than the longest prompt, in whole KV blocks",
            source="TensorRT-LLM 1.2.0 documentation, features/disagg-serving",
        )


def _output(target: Target, sizes: Sizes, recipe: dict[str, Setting]) -> Iterable[Setting]:
    defaults: list[tuple[str, Any, str, str]] = [
        ("disable_overlap_scheduler", False, "the next iteration is scheduled while this one runs", ""),
        ("stream_interval", 1, "every token leaves the engine at once; the backend sends what waits together", ""),
        ("print_iter_log", False, "a line per iteration is for debugging", ""),
        (
            "enable_iter_perf_stats",
            True,
            "without it the engine says nothing of its KV cache and draft tokens; its cost is not measured",
            "",
        ),
        (
            "guided_decoding_backend",
            "xgrammar",
            "guided_* fields are refused without one; its cost is not measured",
            "",
        ),
    ]
    if not sizes.num_draft_tokens:
        defaults.append(
            (
                "sampler_type",
                "TRTLLMSampler",
                "the C++ sampler honours seed, min_p, min_tokens and the penalties, which the default Torch sampler "
                "accepts and ignores",
                "NVIDIA/TensorRT-LLM#16485, #16590, #17172",
            )
        )
    for key, value, reason, source in defaults:
        if key not in recipe:
            yield Setting(key=key, value=value, reason=reason, source=source)
