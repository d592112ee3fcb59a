"""Rules K: the KV cache."""

from __future__ import annotations

import math
from collections.abc import Iterator

from deepseek_triton_build.arithmetic.gpu_memory import GIB
from deepseek_triton_build.arithmetic.warmup_shapes import DEFAULT_MAX_NUM_TOKENS
from deepseek_triton_build.data.planned_settings import DEPLOYMENT, GUIDE, LLM_ARGS, PY_EXECUTOR_CREATOR
from deepseek_triton_build.rules.rule import FLASH_MLA_TOKENS_PER_BLOCK, Deployment, RuleTable, Violation

RULES = RuleTable()
_DTYPE = "kv_cache_config.dtype"
_FRACTION = "kv_cache_config.free_gpu_memory_fraction"
_REUSE_SMS = (90, 100, 103, 120)
_HIGHEST_FRACTION = 0.95
_HIGHEST_DEEPGEMM_FRACTION = 0.8
_HIGHEST_WITH_DRAFTS = 0.5
_LARGE_BATCH = 128
_LEAST_FREE = 2 * GIB
_SHORT_ITERATION = 2 * 1160
"""Tokens of an iteration below which a server of a pair may keep _HIGHEST_FRACTION: twice what it is published with
(TensorRT-LLM examples/models/core/deepseek_v3/README.md, Disaggregated Serving)."""


@RULES.error(
    "K001",
    title="For an FP8 KV cache, the GPU has the kernels",
    why="MLA's FP8 kernels are FlashMLA on Hopper and trtllm-gen on Blackwell; other GPUs have none.",
    source=f"{GUIDE}, FP8 KV Cache and MLA",
)
def _fp8(d: Deployment) -> Iterator[Violation]:
    if d.gpu is None or d.is_sparse or not d.has_fp8_kv:  # V3.2: V001
        return
    if d.supports(f"fp8_kv_mla_{d.gpu.architecture}") is False or d.gpu.sm < 90:
        release = "" if d.release is None else f" in TensorRT-LLM {d.release.version}"
        message = f"an FP8 KV cache for MLA is not supported on {d.gpu.architecture.title()}{release}"
        yield Violation(_DTYPE, message, sixteen_bits(d))


@RULES.error(
    "K002",
    title="With W4AFP8 weights, the KV cache has 16 bits",
    why="With an FP8 cache, the attention of the prompt (context phase) ends with an illegal memory access; no fix "
    "is known.",
    source="NVIDIA/TensorRT-LLM#8125 (open)",
)
def _fp8_with_w4a8(d: Deployment) -> Iterator[Violation]:
    if d.precision == "w4a8" and d.has_fp8_kv:
        message = (
            "an FP8 KV cache with W4AFP8 weights is known to crash (illegal memory access in the prompt's attention)"
        )
        yield Violation(_DTYPE, message, sixteen_bits(d))


def sixteen_bits(d: Deployment) -> str:
    """Return how to get a KV cache of 16 bits: by the setting, by the checkpoint, or by both."""
    by_checkpoint = d.checkpoint is not None and d.checkpoint.kv_cache_quant_algo == "FP8"
    weights = "weights whose hf_quant_config.json names no kv_cache_quant_algo" if by_checkpoint else ""
    if d.get(_DTYPE) == "auto":
        return f"use {weights}"
    return f"set {_DTYPE}: auto{', and use ' if weights else ''}{weights}"


@RULES.warning(
    "K003",
    title="The KV cache's dtype is auto or fp8",
    why="The engine ignores any other value with one line in its log, and uses the checkpoint's own dtype.",
    source=f"{LLM_ARGS}, KvCacheConfig",
    releases="0.21 to 1.2",
)
def _dtype(d: Deployment) -> Iterator[Violation]:
    dtype = d.get(_DTYPE)
    if dtype not in (None, "auto", "fp8"):
        message = f"{_DTYPE} {dtype} has no effect: only auto and fp8 have one"
        yield Violation(_DTYPE, message, "use auto (the checkpoint's own) or fp8")


@RULES.error(
    "K004",
    title="Block reuse is on only where MLA supports it",
    why="On other GPUs and in other releases, the engine turns block reuse off with one line in its log.",
    source=f"{GUIDE}, KV Cache Reuse; {PY_EXECUTOR_CREATOR}",
)
def _reuse(d: Deployment) -> Iterator[Violation]:
    if d.gpu is not None and d.get("kv_cache_config.enable_block_reuse") and d.gpu.sm not in _REUSE_SMS:
        message = f"KV blocks of MLA can't be reused on {d.gpu.title} (SM{d.gpu.sm})"
        fix = "set kv_cache_config.enable_block_reuse: false"
        yield Violation("kv_cache_config.enable_block_reuse", message, fix)


@RULES.error(
    "K005",
    title="The KV cache's share of free memory is above 0 and at most 1",
    why="It is a share of the memory that weights, CUDA graphs and one iteration leave free.",
    source=f"{DEPLOYMENT}, kv_cache_free_gpu_memory_fraction",
)
def _fraction(d: Deployment) -> Iterator[Violation]:
    fraction = d.get(_FRACTION)
    if fraction is not None and not 0 < fraction <= 1:
        message = f"{_FRACTION} {fraction} is not a share between 0 and 1"
        yield Violation(_FRACTION, message, "use 0.8 to 0.9, or less if memory runs out")


