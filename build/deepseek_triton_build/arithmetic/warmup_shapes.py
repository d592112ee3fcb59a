"""The requests that warm a server up, as shapes (concurrent requests, prompt tokens of each), smallest first.

An engine compiles kernels, tunes them and allocates memory when a batch or a prompt of a new size class first comes. So
the shapes are a short series over both sizes, up to the server's limits. This module only computes them; the backend
(`triton_config.warmup`) and `deepseek-triton warm server` send the requests.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deepseek_triton_build.arithmetic.gpu_memory import cuda_graph_batch_sizes
from deepseek_triton_build.data.setting_types import MOST_WARMUP_TOKENS
from deepseek_triton_build.data.spelling import MIXED, canonical, flattened

SHORT_PROMPT = 64
"""Tokens of the shortest prompts. Prompts of a large batch have fewer, so that the batch fits one iteration."""
RATIO = 4
"""Ratio of neighbours in a series. Autotuner and graphs go by powers of two, and sizes between mostly use the same
kernels."""
MAX_REQUESTS = 2048
"""Most concurrent requests of a shape, over all ranks. A larger batch hardly forms: the first answers end while the
last requests are still being submitted (thousands a second), and submitting would take most of the warm-up's time."""
MAX_GRAPH_SIZES = 48
"""Most batch sizes of CUDA graphs that are tried. TensorRT-LLM's own lists have 19 to 34 sizes, so all are tried."""

DEFAULT_MAX_BATCH_SIZE = 2048
"""The default of trtllm-serve and BuildConfig (TensorRT-LLM 1.2, docs of trtllm-serve)."""
DEFAULT_MAX_NUM_TOKENS = 8192
"""The default of TorchLlmArgs.max_num_tokens (the record of 1.2.1)."""
DEFAULT_GRAPH_MAX_BATCH_SIZE = 128
"""The default of CudaGraphConfig without sizes (TensorRT-LLM 1.0 to 1.2.1, llm_args.py)."""


@dataclass(frozen=True, kw_only=True)
class WarmupLimits:
    """The limits of a server that its warm-up keeps to, each of them of one rank."""

    max_batch_size: int
    max_num_tokens: int
    max_input_len: int
    """The longest prompt. It exceeds `max_num_tokens` only with chunked prefill."""
    graph_batch_sizes: tuple[int, ...] | None = None
    """Batch sizes of the CUDA graphs. None: those that TensorRT-LLM captures for `max_batch_size`."""
    attention_dp_size: int = 1
    """Number of ranks with batches of their own. A shape has that many times the requests, as the engine distributes
    them evenly. The first shape is a single request all the same."""


def warmup_shapes(limits: WarmupLimits) -> tuple[tuple[int, int], ...]:
    """Return the shapes (concurrent requests, prompt tokens of each), smallest first.

    Requests times prompt tokens stay within max_num_tokens, so that a shape is one iteration. The only exception, where
    chunked prefill takes longer prompts, is the last shape: one prompt of two chunks. Over all ranks a shape has at
    most MAX_REQUESTS requests, or one for each rank where that is more.

    :raises ValueError: when a limit is below 1.
    """
    max_num_tokens, max_input_len, ranks = limits.max_num_tokens, limits.max_input_len, limits.attention_dp_size
    if min(limits.max_batch_size, max_num_tokens, max_input_len, ranks) < 1:
        raise ValueError(f"limits of a warm-up: expected numbers from 1, got {limits}")
    most = min(limits.max_batch_size, max_num_tokens, max(1, MAX_REQUESTS // ranks))
    graph_sizes = cuda_graph_batch_sizes(most) if limits.graph_batch_sizes is None else limits.graph_batch_sizes
    batches = _series(1, most)
    lengths = _series(min(SHORT_PROMPT, max_input_len, max_num_tokens), min(max_input_len, max_num_tokens))
    shapes = {(batch, length) for batch in batches for length in lengths if batch * length <= max_num_tokens}
    # Decoding depends on the batch size alone, so each size is tried once, with a prompt as short as possible.
    sizes = sorted({size for size in graph_sizes if size >= 1})
    # The largest batch, up to `most`, that runs in each graph; of very many graphs only some, evenly spread.
    reached = [min(size, most) for size, before in zip(sizes, [0, *sizes], strict=False) if before < most]
    if len(reached) > MAX_GRAPH_SIZES:
        last = len(reached) - 1
        reached = [reached[index * last // (MAX_GRAPH_SIZES - 1)] for index in range(MAX_GRAPH_SIZES)]
    for batch in {*batches, *reached}:
        shapes.add((batch, min(lengths[0], max_num_tokens // batch)))
    if max_input_len > max_num_tokens:
        shapes.add((1, min(2 * max_num_tokens, max_input_len)))
    # The backend refuses a shape of more tokens, which all ranks together can reach with very long prompts.
    whole = {(min(batch * ranks, max(1, MOST_WARMUP_TOKENS // length)), length) for batch, length in shapes}
    whole.add((1, lengths[0]))
    return tuple(sorted(whole, key=lambda shape: (shape[0] * shape[1], shape)))


def _series(low: int, high: int) -> list[int]:
    """Return `low`, then RATIO times the one before, and `high`; a size above half of `high` is left out."""
    series = []
    while low * 2 <= high:
        series.append(low)
        low *= RATIO
    return [*series, high]


def shapes_for_llm_args(llm_args: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
    """Return the shapes for a server with these LLM arguments: model.yaml without triton_config, nested or dotted.

    Keys of every release are understood. A missing or unusable value counts as TensorRT-LLM's default.
    """
    return warmup_shapes(warmup_limits(llm_args))


def warmup_limits(llm_args: Mapping[str, Any]) -> WarmupLimits:
    """Return the limits that LLM arguments set, in any form that `shapes_for_llm_args` takes."""
    settings = canonical(flattened(llm_args), MIXED)
    max_num_tokens = _count(settings, "max_num_tokens") or DEFAULT_MAX_NUM_TOKENS
    max_seq_len = _count(settings, "max_seq_len")
    # Without max_seq_len the checkpoint's own counts, 163,840 for DeepSeek: more than any prompt here.
    longest = [max(1, max_seq_len - 1)] if max_seq_len else []  # room for one token of the answer
    if not settings.get("enable_chunked_prefill"):
        longest.append(max_num_tokens)
    has_dp = settings.get("enable_attention_dp") is True
    return WarmupLimits(
        max_batch_size=_count(settings, "max_batch_size") or DEFAULT_MAX_BATCH_SIZE,
        max_num_tokens=max_num_tokens,
        max_input_len=min(longest, default=2 * max_num_tokens),
        graph_batch_sizes=_graph_sizes(settings),
        attention_dp_size=(_count(settings, "tensor_parallel_size") or 1) if has_dp else 1,
    )


def _graph_sizes(settings: Mapping[str, Any]) -> tuple[int, ...]:
    if settings.get("cuda_graph_config", {}) is None:
        return ()
    given = settings.get("cuda_graph_config.batch_sizes")
    if isinstance(given, (list, tuple)) and (sizes := tuple(size for size in given if _is_count(size))):
        return sizes
    return cuda_graph_batch_sizes(_count(settings, "cuda_graph_config.max_batch_size") or DEFAULT_GRAPH_MAX_BATCH_SIZE)


def _count(settings: Mapping[str, Any], key: str) -> int | None:
    value = settings.get(key)
    return value if _is_count(value) else None


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
