"""Rules V: V3.2 and its sparse attention."""

from __future__ import annotations

from collections.abc import Iterator

from deepseek_triton_build.data.planned_settings import GUIDE
from deepseek_triton_build.rules.kv_cache import sixteen_bits
from deepseek_triton_build.rules.rule import Deployment, RuleTable, Violation

RULES = RuleTable()
_REUSE = "kv_cache_config.enable_block_reuse"
_CHUNKED = "enable_chunked_prefill"
_TOKENS_PER_BLOCK = 64
SAFE_NUM_TOKENS = 8192
"""The largest max_num_tokens that V3.2 has not been seen to crash with (NVIDIA/TensorRT-LLM#9932)."""


@RULES.error(
    "V001",
    title="V3.2 has an FP8 KV cache on Blackwell only",
    why="The guide limits it to Blackwell; on Hopper, FlashMLA's sparse MLA kernel has a 16-bit cache.",
    source=f"{GUIDE}, FP8 KV Cache and MLA",
)
def _fp8_kv(d: Deployment) -> Iterator[Violation]:
    if d.is_sparse and d.has_fp8_kv and d.gpu is not None and d.gpu.architecture != "blackwell":
        message = f"V3.2 has an FP8 KV cache on Blackwell only, not on {d.gpu.title}"
        yield Violation("kv_cache_config.dtype", message, sixteen_bits(d))


@RULES.error(
    "V002",
    title="V3.2 has KV blocks of 64 tokens",
    why="The indexer's paged kernel (deep_gemm.fp8_paged_mqa_logits) needs that block size.",
    source=f"{GUIDE}, Quick Start; NVIDIA/TensorRT-LLM PR 9141",
)
def _block_size(d: Deployment) -> Iterator[Violation]:
    key = "kv_cache_config.tokens_per_block"
    if d.is_sparse and d.get(key) != _TOKENS_PER_BLOCK:
        message = f"V3.2 needs KV blocks of {_TOKENS_PER_BLOCK} tokens, not {d.get(key)}"
        yield Violation(key, message, f"set {key}: {_TOKENS_PER_BLOCK}")


@RULES.error(
    "V003",
    title="V3.2 reuses no KV blocks in releases that can't",
    why="An assertion stops the load. Reuse is on by default, so it has to be turned off.",
    source=f"{GUIDE}, Known Issues; NVIDIA/TensorRT-LLM PR 8405",
    releases="before 1.2",
)
def _no_reuse(d: Deployment) -> Iterator[Violation]:
    if d.is_sparse and d.get(_REUSE) and d.release is not None and d.supports("v32_block_reuse") is False:
        message = f"with block reuse V3.2 does not load in TensorRT-LLM {d.release.version}"
        yield Violation(_REUSE, message, f"set {_REUSE}: false")


@RULES.error(
    "V004",
    title="V3.2 has no chunked prefill in releases without it",
    why="Chunked prefill for V3.2 was added shortly before 1.2.",
    source=f"{GUIDE}, Known Issues; NVIDIA/TensorRT-LLM PR 9376",
    releases="before 1.2",
)
def _no_chunks(d: Deployment) -> Iterator[Violation]:
    if d.is_sparse and d.get(_CHUNKED) and d.release is not None and d.supports("v32_chunked_prefill") is False:
        message = f"V3.2 has no chunked prefill in TensorRT-LLM {d.release.version}"
        yield Violation(_CHUNKED, message, f"set {_CHUNKED}: false")


@RULES.warning(
    "V005",
    title="V3.2 reuses KV blocks only if you have compared its answers with and without reuse",
    why="Block reuse for V3.2 was added shortly before 1.2 and is on by default, but the guide's configuration "
    "turns it off.",
    source=f"{GUIDE}, Known Issues; NVIDIA/TensorRT-LLM PR 9383",
    releases="1.2",
)
def _young_reuse(d: Deployment) -> Iterator[Violation]:
    if d.is_sparse and d.get(_REUSE) and d.supports("v32_block_reuse") is not False:
        message = "block reuse for V3.2 is new, and the guide still turns it off"
        yield Violation(_REUSE, message, f"compare answers with {_REUSE}: false before relying on it")


@RULES.warning(
    "V006",
    title="V3.2 uses chunked prefill only if you have compared its answers with and without it",
    why="It came shortly before 1.2, and the guide's configuration turns it off.",
    source=f"{GUIDE}, Known Issues; NVIDIA/TensorRT-LLM PR 9376",
    releases="1.2",
)
def _young_chunks(d: Deployment) -> Iterator[Violation]:
    if d.is_sparse and d.get(_CHUNKED) and d.supports("v32_chunked_prefill") is not False:
        message = "chunked prefill for V3.2 is new, and the guide still turns it off"
        yield Violation(_CHUNKED, message, f"compare answers with {_CHUNKED}: false before relying on it")


@RULES.warning(
    "V007",
    title="V3.2 runs at most 8,192 tokens in an iteration",
    why="A crash with more than 8,192 tokens was reported, and the issue was closed without a known fix.",
    source="NVIDIA/TensorRT-LLM#9932",
)
def _num_tokens(d: Deployment) -> Iterator[Violation]:
    tokens = d.get("max_num_tokens")
    if d.is_sparse and tokens and tokens > SAFE_NUM_TOKENS:
        message = (
            f"V3.2 was seen to crash above {SAFE_NUM_TOKENS:,} tokens an iteration, and max_num_tokens is {tokens:,}"
        )
        fix = f"use {SAFE_NUM_TOKENS}, with enable_chunked_prefill: true for longer prompts"
        yield Violation("max_num_tokens", message, fix)


@RULES.error(
    "V008",
    title="V3.2 has several MTP layers only where the release can do it",
    why="The release notes of 1.2 name it as new.",
    source="TensorRT-LLM release notes 1.2",
    releases="before 1.2",
)
def _mtp_layers(d: Deployment) -> Iterator[Violation]:
    if d.is_sparse and d.num_draft_tokens > 1 and d.release is not None and d.supports("v32_mtp_above_1") is False:
        key = "speculative_config.num_nextn_predict_layers"
        message = f"V3.2 drafts at most one token in TensorRT-LLM {d.release.version}, not {d.num_draft_tokens}"
        yield Violation(key, message, f"set {key}: 1, or use TensorRT-LLM 1.2.0 or newer")


@RULES.error(
    "V009",
    title="Sparse attention is for V3.2",
    why="Only V3.2's checkpoint has the indexer that chooses the tokens; with another model the load fails.",
    source="config.json of deepseek-ai/DeepSeek-V3.2 (index_topk), which deepseek-ai/DeepSeek-V3 lacks",
)
def _sparse_only(d: Deployment) -> Iterator[Violation]:
    section = "sparse_attention_config"
    given = [key for key, value in d.settings.items() if key.startswith(section) and value is not None]
    if given and d.architecture is not None and not d.is_sparse:
        name = d.variant.name if d.variant is not None else d.architecture.name
        yield Violation(given[0], f"{name} has no sparse attention", f"remove {section}")
