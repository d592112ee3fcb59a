"""Rules K: the KV cache."""

import math
from collections.abc import Iterator

from deepseek_triton_build.arithmetic.gpu_memory import GIB
from deepseek_triton_build.arithmetic.warmup_shapes import DEFAULT_MAX_NUM_TOKENS
from deepseek_triton_build.rules.rule import (
    COMPRESSED_TOKENS_PER_BLOCK,
    FLASH_MLA_TOKENS_PER_BLOCK,
    Deployment,
    RuleTable,
    Violation,
)

RULES = RuleTable()
_DS_MLA = "fp8_ds_mla"
_DTYPE = "kv_cache_config.dtype"
_FRACTION = "kv_cache_config.free_gpu_memory_fraction"
# Compute capabilities on which MLA reuses blocks (py_executor_creator.py).
_REUSE_SMS = (90, 100, 103, 120)
# The guides name 0.7 to 0.95, and memory use fluctuates.
_HIGHEST_FRACTION = 0.95
# The FP8 examples for Blackwell use it.
_HIGHEST_DEEPGEMM_FRACTION = 0.8
# With MTP and batches from _LARGE_BATCH, memory ran out even at 0.6 (NVIDIA/TensorRT-LLM PR 13357, PR 14232).
_HIGHEST_WITH_DRAFTS = 0.5
_LARGE_BATCH = 128
# A margin of this project's own: cuBLAS, NCCL and the kernels of the first long prompts come after the cache.
_LEAST_FREE = 2 * GIB
# Tokens of an iteration below which a server of a pair may keep _HIGHEST_FRACTION: twice what it is published with
# (TensorRT-LLM examples/models/core/deepseek_v3/README.md, Disaggregated Serving).
_SHORT_ITERATION = 2 * 1160


@RULES.error("K001")
def _fp8(d: Deployment) -> Iterator[Violation]:
    if d.gpu is None or d.attention in ("dsa", "csa") or not d.has_fp8_kv:  # V3.2: V001
        return
    if d.supports(f"fp8_kv_mla_{d.gpu.architecture}") is False or d.gpu.sm < 90:
        release = "" if d.release is None else f" in TensorRT-LLM {d.release.version}"
        message = f"an FP8 KV cache for MLA is not supported on {d.gpu.architecture.title()}{release}"
        yield Violation(_DTYPE, message, sixteen_bits(d))


@RULES.error("K002")
def _fp8_with_w4a8(d: Deployment) -> Iterator[Violation]:
    if d.precision == "w4a8" and d.has_fp8_kv:
        message = "an FP8 KV cache with W4AFP8 weights is known to crash "
        message += "(illegal memory access in the prompt's attention)"
        yield Violation(_DTYPE, message, sixteen_bits(d))


def sixteen_bits(d: Deployment) -> str:
    """Return how to get a KV cache of 16 bits: by the setting, by the checkpoint, or by both."""
    weights = "weights whose hf_quant_config.json names no kv_cache_quant_algo" if d.defaults_to_fp8_kv else ""
    if d.get(_DTYPE) == "auto":
        return f"use {weights}"
    return f"set {_DTYPE}: auto{', and use ' if weights else ''}{weights}"


@RULES.warning("K003")
def _dtype(d: Deployment) -> Iterator[Violation]:
    dtype = d.get(_DTYPE)
    if dtype not in (None, "auto", "fp8") and not (dtype == _DS_MLA and d.attention == "csa"):
        message = f"{_DTYPE} {dtype} has no effect: only auto and fp8 have one"
        yield Violation(_DTYPE, message, "use auto (the checkpoint's own) or fp8")


@RULES.error("K004")
def _reuse(d: Deployment) -> Iterator[Violation]:
    if d.gpu is not None and d.get("kv_cache_config.enable_block_reuse") and d.gpu.sm not in _REUSE_SMS:
        message = f"KV blocks of MLA can't be reused on {d.gpu.title} (SM{d.gpu.sm})"
        fix = "set kv_cache_config.enable_block_reuse: false"
        yield Violation("kv_cache_config.enable_block_reuse", message, fix)


@RULES.error("K005")
def _fraction(d: Deployment) -> Iterator[Violation]:
    fraction = d.get(_FRACTION)
    if fraction is not None and not 0 < fraction <= 1:
        message = f"{_FRACTION} {fraction} is not a share between 0 and 1"
        yield Violation(_FRACTION, message, "use 0.8 to 0.9, or less if memory runs out")


@RULES.warning("K006")
def _high_fraction(d: Deployment) -> Iterator[Violation]:
    fraction = d.get(_FRACTION)
    if fraction is not None and _HIGHEST_FRACTION < fraction <= 1 and d.get("moe_config.backend") != "DEEPGEMM":  # K007
        message = f"{_FRACTION} {fraction} leaves almost nothing for what is allocated after the KV cache"
        yield Violation(_FRACTION, message, f"use {min(0.9, _share(d) or 0.9)} or less")


