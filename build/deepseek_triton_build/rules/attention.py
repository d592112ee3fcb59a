"""Rules A: prompts, chunked prefill and attention data parallelism. Rules V: V3.2 and its sparse attention."""

from collections.abc import Iterator

from deepseek_triton_build.arithmetic.gpu_memory import divides_attention
from deepseek_triton_build.rules.kv_cache import sixteen_bits
from deepseek_triton_build.rules.rule import Deployment, RuleTable, Violation

RULES = RuleTable()
LOW_CONCURRENCY = 128
"""Concurrent requests up to which tensor-parallel attention with CUDA graphs is faster than attention DP
(TensorRT-LLM 0.19, examples/deepseek_v3/README.md)."""
_REUSE = "kv_cache_config.enable_block_reuse"
_CHUNKED = "enable_chunked_prefill"
_TOKENS_PER_BLOCK = 64
SAFE_NUM_TOKENS = 8192
"""The largest max_num_tokens that V3.2 has not been seen to crash with (NVIDIA/TensorRT-LLM#9932)."""


@RULES.warning("A001")
def _chunk_size(d: Deployment) -> Iterator[Violation]:
    tokens, block = d.get("max_num_tokens"), d.tokens_per_block
    least = (d.settings.get("max_batch_size") or 0) * (1 + d.num_draft_tokens)
    if d.get("enable_chunked_prefill") and tokens and block > 0 and tokens % block and tokens >= least:  # else L004
        whole = max(1, tokens // block) * block
        whole += 0 if whole >= least else block
        message = f"max_num_tokens {tokens:,} is not a multiple of tokens_per_block {block}"
        yield Violation("max_num_tokens", message, f"use {whole}")


@RULES.error("A002")
def _longest_input(d: Deployment) -> Iterator[Violation]:
    tokens = d.get("max_num_tokens")
    if not d.takes_over and _is_refused(d):
        message = f"prompts of {d.isl:,} tokens don't fit max_num_tokens {tokens:,}, and chunked prefill is off"
        fix = f"raise max_num_tokens to {d.isl} or more, or set enable_chunked_prefill: true"
        yield Violation("max_num_tokens", message, fix)


def _is_refused(d: Deployment) -> bool:
    """Tell whether a prompt of the planned length is known to be too long for one iteration, and can't go in chunks."""
    tokens = d.get("max_num_tokens")
    return bool(d.isl is not None and tokens and not d.get("enable_chunked_prefill") and tokens < d.isl)


@RULES.note("A003")
def _longest_possible_input(d: Deployment) -> Iterator[Violation]:
    tokens, longest = d.get("max_num_tokens"), d.get("max_seq_len")
    if d.isl is not None or d.assumed_isl is not None or d.is_disaggregated:  # A009; a generation server has no prompts
        return
    if tokens and longest and not d.get("enable_chunked_prefill") and tokens < longest:
        message = f"prompts of more than max_num_tokens {tokens:,} are refused, though max_seq_len is {longest:,}"
        fix = "if prompts may be longer, raise max_num_tokens or set enable_chunked_prefill: true"
        yield Violation("max_num_tokens", message, fix)


@RULES.error("A004")
def _unsupported_chunks(d: Deployment) -> Iterator[Violation]:
    if not d.get("enable_chunked_prefill") or d.gpu is None or d.attention in ("dsa", "csa"):  # V3.2: V004
        return
    release = "" if d.release is None else f" in TensorRT-LLM {d.release.version}"
    if d.gpu.sm < 90 or d.supports(f"chunked_prefill_mla_{d.gpu.architecture}") is False:
        message = f"chunked prefill of MLA does not exist for {d.gpu.architecture.title()}{release}"
        fix = "turn it off and set max_num_tokens to the longest prompt, or use TensorRT-LLM 1.1 or newer"
        yield Violation("enable_chunked_prefill", message, fix)


def _chunks_with_attention_dp(d: Deployment) -> Iterator[Violation]:
    if d.get("enable_chunked_prefill") and d.layout.attention_dp and d.is_before("1.1.0"):
        message = "with attention DP and chunked prefill, "
        message += "a prompt longer than max_num_tokens may hang the engine for good"
        fix = "turn off one of the two, or use TensorRT-LLM 1.1 or newer"
        yield Violation("enable_chunked_prefill", message, fix)


@RULES.error("A005")
def _hang_on_hopper(d: Deployment) -> Iterator[Violation]:
    if d.gpu_architecture == "hopper":
        yield from _chunks_with_attention_dp(d)


@RULES.warning("A006")
def _hang_elsewhere(d: Deployment) -> Iterator[Violation]:
    if d.gpu_architecture != "hopper":
        yield from _chunks_with_attention_dp(d)


@RULES.note("A007")
def _low_concurrency(d: Deployment) -> Iterator[Violation]:
    batch, layout = d.get("max_batch_size"), d.layout
    if not batch or batch * layout.attention_dp_size > LOW_CONCURRENCY or d.is_disaggregated:
        return  # both servers of a pair have the same layout, and a context server decodes nothing
    requests = f"at most {batch * layout.attention_dp_size} requests at once"
    # Many requests then wait for room in the KV cache, which attention DP uses best.
    many_wait = (d.concurrency or 0) > LOW_CONCURRENCY
    can_share = d.architecture is None or divides_attention(
        d.architecture, d.precision or "", layout.tensor_parallel_size
    )
    if layout.attention_dp and layout.tensor_parallel_size > 1 and can_share and not many_wait:
        message, fix = (
            f"{requests}: with attention DP one GPU alone computes a request's attention, which is slower",
            "set enable_attention_dp: false",
        )
        yield Violation("enable_attention_dp", message, fix)
    if not d.has_cuda_graphs:
        message = f"{requests}: without CUDA graphs each decode step waits until its kernels are launched"
        yield Violation("cuda_graph_config", message, "remove cuda_graph_config: null")


@RULES.warning("A008")
def _unused_balance(d: Deployment) -> Iterator[Violation]:
    given = [key for key, value in d.settings.items() if key.startswith("attention_dp_config") and value is not None]
    if given and not d.get("enable_attention_dp"):
        message = "attention_dp_config has no effect without attention DP"
        yield Violation(given[0], message, "set enable_attention_dp: true, or remove attention_dp_config")


@RULES.warning("A009")
def _assumed_lengths(d: Deployment) -> Iterator[Violation]:
    tokens, longest = d.get("max_num_tokens"), d.get("max_seq_len")
    if d.assumed_isl is None or not tokens or not longest or d.get("enable_chunked_prefill") or tokens >= longest:
        return
    message = f"no workload was given, so this is for prompts of {d.assumed_isl:,} tokens; "
    message += f"those of more than {tokens:,} are refused, and prompt and answer together may have {longest:,}"
    yield Violation("max_num_tokens", message, "plan for your own lengths with --isl and --osl")


@RULES.note("A010")
def _own_prompts(d: Deployment) -> Iterator[Violation]:
    if d.takes_over and _is_refused(d):
        message = f"max_num_tokens {d.get('max_num_tokens'):,} is less than a prompt of {d.isl:,} tokens, so that this "
        message += "generation server refuses those that it has to compute itself"
        fix = f"for that, raise max_num_tokens to {d.isl}, or set enable_chunked_prefill: true"
        yield Violation("max_num_tokens", message, fix)


@RULES.error("V001")
def _fp8_kv(d: Deployment) -> Iterator[Violation]:
    if d.attention == "dsa" and d.has_fp8_kv and d.gpu is not None and d.gpu.architecture != "blackwell":
        message = f"V3.2 has an FP8 KV cache on Blackwell only, not on {d.gpu.title}"
        yield Violation("kv_cache_config.dtype", message, sixteen_bits(d))


@RULES.error("V002")
def _block_size(d: Deployment) -> Iterator[Violation]:
    key = "kv_cache_config.tokens_per_block"
    if d.attention == "dsa" and d.get(key) != _TOKENS_PER_BLOCK:
        message = f"V3.2 needs KV blocks of {_TOKENS_PER_BLOCK} tokens, not {d.get(key)}"
        yield Violation(key, message, f"set {key}: {_TOKENS_PER_BLOCK}")


@RULES.error("V003")
def _no_reuse(d: Deployment) -> Iterator[Violation]:
    if d.attention == "dsa" and d.get(_REUSE) and d.release is not None and d.supports("v32_block_reuse") is False:
        message = f"with block reuse V3.2 does not load in TensorRT-LLM {d.release.version}"
        yield Violation(_REUSE, message, f"set {_REUSE}: false")


@RULES.error("V004")
def _no_chunks(d: Deployment) -> Iterator[Violation]:
    if (
        d.attention == "dsa"
        and d.get(_CHUNKED)
        and d.release is not None
        and d.supports("v32_chunked_prefill") is False
    ):
        message = f"V3.2 has no chunked prefill in TensorRT-LLM {d.release.version}"
        yield Violation(_CHUNKED, message, f"set {_CHUNKED}: false")


@RULES.warning("V005")
def _young_reuse(d: Deployment) -> Iterator[Violation]:
    if d.attention == "dsa" and d.get(_REUSE) and d.supports("v32_block_reuse") is not False:
        message = "block reuse for V3.2 is new, and the guide still turns it off"
        yield Violation(_REUSE, message, f"compare answers with {_REUSE}: false before relying on it")


@RULES.warning("V006")
def _young_chunks(d: Deployment) -> Iterator[Violation]:
    if d.attention == "dsa" and d.get(_CHUNKED) and d.supports("v32_chunked_prefill") is not False:
        message = "chunked prefill for V3.2 is new, and the guide still turns it off"
        yield Violation(_CHUNKED, message, f"compare answers with {_CHUNKED}: false before relying on it")


@RULES.warning("V007")
def _num_tokens(d: Deployment) -> Iterator[Violation]:
    tokens = d.get("max_num_tokens")
    if d.attention == "dsa" and tokens and tokens > SAFE_NUM_TOKENS:
        message = f"V3.2 was seen to crash above {SAFE_NUM_TOKENS:,} tokens an iteration, "
        message += f"and max_num_tokens is {tokens:,}"
        fix = f"use {SAFE_NUM_TOKENS}, with enable_chunked_prefill: true for longer prompts"
        yield Violation("max_num_tokens", message, fix)


@RULES.error("V008")
def _mtp_layers(d: Deployment) -> Iterator[Violation]:
    if (
        d.attention == "dsa"
        and d.num_draft_tokens > 1
        and d.release is not None
        and d.supports("v32_mtp_above_1") is False
    ):
        key = "speculative_config.num_nextn_predict_layers"
        message = f"V3.2 drafts at most one token in TensorRT-LLM {d.release.version}, not {d.num_draft_tokens}"
        yield Violation(key, message, f"set {key}: 1, or use TensorRT-LLM 1.2.0 or newer")


@RULES.error("V009")
def _sparse_only(d: Deployment) -> Iterator[Violation]:
    section = "sparse_attention_config"
    given = [key for key, value in d.settings.items() if key.startswith(section) and value is not None]
    if given and d.architecture is not None and d.attention == "mla":
        name = d.variant.name if d.variant is not None else d.architecture.name
        yield Violation(given[0], f"{name} has no sparse attention", f"remove {section}")
