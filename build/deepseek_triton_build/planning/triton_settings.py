"""The backend's own settings, under triton_config, for the TensorRT-LLM engine."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from deepseek_triton_build.arithmetic.gpu_memory import Budget
from deepseek_triton_build.arithmetic.warmup_shapes import MAX_REQUESTS, shapes_for_llm_args
from deepseek_triton_build.data.planned_settings import Omission, Setting
from deepseek_triton_build.data.releases import honoured_fields, sampler_of
from deepseek_triton_build.planning.batch_sizes import Sizes
from deepseek_triton_build.planning.checkpoint_defaults import sampling_defaults
from deepseek_triton_build.planning.embedded import ENGINE_REASONS, transaction_settings
from deepseek_triton_build.planning.plan_request import PlanRequest
from deepseek_triton_build.planning.target import PlannedModel, Target

_WARMUP = "triton_config.warmup"
WARMUP_MAX_S = 300
"""Seconds that the warm-up may take: little beside a load of many minutes, and saved by the first users."""


def triton_settings(
    target: Target, sizes: Sizes, budget: Budget, llm: tuple[Setting, ...], own: Mapping[str, Any]
) -> tuple[tuple[Setting, ...], list[Omission]]:
    """Return the settings under triton_config, and the advised sampling fields that the sampler ignores.

    :param llm: the LLM arguments, under the release's keys.
    :param own: the user's own settings under triton_config.
    """
    llm_args = {setting.key: setting.value for setting in llm}
    sampling, ignored = _default_sampling(target, llm_args)
    rows = [
        Setting("triton_config.engine", "tensorrt_llm", ENGINE_REASONS["tensorrt_llm"]),
        *transaction_settings(target.request),
        _default_max_tokens(target, sizes, budget),
        *sampling,
        *_warmup(llm_args),
    ]
    return with_own(rows, own, target.request), ignored


def with_own(rows: Iterable[Setting], own: Mapping[str, Any], request: PlanRequest) -> tuple[Setting, ...]:
    """Return the rows with the user's own settings put in."""
    merged = {row.key: row for row in rows}
    for key, value in own.items():
        if key.partition(".")[2].partition(".")[0] == "warmup":
            merged = {other: row for other, row in merged.items() if not _replaces(key, other)}
        merged[key] = Setting(key, value, request.why_measured(key) or "set by hand")
    return tuple(merged.values())


def _replaces(key: str, other: str) -> bool:
    """Tell whether the keys can't both be written, because they are the same or one holds the other."""
    return f"{other}.".startswith(f"{key}.") or f"{key}.".startswith(f"{other}.")


def _warmup(llm_args: Mapping[str, Any]) -> list[Setting]:
    return warmup_settings(
        [list(shape) for shape in shapes_for_llm_args(llm_args)],
        "pairs of concurrent requests and prompt tokens of each, which run before the model is ready, so "
        "that hardly a user waits for kernels to be compiled and tuned: from one request to max_batch_size, at "
        f"most {MAX_REQUESTS:,} over all ranks, with the CUDA graphs' sizes between, within max_num_tokens",
    )


def warmup_settings(shapes: list[list[int]], reason: str) -> list[Setting]:
    """Return the warm-up that the backend does before the model is ready."""
    return [
        Setting(f"{_WARMUP}.shapes", shapes, f"{reason}; `--set {_WARMUP}=null` leaves the warm-up out"),
        Setting(
            f"{_WARMUP}.max_s",
            WARMUP_MAX_S,
            "seconds; after that the model is ready, and the first users warm up the rest",
        ),
    ]


def _default_max_tokens(target: Target, sizes: Sizes, budget: Budget) -> Setting:
    """Return default_max_tokens, a request's part of the KV cache less its prompt, rounded down."""
    key = "triton_config.default_max_tokens"
    isl, osl = sizes.workload.isl or 0, sizes.workload.osl or 0
    if target.request.workload.osl:
        return Setting(key, osl, "the output length that was asked for")
    requests = max(1, min(sizes.max_batch_size, budget.kv_tokens // (isl + osl)))
    return Setting(
        key,
        answer_room(budget, requests, isl, sizes.max_seq_len),
        f"for requests without max_tokens: {budget.kv_tokens:,} KV tokens / {requests:,} requests, less a "
        f"prompt of {isl:,}, rounded down, within max_seq_len; the scheduler reserves prompt + max_tokens for each",
    )


def answer_room(budget: Budget, requests: int, isl: int, longest: int) -> int:
    """Return the tokens that each of `requests` at once may answer with, after a prompt of `isl` tokens.

    :param longest: the most tokens of prompt and answer together.
    """
    each = budget.kv_tokens // requests - isl
    return max(1, min(each // 1024 * 1024 or each, longest - isl))


def _default_sampling(target: Target, settings: Mapping[str, Any]) -> tuple[list[Setting], list[Omission]]:
    advice, source = sampling_advice(target)
    honoured = honoured_fields(target.release, settings)
    written, ignored = [], []
    for name, value in advice.items():
        key = f"triton_config.default_sampling.{name}"
        if name in honoured:
            written.append(Setting(key, value, source))
        else:
            sampler = sampler_of(target.release, settings)
            reason = f"the {sampler} of {target.release.version} ignores {name}"
            ignored.append(Omission(key=key, value=value, reason=reason))
    return written, ignored


def sampling_advice(target: PlannedModel) -> tuple[Mapping[str, float], str]:
    """Return advised sampling fields and their source: the checkpoint, if its folder is here, else the model card."""
    folder = target.request.model
    own = sampling_defaults(Path(folder)) if folder and os.path.isdir(folder) else None
    if own is not None:
        return own, "generation_config.json of the checkpoint"
    return target.variant.default_sampling, target.variant.default_sampling_source
