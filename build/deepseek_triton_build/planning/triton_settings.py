"""What stands under triton_config for the TensorRT-LLM engine: the backend's own settings."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepseek_triton_build.arithmetic.gpu_memory import Budget
from deepseek_triton_build.arithmetic.warmup_shapes import MAX_REQUESTS, shapes_for_llm_args
from deepseek_triton_build.data.planned_settings import Omission, Setting
from deepseek_triton_build.data.releases.sampler_support import honoured_fields, sampler_of
from deepseek_triton_build.planning.batch_sizes import Sizes
from deepseek_triton_build.planning.checkpoint_defaults import sampling_defaults
from deepseek_triton_build.planning.embedded import ENGINE_REASONS, transaction_settings
from deepseek_triton_build.planning.target import Target

_WARMUP = "triton_config.warmup"
WARMUP_MAX_S = 300
"""Beside a load of many minutes it is little, and what the first users don't wait."""


def triton_settings(
    target: Target, sizes: Sizes, budget: Budget, llm: tuple[Setting, ...], own: Mapping[str, Any]
) -> tuple[tuple[Setting, ...], list[Omission]]:
    """What stands under triton_config, and the sampling advice that this release's sampler would ignore."""
    llm_args = {setting.key: setting.value for setting in llm}
    sampling, ignored = _default_sampling(target, llm_args)
    rows = [
        Setting(key="triton_config.engine", value="tensorrt_llm", reason=ENGINE_REASONS["tensorrt_llm"]),
        *transaction_settings(),
        _default_max_tokens(target, sizes, budget),
        *sampling,
        *(_warmup(llm_args) if "triton" in target.profile.formats else ()),
    ]
    merged = {row.key: row for row in rows}
    for key, value in own.items():
        if key.partition(".")[2].partition(".")[0] == "warmup":
            merged = {other: row for other, row in merged.items() if not _replaces(key, other)}
        merged[key] = Setting(key=key, value=value, reason="set by hand")
    return tuple(merged.values()), ignored


def _replaces(key: str, other: str) -> bool:
    """They can't both be written: one is the other's section, or the same."""
    return f"{other}.".startswith(f"{key}.") or f"{key}.".startswith(f"{other}.")


def _warmup(llm_args: Mapping[str, Any]) -> list[Setting]:
    """What the engine is given before the model is ready."""
    return [
        Setting(
            key=f"{_WARMUP}.shapes",
            value=[list(shape) for shape in shapes_for_llm_args(llm_args)],
            reason="before the model is ready, requests at once and prompt tokens of each: from one to max_batch_size, "
            f"but at most {MAX_REQUESTS:,} over all ranks, the CUDA graphs' sizes within that, and max_num_tokens: so "
            "that hardly a user waits for kernels to be compiled and tuned; "
            f"`--set {_WARMUP}=null` leaves it out",
        ),
        Setting(
            key=f"{_WARMUP}.max_s",
            value=WARMUP_MAX_S,
            reason="seconds; what is not warm by then is left to the first users, and the model is ready",
        ),
    ]


def _default_max_tokens(target: Target, sizes: Sizes, budget: Budget) -> Setting:
    """What the KV cache holds for each of the requests that fit it, in whole thousands where there are any."""
    key = "triton_config.default_max_tokens"
    isl, osl = sizes.workload.isl or 0, sizes.workload.osl or 0
    if target.request.workload.osl:
        return Setting(key=key, value=osl, reason="the output length that was asked for")
    requests = max(1, min(sizes.max_batch_size, budget.kv_tokens // (isl + osl)))
    each = budget.kv_tokens // requests - isl
    rounded = each // 1024 * 1024 or each
    return Setting(
        key=key,
        value=max(1, min(rounded, sizes.max_seq_len - isl)),
        reason=f"for requests that give none: {budget.kv_tokens:,} KV tokens / {requests:,} requests, less a prompt of "
        f"{isl:,}, rounded down, within max_seq_len; the scheduler reserves prompt + max_tokens for each",
    )


def _default_sampling(target: Target, settings: Mapping[str, Any]) -> tuple[list[Setting], list[Omission]]:
    advice, source = _sampling_advice(target)
    honoured = honoured_fields(target.release, settings)
    written, ignored = [], []
    for name, value in advice.items():
        key = f"triton_config.default_sampling.{name}"
        if name in honoured:
            written.append(Setting(key=key, value=value, reason=source))
        else:
            sampler = sampler_of(target.release, settings)
            reason = f"{sampler} of {target.release.version} ignores {name}"
            ignored.append(Omission(key=key, value=value, reason=reason))
    return written, ignored


def _sampling_advice(target: Target) -> tuple[Mapping[str, float], str]:
    """The checkpoint's own defaults where they can be read, else the model card's."""
    folder = target.request.model
    own = sampling_defaults(Path(folder)) if folder and os.path.isdir(folder) else None
    if own is not None:
        return own, "generation_config.json of the checkpoint"
    return target.variant.default_sampling, target.variant.default_sampling_source
