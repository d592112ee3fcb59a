"""Rules L: limits that bound each other."""

from __future__ import annotations

from collections.abc import Iterator

from deepseek_triton_build.arithmetic.gpu_memory import cuda_graph_batch_sizes
from deepseek_triton_build.arithmetic.warmup_shapes import DEFAULT_GRAPH_MAX_BATCH_SIZE
from deepseek_triton_build.data.planned_settings import DEPLOYMENT, GUIDE, LLM_ARGS
from deepseek_triton_build.rules.rule import Deployment, RuleTable, Violation

RULES = RuleTable()
OOM_NUM_TOKENS = 3072
"""The max_num_tokens that the DeepSeek-V3 guide advises when memory runs out."""
_OOM_SEEN = 8192
"""The max_num_tokens of the same guide's serving command, with which memory was seen to run out."""
_SIZES = "cuda_graph_config.batch_sizes"
_LARGEST = "cuda_graph_config.max_batch_size"


@RULES.note(
    "L001",
    title="CUDA graphs cover batches up to max_batch_size",
    why="Batches up to the largest captured size replay a graph; larger ones launch each kernel by itself.",
    source=f"{LLM_ARGS}, CudaGraphConfig; {DEPLOYMENT}, cuda_graph_config",
)
def _graphs(d: Deployment) -> Iterator[Violation]:
    batch = d.get("max_batch_size")
    if not d.has_cuda_graphs or not batch:
        return
    largest = max(d.get(_SIZES) or (d.get(_LARGEST) or DEFAULT_GRAPH_MAX_BATCH_SIZE,))
    if batch > largest:
        message = f"batches of more than {largest} run without a CUDA graph, and max_batch_size is {batch:,}"
        fix = f"add {batch} to {_SIZES}" if d.get(_SIZES) else f"raise {_LARGEST} to {batch}"
        yield Violation(_LARGEST, message, f"{fix}; a graph takes up to 200 MB")


@RULES.error(
    "L002",
    title="CUDA graphs have one list of sizes",
    why="The engine does not load with both keys, unless the list is the same as the one that the engine makes from "
    "max_batch_size.",
    source=f"{LLM_ARGS}, validate_cuda_graph_config",
    releases="to 1.2",
)
def _two_graph_keys(d: Deployment) -> Iterator[Violation]:
    sizes, largest = d.get(_SIZES), d.get(_LARGEST)
    if not sizes or not largest or largest < 1:
        return
    made = cuda_graph_batch_sizes(largest) if d.get("cuda_graph_config.enable_padding") else _unpadded_sizes(largest)
    if tuple(sorted(sizes)) != made:
        message = f"{_SIZES} and {_LARGEST} are both given, and the list is not the one that {largest} stands for"
        yield Violation(_SIZES, message, "leave one of them out")


def _unpadded_sizes(largest: int) -> tuple[int, ...]:
    """Return the sizes that TensorRT-LLM captures without padding: 1 to 31, then powers of two (llm_args.py)."""
    powers = (2**exponent for exponent in range(5, largest.bit_length()))
    return tuple(sorted({size for size in (*range(1, 32), *powers) if size <= largest} | {largest}))


@RULES.error(
    "L003",
    title="max_seq_len is within the model's context",
    why="The model was not trained for texts longer than max_position_embeddings.",
    source="config.json of deepseek-ai/DeepSeek-V3 (max_position_embeddings 163840)",
)
def _context(d: Deployment) -> Iterator[Violation]:
    longest = d.get("max_seq_len")
    most = d.architecture.max_position_embeddings if d.architecture is not None else None
    if longest and most and longest > most:
        message = f"max_seq_len {longest:,} is more than the model's maximum of {most:,}"
        yield Violation("max_seq_len", message, f"use {most} or less")


@RULES.warning(
    "L004",
    title="max_num_tokens covers a full batch's decode step",
    why="Each running request takes one token of an iteration, and one for each draft token. Requests that do not "
    "fit wait for the next iteration.",
    source="TensorRT-LLM blog: How to get best performance on DeepSeek-R1, max_batch_size and max_num_tokens",
)
def _full_batch(d: Deployment) -> Iterator[Violation]:
    tokens, batch = d.get("max_num_tokens"), d.get("max_batch_size")
    each = 1 + d.num_draft_tokens
    if tokens and batch and tokens < batch * each:
        message = f"a full batch decodes {batch:,} x {each} tokens an iteration, more than max_num_tokens {tokens:,}"
        yield Violation("max_num_tokens", message, f"raise it to {batch * each} or lower max_batch_size")


@RULES.error(
    "L005",
    title="stream_interval is at least 1",
    why="It is the number of tokens from one chunk of a stream to the next.",
    source=f"{LLM_ARGS}, TorchLlmArgs",
)
def _stream_interval(d: Deployment) -> Iterator[Violation]:
    interval = d.get("stream_interval")
    if interval is not None and interval < 1:
        message = f"stream_interval {interval}: expected a number of tokens from 1"
        yield Violation("stream_interval", message, "use 1 (every token), or for example 10")