@RULES.warning(
    "K006",
    title=f"The KV cache's share of free memory is at most {_HIGHEST_FRACTION}",
    why="Memory use fluctuates; the guides name 0.7 to 0.95 and advise a smaller share when memory runs out.",
    source=f"{GUIDE}; {DEPLOYMENT}; NVIDIA/TensorRT-LLM PR 7358",
)
def _high_fraction(d: Deployment) -> Iterator[Violation]:
    fraction = d.get(_FRACTION)
    if fraction is not None and _HIGHEST_FRACTION < fraction <= 1:
        message = f"{_FRACTION} {fraction} leaves almost nothing for what is allocated after the KV cache"
        yield Violation(_FRACTION, message, "use 0.9 or less")


@RULES.warning(
    "K007",
    title="With DEEPGEMM, the KV cache leaves room for its workspace",
    why="The FP8 examples for Blackwell use 0.8; with MTP and large batches memory ran out even at 0.6.",
    source=f"{GUIDE}, Serving (FP8); NVIDIA/TensorRT-LLM PR 13357, PR 14232",
)
def _deepgemm_fraction(d: Deployment) -> Iterator[Violation]:
    fraction = d.get(_FRACTION)
    if fraction is None or d.get("moe_config.backend") != "DEEPGEMM" or fraction > 1:
        return
    if d.num_draft_tokens and (d.get("max_batch_size") or 0) >= _LARGE_BATCH and fraction > _HIGHEST_WITH_DRAFTS:
        message = f"{_FRACTION} {fraction} with DEEPGEMM, MTP and large batches was seen to run out of memory"
        yield Violation(_FRACTION, message, f"if memory runs out, use {_HIGHEST_WITH_DRAFTS}")
    elif fraction > _HIGHEST_DEEPGEMM_FRACTION:
        message = f"{_FRACTION} {fraction} leaves too little for DEEPGEMM's workspace beside the KV cache"
        yield Violation(_FRACTION, message, f"use {_HIGHEST_DEEPGEMM_FRACTION} or less")


@RULES.note(
    "K008",
    title="On Hopper, the block size is left to FlashMLA",
    why="FlashMLA replaces the configured size, with one line in the log.",
    source=PY_EXECUTOR_CREATOR,
)
def _block_size(d: Deployment) -> Iterator[Violation]:
    key = "kv_cache_config.tokens_per_block"
    given = d.settings.get(key)
    if given is not None and d.gpu_architecture == "hopper" and given != FLASH_MLA_TOKENS_PER_BLOCK:
        message = f"{key} {given} becomes {FLASH_MLA_TOKENS_PER_BLOCK}: FlashMLA sets it on Hopper"
        yield Violation(key, message, "leave it out")


@RULES.note(
    "K009",
    title="The KV cache has one limit",
    why="If two limits are set, the smaller one applies, and it is easy to look at the wrong one.",
    source="the engine's own warning, as quoted in NVIDIA/TensorRT-LLM#5766",
)
def _two_limits(d: Deployment) -> Iterator[Violation]:
    key = "kv_cache_config.max_tokens"
    if d.settings.get(key) is not None and d.settings.get(_FRACTION) is not None:
        message = f"{key} and free_gpu_memory_fraction are both set: the smaller cache results"
        yield Violation(key, message, "leave one of them out")


@RULES.warning(
    "K010",
    title=f"At least {_LEAST_FREE // GIB} GiB of a GPU stay free",
    why="cuBLAS, NCCL and the kernels of the first long prompts take memory after the KV cache; the margin is this "
    "project's own, by the advice to take a smaller share when memory runs out. The servers of a pair are published "
    f"with a share of {_HIGHEST_FRACTION} for iterations of 1,160 tokens, so it is not asked of them up to twice that.",
    source=f"{GUIDE}; {DEPLOYMENT}; the plan's own arithmetic",
)
def _little_free(d: Deployment) -> Iterator[Violation]:
    budget = d.budget()
    if budget is None or budget.kv_cache <= 0 or budget.free >= _LEAST_FREE:
        return
    tokens, fraction = d.get("max_num_tokens") or DEFAULT_MAX_NUM_TOKENS, d.get(_FRACTION) or 0
    if d.is_disaggregated and tokens < _SHORT_ITERATION and fraction <= _HIGHEST_FRACTION:
        return
    left = budget.free + budget.kv_cache
    message = (
        f"{budget.free / GIB:.1f} GiB of {budget.memory / GIB:.0f} stay free beside weights, workspace and KV cache"
    )
    share = math.floor((left - _LEAST_FREE) / left * 100) / 100
    fix = f"set {_FRACTION}: {share}" if share > 0 else "use more GPUs"
    yield Violation(_FRACTION, message, fix)


@RULES.error(
    "K011",
    title="dtype at the top level is a type of 16 or 32 bits",
    why="It is the type of the activations. The KV cache's type is kv_cache_config.dtype, one indent further right.",
    source=f"{LLM_ARGS}, BaseLlmArgs",
)
def _top_level_dtype(d: Deployment) -> Iterator[Violation]:
    dtype = d.get("dtype")
    if dtype not in (None, "auto", "bfloat16", "float16", "float32"):
        fix = f"if the KV cache is meant, write it under kv_cache_config: dtype: {dtype}; else remove it"
        yield Violation("dtype", f"dtype {dtype} is not a type of the model's activations", fix)
