"""The settings of the KV cache and the experts: their memory and their kernels."""

from __future__ import annotations

from collections.abc import Iterable

from deepseek_triton_build.arithmetic.gpu_memory import GIB, Budget
from deepseek_triton_build.data.planned_settings import DEPLOYMENT, GUIDE, Setting
from deepseek_triton_build.planning.batch_sizes import Sizes, fp8_kv_works
from deepseek_triton_build.planning.layout import choose_moe_backend
from deepseek_triton_build.planning.target import Target


def kv_cache_settings(target: Target, sizes: Sizes, budget: Budget, recipe: dict[str, Setting]) -> Iterable[Setting]:
    yield Setting("kv_cache_config.dtype", sizes.kv_setting, _kv_reason(target, sizes, budget), source=GUIDE)
    yield Setting(
        "kv_cache_config.free_gpu_memory_fraction",
        sizes.kv_fraction,
        f"of the memory free after loading: {budget.kv_cache / GIB:.0f} GiB, {budget.kv_tokens:,} tokens a GPU",
        source=DEPLOYMENT,
    )
    yield from _kv_blocks(target, recipe)


def _kv_blocks(target: Target, recipe: dict[str, Setting]) -> Iterable[Setting]:
    size, reuse = "kv_cache_config.tokens_per_block", "kv_cache_config.enable_block_reuse"
    if target.architecture.is_sparse:
        reason = "the sparse attention's kernel reads KV blocks of 64 tokens"
        yield Setting(size, 64, reason, source=GUIDE)
        reason = "off for V3.2-Exp, a known issue of the guide; newer releases have it, and the check then warns"
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
    kernel = "FlashMLA" if target.gpu.architecture == "hopper" else "trtllm-gen"
    if sizes.kv_setting == "fp8":
        return (
            f"{budget.kv_bytes_per_token:,} bytes a token, half of 16 bit, for under 1% of GPQA accuracy; {kernel} has "
            "an FP8 kernel"
        )
    if sizes.kv_dtype == "fp8":
        return f"the checkpoint's own, FP8: {budget.kv_bytes_per_token:,} bytes a token"
    if fp8_kv_works(target):
        return f"the checkpoint's own, 16 bit: {budget.kv_bytes_per_token:,} bytes a token"
    what = f"{target.variant.name} ({target.precision}) on {target.gpu.name} with {target.release.version}"
    return f"16 bit, {budget.kv_bytes_per_token:,} bytes a token: FP8 is not known to work for {what}"


def moe_settings(target: Target, sizes: Sizes) -> Iterable[Setting]:
    _, row = choose_moe_backend(target, sizes.layout)
    if sizes.moe_max_num_tokens is not None:
        yield Setting(
            "moe_config.max_num_tokens",
            sizes.moe_max_num_tokens,
            f"the experts process the tokens of all {sizes.layout.attention_dp_size} ranks in parts of this "
            "size, because all activations at once would leave too little for the KV cache",
        )
    yield Setting(
        "moe_config.backend",
        sizes.moe_backend,
        f"by the support matrix for {target.precision} on {target.gpu.name}{_gemm_kernel(target, sizes)}",
        source=row.source,
    )


_SWAP_AB_ROWS = {78: 64}
"""SM count -> rows per expert below which DeepGEMM uses its swapAB kernel; 32 for other Hopper GPUs (the guide)."""


def _gemm_kernel(target: Target, sizes: Sizes) -> str:
    if target.gpu.architecture != "hopper" or target.precision != "fp8":
        return ""
    a, tokens = target.architecture, sizes.max_concurrency * (1 + sizes.num_draft_tokens)
    rows = tokens * a.num_experts_per_token / a.num_routed_experts
    limit = _SWAP_AB_ROWS.get(target.gpu.sm_count, 32)
    kernel = "fp8_gemm_kernel_swapAB" if rows < limit else "fp8_gemm_kernel"
    each = f"{rows:,.0f} rows" if rows >= 1 else "less than one row"
    return f"; a full batch gives each expert {each}, where DeepGEMM runs {kernel} (swapAB below {limit})"
