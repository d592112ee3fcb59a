"""The settings of the embedded engines: the reference engine and the simulated engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from deepseek_triton_build.build_errors import RefusedPlanError
from deepseek_triton_build.data.catalog import Variant
from deepseek_triton_build.data.planned_settings import Setting
from deepseek_triton_build.planning.plan_request import PlanRequest

ENGINE_REASONS = {
    "tensorrt_llm": "TensorRT-LLM's PyTorch backend through its LLM API",
    "vllm": "vLLM's AsyncLLM; what the backend knows about the version lies beside model.py, in release.yaml",
    "reference": "real forward passes of DeepSeek-V3 in numpy, on the CPU",
    "simulated": "a simulation, at the pace of its preset's deployment if it has a preset; its text means nothing",
}

_DEFAULT_MAX_TOKENS = {
    "reference": Setting("triton_config.default_max_tokens", 256, "the tiny model's answers end by themselves before"),
    "simulated": Setting("triton_config.default_max_tokens", 64, "its text means nothing, so short answers will do"),
}


def embedded_settings(request: PlanRequest, variant: Variant, engine: str) -> tuple[Setting, ...]:
    """Return the settings in model.yaml of a model that needs no TensorRT-LLM."""
    made = "the folder beside this file" if not request.model else "the checkpoint you named"
    settings = [
        Setting("model", request.model or variant.model, f"{variant.title}; {made}"),
        Setting("triton_config.engine", engine, ENGINE_REASONS[engine]),
        *transaction_settings(request),
        _DEFAULT_MAX_TOKENS[engine],
    ]
    if engine == "reference":
        reason = "a model this small gains nothing from more, and tritonserver's own threads need the cores"
        settings.append(Setting("triton_config.engine_options.num_threads", 1, reason))
    if request.preset:
        name, reason = "triton_config.engine_options.preset", "the deployment whose pace is kept"
        if request.preset.endswith(".json"):
            settings.append(Setting(name, _document(request.preset), f"{reason}, which `plan --sla` wrote"))
        else:
            reason += "; engines/simulated/presets.py has its constants and their sources"
            settings.append(Setting(name, request.preset, reason))
    return tuple(settings)


def _document(preset: str) -> Any:
    try:
        return json.loads(Path(preset).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise RefusedPlanError(
            f"preset {preset} can't be read: {error}", fix="`plan --sla --write-pace` makes it"
        ) from error


def transaction_settings(request: PlanRequest) -> list[Setting]:
    """Return the settings that repeat config.pbtxt, where upstream's model.py reads them."""
    reason = "a copy of config.pbtxt's value, which decides; upstream's model.py reads it here, and the two must agree"
    return [
        Setting("triton_config.decoupled", request.decoupled, reason),
        Setting("triton_config.max_batch_size", 0, "a copy, too; the engine makes batches, Triton does not"),
    ]
