"""The values that settings take, beyond the types in the release records: bounds, and the backend's own settings."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from deepseek_triton_build.data import type_strings
from deepseek_triton_build.data.own_files import contract
from deepseek_triton_build.text import nearest_name, short_repr

# Canonical key -> its type with bounds, by what the key counts. -1 leaves expert parallelism to the engine.
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
    takes it.

    The contract's SAMPLING_BY_NAME gives type, range and number of values. The backend's own check is in its
    field_values.py, which is not imported here; a test compares the two.
    """
    known = contract().SAMPLING_BY_NAME
    if name not in known:
        near = nearest_name(name, known)
        return f"expected a sampling field, found {short_repr(name)}" + (f"; did you mean {near}?" if near else "")
    field = known[name]
    items = value if field.many and isinstance(value, (list, tuple)) else [value]
    if len(items) > field.max_items:
        return f"expected at most {field.max_items} values, found {len(items)}"
    return next((problem for item in items if (problem := _problem_of_one(field, item)) is not None), None)


# Triton's data type -> the type as type_strings reads it.
_SAMPLING_TYPES: Mapping[str, str] = {
    "TYPE_BOOL": "bool",
    "TYPE_STRING": "str",
    "TYPE_INT32": "int",
    "TYPE_UINT64": "int",
    "TYPE_FP32": "float",
}


def _problem_of_one(field: Any, value: Any) -> str | None:
    if field.json and isinstance(value, dict):
        return _problem_of_json(field, value)
    spelled = _SAMPLING_TYPES[field.dtype.value]
    if not field.json and (field.low is not None or field.high is not None):
        low, high = ("" if bound is None else bound for bound in (field.low, field.high))
        spelled = f"{spelled} {low}..{high}"
    if not type_strings.fits(_seven_digits(value), spelled):
        return f"expected {type_strings.in_words(spelled)}, found {short_repr(value)}"
    return _problem_of_text(field, value) if spelled == "str" else None


def _problem_of_text(field: Any, text: str) -> str | None:
    if not text:
        return "expected a text that is not empty, found ''"
    if field.choices and text not in field.choices:
        return f"expected one of {', '.join(field.choices)}, found {short_repr(text)}"
    if len(text) > field.max_length:
        return f"expected at most {field.max_length} characters, found {len(text)}"
    if _has_lone_surrogate(text):
        return f"expected whole characters, found half of a surrogate pair in {short_repr(text)}"
    return _problem_of_json(field, text) if field.json else None


def _has_lone_surrogate(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)


def _problem_of_json(field: Any, value: dict[Any, Any] | str) -> str | None:
    """Return what is wrong with a field that takes a JSON object or its text; None when nothing is."""
    try:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        is_object = isinstance(json.loads(text), dict)
    except (TypeError, ValueError, RecursionError):  # TypeError: YAML has dates, JSON has not
        is_object = False
    if not is_object or _has_lone_surrogate(text):
        return f"expected a JSON object of whole characters, found {short_repr(value)}"
    if len(text) > field.max_length:
        return f"expected at most {field.max_length} characters, found {len(text)}"
    return _problem_of_tokens(field, json.loads(text)) if field.by_token else None


def _problem_of_tokens(field: Any, document: Mapping[str, Any]) -> str | None:
    if len(document) > field.max_items:
        return f"expected at most {field.max_items} tokens, found {len(document)}"
    if keys := [key for key in document if not re.fullmatch("0|[1-9][0-9]{0,9}", key)]:
        return f"expected token ids from 0 as keys, found {short_repr(keys[0])}"
    spelled = f"float {field.low}..{field.high}"
    if found := [value for value in document.values() if not type_strings.fits(_seven_digits(value), spelled)]:
        return f"expected {type_strings.in_words(spelled)}, found {short_repr(found[0])}"
    return None


def _seven_digits(value: Any) -> Any:
    """Round a float as the backend does, to what an FP32 tensor holds, before it looks at the range."""
    return float(f"{value:.7g}") if isinstance(value, float) else value
