"""K: the KV cache."""

from __future__ import annotations

from collections.abc import Iterator

from deepseek_triton_build.data.sources import DEPLOYMENT, GUIDE, LLM_ARGS, PY_EXECUTOR_CREATOR
from deepseek_triton_build.rules.rule import FLASH_MLA_TOKENS_PER_BLOCK, Deployment, Rule, Violation

_DTYPE = "kv_cache_config.dtype"
_FRACTION = "kv_cache_config.free_gpu_memory_fraction"
_REUSE_SMS = (90, 100, 103, 120)
_HIGHEST_FRACTION = 0.95
_HIGHEST_DEEPGEMM_FRACTION = 0.8
_HIGHEST_WITH_DRAFTS = 0.5
_LARGE_BATCH = 128


def _fp8(d: Deployment) -> Iterator[Violation]:
    if d.gpu is None or d.is_sparse or not d.has_fp8_kv:  # V3.2: V001
        return
    if d.supports(f"fp8_kv_mla_{d.gpu.architecture}") is False or d.gpu.sm < 90:
        release = "" if d.release is None else f" in TensorRT-LLM {d.release.version}"
        message = f"an FP8 KV cache for MLA is not supported on {d.gpu.architecture.title()}{release}"
        yield Violation(key=_DTYPE, message=message, fix=f"set {_DTYPE}: auto, with weights that leave it in 16 bits")


def _fp8_with_w4a8(d: Deployment) -> Iterator[Violation]:
    if d.precision == "w4a8" and d.has_fp8_kv:
        message = (
            "an FP8 KV cache with W4AFP8 weights is known to crash (illegal memory access in the prompt's attention)"
        )
        yield Violation(key=_DTYPE, message=message, fix=f"set {_DTYPE}: auto")


def _dtype(d: Deployment) -> Iterator[Violation]:
    dtype = d.get(_DTYPE)
    if dtype not in (None, "auto", "fp8"):
        message = f"{_DTYPE} {dtype} changes nothing: only auto and fp8 are acted upon"
        yield Violation(key=_DTYPE, message=message, fix="use auto (the checkpoint's own) or fp8")


def _reuse(d: Deployment) -> Iterator[Violation]:
    if d.gpu is not None and d.get("kv_cache_config.enable_block_reuse") and d.gpu.sm not in _REUSE_SMS:
        message = f"KV blocks of MLA can't be reused on {d.gpu.title} (SM{d.gpu.sm})"
        fix = "set kv_cache_config.enable_block_reuse: false"
        yield Violation(key="kv_cache_config.enable_block_reuse", message=message, fix=fix)


def _fraction(d: Deployment) -> Iterator[Violation]:
    fraction = d.get(_FRACTION)
    if fraction is not None and not 0 < fraction <= 1:
        message = f"{_FRACTION} {fraction} is not a share between 0 and 1"
        yield Violation(key=_FRACTION, message=message, fix="use 0.8 to 0.9, less where it runs out of memory")


def _high_fraction(d: Deployment) -> Iterator[Violation]:
    fraction = d.get(_FRACTION)
    if fraction is not None and _HIGHEST_FRACTION < fraction <= 1:
        message = f"{_FRACTION} {fraction} leaves almost nothing for what is allocated after the KV cache"
        yield Violation(key=_FRACTION, message=message, fix="use 0.9 or less")


def _deepgemm_fraction(d: Deployment) -> Iterator[Violation]:
    fraction = d.get(_FRACTION)
    if fraction is None or d.get("moe_config.backend") != "DEEPGEMM" or fraction > 1:
        return
    if d.num_draft_tokens and (d.get("max_batch_size") or 0) >= _LARGE_BATCH and fraction > _HIGHEST_WITH_DRAFTS:
        message = f"{_FRACTION} {fraction} with DEEPGEMM, MTP and large batches was seen to run out of memory"
        yield Violation(key=_FRACTION, message=message, fix=f"if it does, use {_HIGHEST_WITH_DRAFTS}")
    elif fraction > _HIGHEST_DEEPGEMM_FRACTION:
        message = f"{_FRACTION} {fraction} with DEEPGEMM: its workspace comes on top of the KV cache"
        yield Violation(key=_FRACTION, message=message, fix=f"use {_HIGHEST_DEEPGEMM_FRACTION} or less")


