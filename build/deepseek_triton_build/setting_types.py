"""What values settings take, beyond the types in the releases' records: bounds, and the backend's own settings."""

from __future__ import annotations

from collections.abc import Mapping

from deepseek_triton_build import type_strings

_RANGES: Mapping[str, str] = {
    "tensor_parallel_size": "int 1..",
    "pipeline_parallel_size": "int 1..",
    "gpus_per_node": "int 1..",
    "moe_expert_parallel_size": "int -1..",
    "moe_tensor_parallel_size": "int -1..",
    "max_batch_size": "int 1..",
    "max_num_tokens": "int 1..",
    "max_seq_len": "int 1..",
    "max_input_len": "int 1..",
    "stream_interval": "int 1..",
    "kv_cache_config.free_gpu_memory_fraction": "float 0..1",
    "kv_cache_config.tokens_per_block": "int 1..",
    "cuda_graph_config.max_batch_size": "int 0..",
    "speculative_config.num_nextn_predict_layers": "int 0..",
}
"""Canonical key -> its type with the bounds, by what it counts. -1 leaves expert parallelism to the engine."""


def bounded_type(canonical_key: str, spelled: str) -> str:
    """The type `spelled` with the bounds of its key, where it has any."""
    bounded = _RANGES.get(canonical_key)
    if bounded is None:
        return spelled
    return f"{bounded} | None" if type_strings.has_none(spelled) else bounded


BACKEND_SETTINGS: Mapping[str, str] = {
    "engine": "Literal[tensorrt_llm, transformers, simulated]",
    "decoupled": "true",
    "max_batch_size": "int 0..0",
    "default_max_tokens": "int 1..2147483647",
    "default_sampling": "dict",
    "unknown_parameters": "Literal[error, warn, ignore]",
    "ignored_parameters": "list[str]",
    "cancellation_check_period_ms": "int 1..60000",
    "stream_mode": "Literal[delta, cumulative]",
    "separate_reasoning": "bool",
    "default_timeout_ms": "int 1..2147483647 | None",
    "max_inflight": "int 1..2147483647 | None",
    "max_inflight_tokens": "int 1..9223372036854775808 | None",
    "hang_s": "int 1..86400",
    "on_fatal": "Literal[exit, unready]",
    "fatal_grace_s": "int 0..600",
    "drain_s": "int 0..86400 | None",
    "metrics_period_s": "float 0.1..3600",
    "engine_options": "dict",
}
"""Key -> type. The backend's own table is in its config.py, which is not imported here; a test holds the two
together."""
