"""Rules A: prompts, chunked prefill and attention data parallelism."""

from __future__ import annotations

from collections.abc import Iterator

from deepseek_triton_build.arithmetic.gpu_memory import divides_attention
from deepseek_triton_build.data.planned_settings import GUIDE, LLM_ARGS, PY_EXECUTOR_CREATOR
from deepseek_triton_build.rules.rule import Deployment, RuleTable, Violation

RULES = RuleTable()
LOW_CONCURRENCY = 128
"""Concurrent requests up to which tensor-parallel attention with CUDA graphs is faster than attention DP
(TensorRT-LLM 0.19, examples/deepseek_v3/README.md)."""


@RULES.error(
    "A001",
    title="With chunked prefill, max_num_tokens is a multiple of the KV block size",
    why="A chunk has to end where a block ends. On Hopper a block has 64 tokens, because FlashMLA sets that size.",
    source=f"{GUIDE}, Chunked Prefill; {PY_EXECUTOR_CREATOR}",
)
def _chunk_size(d: Deployment) -> Iterator[Violation]:
    tokens, block = d.get("max_num_tokens"), d.tokens_per_block
    if d.get("enable_chunked_prefill") and tokens and block > 0 and tokens % block:
        whole = max(1, tokens // block) * block
        message = f"max_num_tokens {tokens:,} is not a multiple of tokens_per_block {block}"
        yield Violation("max_num_tokens", message, f"use {whole}")


@RULES.error(
    "A002",
    title="Without chunked prefill, prompts fit max_num_tokens",
    why="A prompt is then processed in one iteration or not at all: a longer one is refused when it arrives.",
    source="NVIDIA/TensorRT-LLM#9277; TensorRT-LLM blog: How to get best performance on DeepSeek-R1",
)
def _longest_input(d: Deployment) -> Iterator[Violation]:
    tokens = d.get("max_num_tokens")
    if not d.takes_over and _is_refused(d, d.isl):
        message = f"prompts of {d.isl:,} tokens don't fit max_num_tokens {tokens:,}, and chunked prefill is off"
        fix = f"raise max_num_tokens to {d.isl} or more, or set enable_chunked_prefill: true"
        yield Violation("max_num_tokens", message, fix)


def _is_refused(d: Deployment, prompt: int | None) -> bool:
    """Tell whether a prompt of that length is known to be too long for one iteration, and can't go in chunks."""
    tokens = d.get("max_num_tokens")
    return bool(prompt is not None and tokens and not d.get("enable_chunked_prefill") and tokens < prompt)


@RULES.note(
    "A003",
    title="Without chunked prefill, max_num_tokens is at least max_seq_len",
    why="Otherwise max_seq_len promises longer prompts than the engine accepts.",
    source="NVIDIA/TensorRT-LLM#9277; TensorRT-LLM blog: How to get best performance on DeepSeek-R1",
)
def _longest_possible_input(d: Deployment) -> Iterator[Violation]:
    tokens, longest = d.get("max_num_tokens"), d.get("max_seq_len")
    if d.isl is not None or d.assumed_isl is not None or d.is_disaggregated:  # A009; a generation server has no prompts
        return
    if tokens and longest and not d.get("enable_chunked_prefill") and tokens < longest:
        message = f"prompts of more than max_num_tokens {tokens:,} are refused, though max_seq_len is {longest:,}"
        fix = "if prompts may be longer, raise max_num_tokens or set enable_chunked_prefill: true"
        yield Violation("max_num_tokens", message, fix)


@RULES.error(
    "A004",
    title="Chunked prefill is on only where MLA (DeepSeek's attention) supports it",
    why="On other GPUs and releases the engine turns chunked prefill off with one line in its log, and long prompts "
    "are refused.",
    source=f"{PY_EXECUTOR_CREATOR}; NVIDIA/TensorRT-LLM PR 4651 (SM100), PR 6655 (SM90)",
    releases="Hopper: before 1.1",
)
def _unsupported_chunks(d: Deployment) -> Iterator[Violation]:
    if not d.get("enable_chunked_prefill") or d.gpu is None or d.is_sparse:  # V3.2: V004
        return
    release = "" if d.release is None else f" in TensorRT-LLM {d.release.version}"
    if d.gpu.sm < 90 or d.supports(f"chunked_prefill_mla_{d.gpu.architecture}") is False:
        message = f"chunked prefill of MLA does not exist for {d.gpu.architecture.title()}{release}"
        fix = "turn it off and set max_num_tokens to the longest prompt, or use TensorRT-LLM 1.1 or newer"
        yield Violation("enable_chunked_prefill", message, fix)


def _chunks_with_attention_dp(d: Deployment) -> Iterator[Violation]:
    if d.get("enable_chunked_prefill") and d.layout.attention_dp and d.is_before("1.1.0"):
        message = (
            "with attention DP and chunked prefill, a prompt longer than max_num_tokens may hang the engine for good"
        )
        fix = "turn off one of the two, or use TensorRT-LLM 1.1 or newer"
        yield Violation("enable_chunked_prefill", message, fix)


@RULES.error(
    "A005",
    title="On Hopper, attention DP and chunked prefill are not both on in releases that hang with them",
    why="After the first long prompt no request is answered any more, and there is no error; only a restart helps.",
    source="NVIDIA/TensorRT-LLM#5267 (0.21.0rc1, H20)",
    releases="before 1.1",
)
def _hang_on_hopper(d: Deployment) -> Iterator[Violation]:
    if d.gpu_architecture == "hopper":
        yield from _chunks_with_attention_dp(d)


@RULES.warning(
    "A006",
    title="Attention DP and chunked prefill are not on together in old releases",
    why="The hang was seen on Hopper; whether it occurs on other GPUs in these releases is not established.",
    source="NVIDIA/TensorRT-LLM#5267",
    releases="before 1.1",
)
def _hang_elsewhere(d: Deployment) -> Iterator[Violation]:
    if d.gpu_architecture != "hopper":
        yield from _chunks_with_attention_dp(d)


@RULES.note(
    "A007",
    title="At low concurrency, attention is tensor-parallel and CUDA graphs are on",
    why=f"Up to {LOW_CONCURRENCY} concurrent requests, these settings are faster.",
    source=f"{GUIDE} (0.19), Create Configuration Files",
)
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


@RULES.warning(
    "A008",
    title="Where attention DP has settings, attention DP is on",
    why="The scheduler balances ranks only when each of them has requests of its own.",
    source=f"{LLM_ARGS}, AttentionDpConfig",
    releases="1.0 and newer",
)
def _unused_balance(d: Deployment) -> Iterator[Violation]:
    given = [key for key, value in d.settings.items() if key.startswith("attention_dp_config") and value is not None]
    if given and not d.get("enable_attention_dp"):
        message = "attention_dp_config has no effect without attention DP"
        yield Violation(given[0], message, "set enable_attention_dp: true, or remove attention_dp_config")


@RULES.warning(
    "A009",
    title="A plan whose iterations limit its prompts is made for a workload",
    why="Without chunked prefill a longer prompt than max_num_tokens is refused when it arrives, and the sizes of a "
    "published benchmark are for its own lengths.",
    source="NVIDIA/TensorRT-LLM#9277; TensorRT-LLM blog: How to get best performance on DeepSeek-R1",
)
def _assumed_lengths(d: Deployment) -> Iterator[Violation]:
    tokens, longest = d.get("max_num_tokens"), d.get("max_seq_len")
    if d.assumed_isl is None or not tokens or not longest or d.get("enable_chunked_prefill") or tokens >= longest:
        return
    message = (
        f"no workload was given, so this is for prompts of {d.assumed_isl:,} tokens; those of more than {tokens:,} are "
        f"refused, and prompt and answer together may have {longest:,}"
    )
    yield Violation("max_num_tokens", message, "plan for your own lengths with --isl and --osl")


@RULES.note(
    "A010",
    title="A generation server can compute a prompt by itself",
    why="The gateway has it compute prompts when no context server is up, when a KV cache is lost before the second "
    "token, for requests that can't be shared, and for those within --local-prefill.",
    source="this project's gateway: docs/gateway-fleet.md, Context and generation servers",
)
def _own_prompts(d: Deployment) -> Iterator[Violation]:
    if d.takes_over and _is_refused(d, d.isl):
        message = f"max_num_tokens {d.get('max_num_tokens'):,} is less than a prompt of {d.isl:,} tokens, so that this "
        message += "generation server refuses those that it has to compute itself"
        fix = f"for that, raise max_num_tokens to {d.isl}, or set enable_chunked_prefill: true"
        yield Violation("max_num_tokens", message, fix)
