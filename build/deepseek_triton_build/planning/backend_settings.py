"""The backend's own settings, under triton_config, for each engine."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepseek_triton_build.arithmetic.gpu_memory import Budget
from deepseek_triton_build.build_errors import RefusedPlanError
from deepseek_triton_build.data.catalog import Variant
from deepseek_triton_build.data.planned_settings import Omission, Setting
from deepseek_triton_build.data.profiles import Workload
from deepseek_triton_build.planning.checkpoint_defaults import sampling_defaults
from deepseek_triton_build.planning.own_settings import holds_or_lies_in
from deepseek_triton_build.planning.plan_request import PlanRequest
from deepseek_triton_build.planning.target import Target, VllmTarget

_ENGINE = "triton_config.engine"
_MAX_TOKENS = "triton_config.default_max_tokens"
_WARMUP = "triton_config.warmup"
WARMUP_MAX_S = 300
"""Seconds that the warm-up may take: little beside a load of many minutes, and saved by the first users."""
ENGINE_REASONS = {
    "tensorrt_llm": "TensorRT-LLM's PyTorch backend through its LLM API",
    "vllm": "vLLM's AsyncLLM; what the backend knows about the version lies beside model.py, in release.yaml",
    "reference": "real forward passes of DeepSeek-V3 in numpy, on the CPU",
    "simulated": "a simulation, at the pace of its preset's deployment if it has a preset; its text means nothing",
}
_EMBEDDED_MAX_TOKENS = {
    "reference": Setting(_MAX_TOKENS, 256, "the tiny model's answers end by themselves before"),
    "simulated": Setting(_MAX_TOKENS, 64, "its text means nothing, so short answers will do"),
}


@dataclass(frozen=True, kw_only=True)
class EngineLimits:
    """The engine's limits, by which the backend's settings are chosen."""

    batch: int
    """Requests of one rank."""
    longest: int
    """Most tokens of prompt and answer together."""
    within: str
    """How `longest` is called, and what to know about it."""
    why_left_out: Callable[[str], str]
    """Why the engine does without a sampling field that it would refuse or ignore; empty for others."""
    warmup: tuple[list[list[int]], str]
    """The shapes of the warm-up, and why they are these."""


def backend_settings(
    target: Target | VllmTarget, workload: Workload, budget: Budget, limits: EngineLimits, own: Mapping[str, Any]
) -> tuple[tuple[Setting, ...], list[Omission]]:
    """Return the settings under triton_config, and the advised sampling fields that are left out.

    :param workload: the planned one, with both lengths.
    :param own: the user's own settings under triton_config.
    """
    advice, source = _sampling_advice(target)
    advised = [Setting(f"triton_config.default_sampling.{name}", value, source) for name, value in advice.items()]
    reasons = {f"triton_config.default_sampling.{name}": limits.why_left_out(name) for name in advice}
    shapes, reason = limits.warmup
    rows = [
        Setting(_ENGINE, target.engine, ENGINE_REASONS[target.engine]),
        *_transaction(target.request),
        _default_max_tokens(target.request, workload, budget, limits),
        *(row for row in advised if not reasons[row.key]),
        Setting(f"{_WARMUP}.shapes", shapes, f"{reason}; `--set {_WARMUP}=null` leaves the warm-up out"),
        Setting(
            f"{_WARMUP}.max_s",
            WARMUP_MAX_S,
            "seconds; after that the model is ready, and the first users warm up the rest",
        ),
    ]
    merged = {row.key: row for row in rows}
    for key, value in own.items():
        if key == _WARMUP or key.startswith(f"{_WARMUP}."):
            merged = {other: row for other, row in merged.items() if not holds_or_lies_in(key, other)}
        merged[key] = Setting(key, value, target.request.why_measured(key) or "set by hand")
    left_out = [Omission(key=row.key, value=row.value, reason=reasons[row.key]) for row in advised if reasons[row.key]]
    return tuple(merged.values()), left_out


def _default_max_tokens(request: PlanRequest, workload: Workload, budget: Budget, limits: EngineLimits) -> Setting:
    """Return default_max_tokens, a request's part of the KV cache less its prompt, rounded down."""
    isl, osl = workload.isl or 0, workload.osl or 0
    if request.workload.osl:
        return Setting(_MAX_TOKENS, osl, "the output length that was asked for")
    requests = max(1, min(limits.batch, budget.kv_tokens // (isl + osl)))
    room = budget.kv_tokens // requests - isl
    return Setting(
        _MAX_TOKENS,
        max(1, min(room // 1024 * 1024 or room, limits.longest - isl)),
        f"for requests without max_tokens: {budget.kv_tokens:,} KV tokens / {requests:,} requests, less a prompt of "
        f"{isl:,}, rounded down, within {limits.within}",
    )


def _sampling_advice(target: Target | VllmTarget) -> tuple[Mapping[str, float], str]:
    """Return advised sampling fields and their source: the checkpoint, if its folder is here, else the model card."""
    folder = target.request.model
    own = sampling_defaults(Path(folder)) if folder and os.path.isdir(folder) else None
    if own is not None:
        return own, "generation_config.json of the checkpoint"
    return target.variant.default_sampling, target.variant.default_sampling_source


def embedded_settings(request: PlanRequest, variant: Variant, engine: str) -> tuple[Setting, ...]:
    """Return all settings of a model on the reference or the simulated engine.

    :raises RefusedPlanError: when the file of a preset can't be read.
    """
    origin = "the folder beside this file" if not request.model else "the checkpoint you named"
    settings = [
        Setting("model", request.model or variant.model, f"{variant.title}; {origin}"),
        Setting(_ENGINE, engine, ENGINE_REASONS[engine]),
        *_transaction(request),
        _EMBEDDED_MAX_TOKENS[engine],
    ]
    if engine == "reference":
        reason = "a model this small gains nothing from more, and tritonserver's own threads need the cores"
        settings.append(Setting("triton_config.engine_options.num_threads", 1, reason))
    if request.preset:
        preset: Any = request.preset
        reason = "the deployment whose pace is kept"
        if request.preset.endswith(".json"):
            reason += ", which `plan --sla` wrote"
            try:
                preset = json.loads(Path(request.preset).read_text("utf-8"))
            except (OSError, ValueError) as error:
                raise RefusedPlanError(
                    f"preset {request.preset} can't be read: {error}", fix="`plan --sla --write-pace` makes it"
                ) from error
        else:
            reason += "; engines/simulated/presets.py has its constants and their sources"
        settings.append(Setting("triton_config.engine_options.preset", preset, reason))
    return tuple(settings)


def _transaction(request: PlanRequest) -> list[Setting]:
    """Return the settings that repeat config.pbtxt, where upstream's model.py reads them."""
    reason = "a copy of config.pbtxt's value, which decides; upstream's model.py reads it here, and the two must agree"
    return [
        Setting("triton_config.decoupled", request.decoupled, reason),
        Setting("triton_config.max_batch_size", 0, "a copy, too; the engine makes batches, Triton does not"),
    ]
