"""Rules L: limits that bound each other."""

from collections.abc import Iterator

from deepseek_triton_build.arithmetic.gpu_memory import cuda_graph_batch_sizes
from deepseek_triton_build.arithmetic.warmup_shapes import DEFAULT_GRAPH_MAX_BATCH_SIZE
from deepseek_triton_build.rules.rule import AnyDeployment, Deployment, RuleTable, Violation

RULES = RuleTable()
OOM_NUM_TOKENS = 3072
"""The max_num_tokens that the DeepSeek-V3 guide advises when memory runs out."""
# The max_num_tokens of the same guide's serving command, with which memory was seen to run out.
_OOM_SEEN = 8192
_SIZES = "cuda_graph_config.batch_sizes"
_LARGEST = "cuda_graph_config.max_batch_size"


@RULES.note("L001")
def _graphs(d: Deployment) -> Iterator[Violation]:
    batch = d.get("max_batch_size")
    if not d.has_cuda_graphs or not batch:
        return
    largest = max(d.get(_SIZES) or (d.get(_LARGEST) or DEFAULT_GRAPH_MAX_BATCH_SIZE,))
    if batch > largest:
        message = f"batches of more than {largest} run without a CUDA graph, and max_batch_size is {batch:,}"
        fix = f"add {batch} to {_SIZES}" if d.get(_SIZES) else f"raise {_LARGEST} to {batch}"
        yield Violation(_LARGEST, message, f"{fix}; a graph takes up to 200 MB")


@RULES.error("L002")
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


@RULES.error("L003")
def context(d: AnyDeployment) -> Iterator[Violation]:
    most = d.architecture.max_position_embeddings if d.architecture is not None else None
    if d.longest and most and d.longest > most:
        message = f"{d.longest_key} {d.longest:,} is more than the model's maximum of {most:,}"
        yield Violation(d.longest_key, message, f"use {most} or less")


@RULES.warning("L004")
def _full_batch(d: Deployment) -> Iterator[Violation]:
    tokens, batch = d.get("max_num_tokens"), d.get("max_batch_size")
    each = 1 + d.num_draft_tokens
    if tokens and batch and tokens < batch * each:
        message = f"a full batch decodes {batch:,} x {each} tokens an iteration, more than max_num_tokens {tokens:,}"
        block = max(1, d.tokens_per_block)
        least = -(-batch * each // block) * block
        yield Violation("max_num_tokens", message, f"raise it to {least} or lower max_batch_size")


@RULES.error("L006")
def input_fits(d: AnyDeployment) -> Iterator[Violation]:
    if d.isl is not None and d.longest and d.isl >= d.longest:
        message = f"prompts of {d.isl:,} tokens leave no room for an answer in {d.longest_key} {d.longest:,}"
        yield Violation(d.longest_key, message, f"raise it above {d.isl}")


@RULES.note("L007")
def _whole_context_in_one(d: Deployment) -> Iterator[Violation]:
    tokens, longest = d.get("max_num_tokens"), d.get("max_seq_len")
    if d.get("enable_chunked_prefill") and tokens and longest and tokens >= longest > 8192:
        message = f"with chunked prefill max_num_tokens is the size of a chunk, but {tokens:,} covers max_seq_len"
        yield Violation("max_num_tokens", message, "use a smaller one, for example 8192")


@RULES.note("L008")
def _throughput_memory(d: Deployment) -> Iterator[Violation]:
    tokens, batch = d.get("max_num_tokens") or 0, d.get("max_batch_size") or 0
    if d.gpu_architecture == "blackwell" and d.layout.attention_dp and batch >= 1024 and tokens >= _OOM_SEEN:
        message = f"max_num_tokens {tokens:,} with attention DP and batches of {batch:,} was seen to run out of memory"
        fits = d.get("enable_chunked_prefill") or (d.isl or d.assumed_isl or 0) <= OOM_NUM_TOKENS  # else A002
        less = f"use {OOM_NUM_TOKENS}" if fits else "lower kv_cache_config.free_gpu_memory_fraction"
        yield Violation("max_num_tokens", message, f"if memory runs out, {less}")


@RULES.warning("L010")
def _held_requests(d: Deployment) -> Iterator[Violation]:
    if d.concurrency is None or d.held_requests is None or d.held_requests >= d.concurrency:
        return
    levers = ["more GPUs", "shorter requests"]
    # Advice that another rule would refuse (K001, K002, V001) is none.
    fp8_works = d.supports(f"fp8_kv_mla_{d.gpu_architecture}") and d.precision != "w4a8"
    if not d.has_fp8_kv and fp8_works and not (d.attention == "dsa" and d.gpu_architecture != "blackwell"):
        levers.insert(0, "--kv-cache-dtype fp8")
    if d.num_draft_tokens:
        levers.append("no MTP")
    message = f"the KV cache holds {d.held_requests:,} of {d.concurrency:,} concurrent requests; the others wait"
    yield Violation("max_batch_size", message, f"to hold more, use {', '.join(levers)}")


@RULES.warning("L011")
def default_answer(d: AnyDeployment) -> Iterator[Violation]:
    answer = d.triton.get("default_max_tokens")
    if isinstance(answer, int) and d.longest and answer >= d.longest:
        message = f"default_max_tokens {answer:,} leaves no room for a prompt in {d.longest_key} {d.longest:,}"
        yield Violation("triton_config.default_max_tokens", message, f"use less than {d.longest}")