@RULES.warning("K007")
def _deepgemm_fraction(d: Deployment) -> Iterator[Violation]:
    fraction = d.get(_FRACTION)
    if fraction is None or d.get("moe_config.backend") != "DEEPGEMM" or fraction > 1:
        return
    if d.num_draft_tokens and (d.get("max_batch_size") or 0) >= _LARGE_BATCH and fraction > _HIGHEST_WITH_DRAFTS:
        message = f"{_FRACTION} {fraction} with DEEPGEMM, MTP and large batches was seen to run out of memory"
        yield Violation(_FRACTION, message, f"if memory runs out, use {min(_HIGHEST_WITH_DRAFTS, _share(d) or 1)}")
    elif fraction > _HIGHEST_DEEPGEMM_FRACTION:
        message = f"{_FRACTION} {fraction} leaves too little for DEEPGEMM's workspace beside the KV cache"
        yield Violation(_FRACTION, message, f"use {min(_HIGHEST_DEEPGEMM_FRACTION, _share(d) or 1)} or less")


@RULES.note("K008")
def _block_size(d: Deployment) -> Iterator[Violation]:
    key = "kv_cache_config.tokens_per_block"
    given = d.settings.get(key)
    is_flash_mla = d.gpu_architecture == "hopper" and d.attention != "csa"
    if given is not None and is_flash_mla and given != FLASH_MLA_TOKENS_PER_BLOCK:
        message = f"{key} {given} becomes {FLASH_MLA_TOKENS_PER_BLOCK}: FlashMLA sets it on Hopper"
        yield Violation(key, message, "leave it out")


def _share(d: Deployment) -> float | None:
    """Return the largest share that leaves _LEAST_FREE; None where there is none, or the memory is not known."""
    budget = d.budget()
    if budget is None or budget.kv_cache <= 0:
        return None
    left = budget.free + budget.kv_cache
    share = math.floor((left - _LEAST_FREE) / left * 100) / 100
    return share if share > 0 else None


@RULES.warning("K010")
def _little_free(d: Deployment) -> Iterator[Violation]:
    budget = d.budget()
    if budget is None or budget.kv_cache <= 0 or budget.free >= _LEAST_FREE:
        return
    tokens, fraction = d.get("max_num_tokens") or DEFAULT_MAX_NUM_TOKENS, d.get(_FRACTION) or 0
    if d.is_disaggregated and tokens < _SHORT_ITERATION and fraction <= _HIGHEST_FRACTION:
        return
    message = f"{budget.free / GIB:.1f} GiB of {budget.memory / GIB:.0f} "
    message += "stay free beside weights, workspace and KV cache"
    share = _share(d)
    fix = "use more GPUs" if share is None else f"set {_FRACTION}: {min(share, _HIGHEST_FRACTION)}"
    yield Violation(_FRACTION, message, fix)


@RULES.error("K011")
def _top_level_dtype(d: Deployment) -> Iterator[Violation]:
    dtype = d.get("dtype")
    if dtype not in (None, "auto", "bfloat16", "float16", "float32"):
        fix = f"if the KV cache is meant, write it under kv_cache_config: dtype: {dtype}; else remove it"
        yield Violation("dtype", f"dtype {dtype} is not a type of the model's activations", fix)


@RULES.error("K012")
def _compressed(d: Deployment) -> Iterator[Violation]:
    """V4's cache manager asserts these."""
    if d.attention != "csa":
        return
    size, events, width = "kv_cache_config.tokens_per_block", "kv_cache_config.event_buffer_max_size", "max_beam_width"
    if d.settings.get(size) not in (None, *COMPRESSED_TOKENS_PER_BLOCK):
        message = f"V4's KV cache has blocks of 128 or 256 tokens, not of {d.settings[size]}"
        yield Violation(size, message, f"set {size}: {COMPRESSED_TOKENS_PER_BLOCK[0]}")
    if d.settings.get(events):
        message = f"V4's KV cache reports no events, so {events} {d.settings[events]} stops the load"
        yield Violation(events, message, "remove it, and --publish-events-and-metrics of Dynamo")
    if (d.settings.get(width) or 1) > 1:
        yield Violation(width, f"V4's KV cache has no beam search, and {width} is {d.settings[width]}", "remove it")
    if d.gpu_architecture == "hopper" and d.get(_DTYPE) != _DS_MLA:
        message = f"on Hopper V4 has no KV cache but {_DS_MLA}"
        yield Violation(_DTYPE, message, f"set {_DTYPE}: {_DS_MLA}")