@RULES.error(
    "L006",
    title="Prompts fit max_seq_len with room for an answer",
    why="max_seq_len counts prompt and answer together.",
    source=f"{DEPLOYMENT}, max_seq_len",
)
def _input_fits(d: Deployment) -> Iterator[Violation]:
    longest = d.get("max_seq_len")
    if d.isl is not None and longest and d.isl >= longest:
        message = f"prompts of {d.isl:,} tokens leave no room for an answer in max_seq_len {longest:,}"
        yield Violation("max_seq_len", message, f"raise it above {d.isl}")


@RULES.note(
    "L007",
    title="A chunk of a prompt is smaller than the whole context",
    why="A server with such a chunk was seen to stop answering under load. Also, activations take memory for the "
    "whole chunk.",
    source="NVIDIA/TensorRT-LLM#5391 (open, 0.20.0)",
)
def _whole_context_in_one(d: Deployment) -> Iterator[Violation]:
    tokens, longest = d.get("max_num_tokens"), d.get("max_seq_len")
    if d.get("enable_chunked_prefill") and tokens and longest and tokens >= longest > 8192:
        message = f"with chunked prefill max_num_tokens is the size of a chunk, but {tokens:,} covers max_seq_len"
        yield Violation("max_num_tokens", message, "use a smaller one, for example 8192")


@RULES.note(
    "L008",
    title="On Blackwell, throughput settings leave memory for an iteration",
    why=f"With attention DP, the experts process the tokens of every rank. The guide serves with {_OOM_SEEN:,} tokens "
    "an iteration, and advises 3072 when memory runs out.",
    source=f"{GUIDE}, Serving; NVIDIA/TensorRT-LLM PR 7358",
)
def _throughput_memory(d: Deployment) -> Iterator[Violation]:
    tokens, batch = d.get("max_num_tokens"), d.get("max_batch_size")
    if d.gpu_architecture != "blackwell" or not d.layout.attention_dp or not tokens or not batch:
        return
    if batch >= 1024 and tokens >= _OOM_SEEN:
        message = f"max_num_tokens {tokens:,} with attention DP and batches of {batch:,} was seen to run out of memory"
        yield Violation("max_num_tokens", message, f"if memory runs out, use {OOM_NUM_TOKENS}")


@RULES.warning(
    "L009",
    title="In old releases, FP8 on H200 leaves memory for an iteration",
    why="R1 on 8 x H200 ran out of memory with 5,127 tokens an iteration and 0.7 of free memory for the KV cache.",
    source="NVIDIA/TensorRT-LLM#3486 (2025-04)",
    releases="before 1.0",
)
def _h200_memory(d: Deployment) -> Iterator[Violation]:
    tokens, fraction = d.get("max_num_tokens"), d.get("kv_cache_config.free_gpu_memory_fraction")
    if d.gpu is None or d.gpu.name != "h200" or d.precision != "fp8" or not d.is_before("1.0.0"):
        return
    if tokens and tokens >= 5000 and fraction is not None and fraction >= 0.7:
        message = (
            f"max_num_tokens {tokens:,} with a KV cache of {fraction} of the free memory was seen to run out of it"
        )
        yield Violation("max_num_tokens", message, "lower one of them, or use TensorRT-LLM 1.0 or newer")


@RULES.warning(
    "L010",
    title="The KV cache holds the planned concurrent requests",
    why="The scheduler starts a request when prompt and answer fit the cache, so the other requests wait.",
    source="TensorRT-LLM llm_args.py, capacity_scheduler_policy GUARANTEED_NO_EVICT; the plan's own arithmetic",
)
def _held_requests(d: Deployment) -> Iterator[Violation]:
    if d.concurrency is None or d.held_requests is None or d.held_requests >= d.concurrency:
        return
    levers = ["more GPUs", "shorter requests"]
    fp8_works = d.supports(f"fp8_kv_mla_{d.gpu_architecture}") and d.precision != "w4a8"
    if not d.has_fp8_kv and fp8_works and not (d.is_sparse and d.gpu_architecture != "blackwell"):
        levers.insert(0, "--kv-cache-dtype fp8")
    if d.num_draft_tokens:
        levers.append("no MTP")
    message = f"the KV cache holds {d.held_requests:,} of {d.concurrency:,} concurrent requests; the others wait"
    yield Violation("max_batch_size", message, f"to hold more, use {', '.join(levers)}")


@RULES.warning(
    "L011",
    title="default_max_tokens leaves room for a prompt",
    why="The backend cuts an answer to the room that its prompt leaves in max_seq_len, so a request that says nothing "
    "may take the whole context, and the KV cache that goes with it.",
    source="this project's backend: docs/configuration.md",
)
def _default_answer(d: Deployment) -> Iterator[Violation]:
    answer, longest = d.triton.get("default_max_tokens"), d.get("max_seq_len")
    if isinstance(answer, int) and longest and answer >= longest:
        message = f"default_max_tokens {answer:,} leaves no room for a prompt in max_seq_len {longest:,}"
        yield Violation("triton_config.default_max_tokens", message, f"use less than {longest}")
