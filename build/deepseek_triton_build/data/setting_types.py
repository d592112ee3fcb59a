"""The values that settings take, beyond the types in the release records: bounds, and the backend's own settings."""

from collections.abc import Mapping
from typing import Any

from deepseek_triton_build.data import type_strings
from deepseek_triton_build.data.own_files import backend_module, contract
from deepseek_triton_build.text import nearest_name, short_repr

# Sampling fields that the backend does itself, on every engine.
DONE_BY_BACKEND = {"stop", "include_stop_str_in_output", "exclude_input_from_output", "n", "add_special_tokens"}
DONE_BY_BACKEND |= {"max_tokens", "truncate_prompt_tokens"}
# Canonical key -> its type with bounds, by what the key counts. -1 leaves expert parallelism to the engine.
_RANGES: Mapping[str, str] = {
    "tensor_parallel_size": "int 1..",
    "pipeline_parallel_size": "int 1..",
    "context_parallel_size": "int 1..",
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
    # Its values are made text (tensorrt_llm/llmapi/llm_args.py of 1.2, coerce_env_overrides_to_str).
    "env_overrides": "dict",
}


def bounded_type(canonical_key: str, spelled: str) -> str:
    """Return the type `spelled` with the bounds of its key, if the key has any."""
    bounded = _RANGES.get(canonical_key)
    if bounded is None:
        return spelled
    return f"{bounded} | None" if type_strings.has_none(spelled) else bounded


BACKEND_SETTINGS: Mapping[str, str] = {
    "engine": "Literal[tensorrt_llm, vllm, reference, simulated]",
    "decoupled": "bool",
    "max_batch_size": "int 0..0",
    "default_max_tokens": "int 1..2147483647",
    "default_sampling": "dict",
    "unknown_parameters": "Literal[error, warn, ignore]",
    "ignored_parameters": "list[str]",
    "cancellation_check_period_ms": "int 1..60000",
    "stream_mode": "Literal[delta, cumulative]",
    "chat_encoding": "Literal[v4-preview, v4-0731, v4.1] | None",
    "separate_reasoning": "bool",
    "stream_interval": "int 1..2147483647 | None",
    "stream_interval_ms": "int 1..60000 | None",
    "default_timeout_ms": "int 1..2147483647 | None",
    "max_inflight": "int 1..2147483647 | None",
    "max_inflight_tokens": "int 1..9223372036854775808 | None",
    "hang_s": "int 1..86400",
    "on_fatal": "Literal[exit, unready]",
    "fatal_grace_s": "int 0..600",
    "drain_s": "int 0..86400 | None",
    "metrics_period_s": "float 0.1..3600",
    "engine_options": "dict",
    "warmup": "dict | None",
}
"""Setting of triton_config -> type. The backend's own table is in its config.py, which is not imported here; a test
compares the two."""

WARMUP_SETTINGS: Mapping[str, str] = {
    "shapes": "list[list[int]]",
    "max_tokens": "int 1..2147483647",
    "max_rounds": "int 1..1000",
    "max_s": "float 1..86400",
}
"""Setting of triton_config.warmup -> type; `shapes` is required."""
_MOST_REQUESTS, MOST_WARMUP_TOKENS = 65_536, 2**22
"""Limits of one shape: its requests, and all its tokens. A test compares them with the backend's own in config.py."""
_SHAPES = (
    "a list of pairs [requests, prompt tokens] of whole numbers from 1, at most "
    f"{_MOST_REQUESTS:,} requests and {MOST_WARMUP_TOKENS:,} tokens in all"
)


def warmup_problem(name: str, value: Any) -> str | None:
    """Return why the backend refuses `value` for warmup's `name`, as "expected ..., found ..."; None if it takes it."""
    spelled = WARMUP_SETTINGS[name]
    is_right, words = type_strings.fits(value, spelled), type_strings.in_words(spelled)
    if name == "shapes":
        is_right, words = is_right and bool(value) and all(map(_is_shape, value)), _SHAPES
    return None if is_right else f"expected {words}, found {short_repr(value)}"


def _is_shape(pair: list[int]) -> bool:
    requests, tokens = pair if len(pair) == 2 else (0, 0)
    return 1 <= requests <= _MOST_REQUESTS and tokens >= 1 and requests * tokens <= MOST_WARMUP_TOKENS


def sampling_problem(name: str, value: Any) -> str | None:
    """Return why the backend refuses `value` for default_sampling's `name`, as "expected ..., found ..."; None if it
    takes it."""
    known = contract().SAMPLING_BY_NAME
    if name not in known:
        near = nearest_name(name, known)
        return f"expected a sampling field, found {short_repr(name)}" + (f"; did you mean {near}?" if near else "")
    try:
        backend_module("field_values").check_value(known[name], value)
    except ValueError as error:
        return str(error).removeprefix(f"{name}: ").replace(", got ", ", found ", 1)
    except TypeError:  # YAML has dates, JSON has not
        return f"expected a JSON object, found {short_repr(value)}"
    return None