def _block_size(d: Deployment) -> Iterator[Violation]:
    key = "kv_cache_config.tokens_per_block"
    given = d.settings.get(key)
    if given is not None and d.gpu_architecture == "hopper" and given != FLASH_MLA_TOKENS_PER_BLOCK:
        message = f"{key} {given} becomes {FLASH_MLA_TOKENS_PER_BLOCK}: FlashMLA sets it on Hopper"
        yield Violation(key=key, message=message, fix="leave it out")


def _two_limits(d: Deployment) -> Iterator[Violation]:
    key = "kv_cache_config.max_tokens"
    if d.settings.get(key) is not None and d.settings.get(_FRACTION) is not None:
        message = f"{key} and free_gpu_memory_fraction are both set: the smaller cache is taken"
        yield Violation(key=key, message=message, fix="leave one of them out")


RULES = (
    Rule(
        code="K001",
        severity="error",
        title="An FP8 KV cache has its kernels",
        why="MLA's FP8 kernels are FlashMLA on Hopper and trtllm-gen on Blackwell; elsewhere there is none.",
        source=f"{GUIDE}, FP8 KV Cache and MLA",
        look=_fp8,
    ),
    Rule(
        code="K002",
        severity="error",
        title="W4AFP8 weights have a 16-bit KV cache",
        why="The context attention of that combination ends with an illegal memory access; no fix is known.",
        source="NVIDIA/TensorRT-LLM#8125 (open)",
        look=_fp8_with_w4a8,
    ),
    Rule(
        code="K003",
        severity="warning",
        title="The KV cache's dtype is auto or fp8",
        why="Any other value is passed over with a line in the log, and the checkpoint's own dtype stays.",
        source=f"{LLM_ARGS}, KvCacheConfig",
        releases="0.21 to 1.2",
        look=_dtype,
    ),
    Rule(
        code="K004",
        severity="error",
        title="Block reuse is on where MLA has it",
        why="Elsewhere the engine turns it off with one line in its log.",
        source=f"{GUIDE}, KV Cache Reuse; {PY_EXECUTOR_CREATOR}",
        look=_reuse,
    ),
    Rule(
        code="K005",
        severity="error",
        title="The KV cache's share of free memory is above 0 and at most 1",
        why="It is a share of what weights, CUDA graphs and one iteration leave free.",
        source=f"{DEPLOYMENT}, kv_cache_free_gpu_memory_fraction",
        look=_fraction,
    ),
    Rule(
        code="K006",
        severity="warning",
        title=f"The KV cache's share of free memory is at most {_HIGHEST_FRACTION}",
        why="Memory use fluctuates; the guides name 0.7 to 0.95 and advise to go down when it runs out.",
        source=f"{GUIDE}; {DEPLOYMENT}; NVIDIA/TensorRT-LLM PR 7358",
        look=_high_fraction,
    ),
    Rule(
        code="K007",
        severity="warning",
        title="With DEEPGEMM the KV cache leaves room for its workspace",
        why="0.8 is what the FP8 examples for Blackwell take; with MTP and large batches even 0.6 was seen to run out.",
        source=f"{GUIDE}, Serving (FP8); NVIDIA/TensorRT-LLM PR 13357, PR 14232",
        look=_deepgemm_fraction,
    ),
    Rule(
        code="K008",
        severity="note",
        title="On Hopper the block size is left to FlashMLA",
        why="What is configured is replaced, with a line in the log.",
        source=PY_EXECUTOR_CREATOR,
        look=_block_size,
    ),
    Rule(
        code="K009",
        severity="note",
        title="The KV cache has one limit",
        why="Of two limits the smaller one holds, and it is easy to look at the other.",
        source="the engine's own warning, as quoted in NVIDIA/TensorRT-LLM#5766",
        look=_two_limits,
    ),
)
