"""The user's own settings (--set), put in last, and the backend's settings under triton_config, for each engine."""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepseek_triton_build.arithmetic.gpu_memory import Budget
from deepseek_triton_build.build_errors import RefusedPlanError
from deepseek_triton_build.data.catalog import Variant
from deepseek_triton_build.data.own_files import contract
from deepseek_triton_build.data.planned_settings import Omission, Setting, SettingsFile
from deepseek_triton_build.data.profiles import Workload
from deepseek_triton_build.data.setting_types import BACKEND_SETTINGS, WARMUP_SETTINGS, sampling_problem, warmup_problem
from deepseek_triton_build.data.type_strings import fits, in_words
from deepseek_triton_build.planning.plan_request import PlanRequest, sampling_defaults
from deepseek_triton_build.planning.target import Target, VllmTarget
from deepseek_triton_build.text import nearest_name, short_repr

_TRITON = "triton_config."


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """An engine's arguments, as a plan writes them."""

    settings: tuple[Setting, ...]
    """Under the release's own keys, in writing order."""
    canonical: Mapping[str, Any]
    """The same, those of `files` too, under the keys that the rules know."""
    own: Mapping[str, Any]
    """The user's own settings under triton_config."""
    files: tuple[SettingsFile, ...] = ()
    omissions: tuple[Omission, ...] = ()


def with_own_arguments(
    request: PlanRequest, chosen: Iterable[Setting], check: Callable[[str, Any], Iterable[str]]
) -> tuple[tuple[Setting, ...], dict[str, Any]]:
    """Return the arguments with the user's own put in, and the user's own for triton_config apart.

    :param check: raises RefusedPlanError where the engine doesn't take a key or its value, and returns other keys that
        the key excludes.
    :raises RefusedPlanError: also for a setting that the backend doesn't have, or a value that it doesn't take.
    """
    merged = {setting.key: setting for setting in chosen}
    triton = {}
    for key, hashable in request.overrides:
        value = _with_lists(hashable)
        if key.startswith(_TRITON):
            _refuse_backend_setting(key.removeprefix(_TRITON), value)
            triton[key] = value
            continue
        excluded = check(key, value)
        before = f" instead of {short_repr(merged[key].value)}" if key in merged and merged[key].value != value else ""
        for other in [name for name in merged if name in excluded or (name != key and holds_or_lies_in(key, name))]:
            del merged[other]
        merged[key] = Setting(key, value, f"{request.why_measured(key) or 'set by hand'}{before}")
    # A section is written in one piece, so a new key goes to where its section is.
    sections = list(dict.fromkeys(key.partition(".")[0] for key in merged))
    return tuple(sorted(merged.values(), key=lambda setting: sections.index(setting.key.partition(".")[0]))), triton


def holds_or_lies_in(key: str, other: str) -> bool:
    """Tell whether the keys can't both be written, because they are the same or one holds the other."""
    return f"{other}.".startswith(f"{key}.") or f"{key}.".startswith(f"{other}.")


def refuse_misfit(key: str, value: Any, spelled: str) -> None:
    """:raises RefusedPlanError: when `value` is not of the type `spelled`."""
    if not fits(value, spelled):
        raise RefusedPlanError(f"{key}: expected {in_words(spelled)}, got {short_repr(value)}")


def _with_lists(value: Any) -> Any:
    """Return `value` with lists for tuples; a request holds tuples, as they can be hashed."""
    return [_with_lists(item) for item in value] if isinstance(value, tuple) else value


def _refuse_backend_setting(key: str, value: Any) -> None:
    """Refuse a setting of triton_config that the backend doesn't have, or a value that it doesn't take."""
    if key == "engine":
        raise RefusedPlanError(f"--set {_ENGINE}: other settings depend on it; use --engine")
    section, _, name = key.partition(".")
    known: Mapping[str, Any] = BACKEND_SETTINGS
    if section == "default_sampling" and name:
        section, known = name, contract().SAMPLING_BY_NAME
    elif section == "warmup" and name:
        section, known = name, WARMUP_SETTINGS
    if section not in known:
        near = nearest_name(section, known)
        hint = f"; did you mean {near}?" if near else f"; it has {', '.join(known)}"
        raise RefusedPlanError(f"{_TRITON}{key} is not a setting of the backend{hint}")
    if known is not BACKEND_SETTINGS:
        judge = warmup_problem if known is WARMUP_SETTINGS else sampling_problem
        if problem := judge(section, value):
            raise RefusedPlanError(f"{_TRITON}{key}: {problem}")
    elif not name:
        refuse_misfit(f"{_TRITON}{key}", value, BACKEND_SETTINGS[section])


_ENGINE = "triton_config.engine"
_MAX_TOKENS, _INFLIGHT_TOKENS = "triton_config.default_max_tokens", "triton_config.max_inflight_tokens"
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
    advice, source = target.variant.default_sampling, target.variant.default_sampling_source
    folder = target.request.model
    own_advice = sampling_defaults(Path(folder)) if folder and os.path.isdir(folder) else None
    if own_advice is not None:
        advice, source = own_advice, "generation_config.json of the checkpoint"
    advised = [Setting(f"triton_config.default_sampling.{name}", value, source) for name, value in advice.items()]
    reasons = {f"triton_config.default_sampling.{name}": limits.why_left_out(name) for name in advice}
    shapes, reason = limits.warmup
    rows = [
        Setting(_ENGINE, target.engine, ENGINE_REASONS[target.engine]),
        *_transaction(target.request),
        *_chat_encoding(target.variant),
        _answer_length(target, workload, budget, limits),
        *(row for row in advised if not reasons[row.key]),
        Setting(f"{_WARMUP}.shapes", shapes, f"{reason}; `--set {_WARMUP}=null` leaves the warm-up out"),
        Setting(f"{_WARMUP}.max_s", WARMUP_MAX_S, "seconds; then the model is ready, and users warm up the rest"),
    ]
    merged = {row.key: row for row in rows}
    for key, value in own.items():
        if key == _WARMUP or key.startswith(f"{_WARMUP}."):
            merged = {other: row for other, row in merged.items() if not holds_or_lies_in(key, other)}
        merged[key] = Setting(key, value, target.request.why_measured(key) or "set by hand")
    left_out = [Omission(key=row.key, value=row.value, reason=reasons[row.key]) for row in advised if reasons[row.key]]
    return tuple(merged.values()), left_out


def _answer_length(target: Target | VllmTarget, workload: Workload, budget: Budget, limits: EngineLimits) -> Setting:
    """Return default_max_tokens: a request's part of the KV cache, or the model's own reasoning if that is longer."""
    isl, osl = workload.isl or 0, workload.osl or 0
    if target.request.workload.osl:
        return Setting(_MAX_TOKENS, osl, "the output length that was asked for")
    requests = max(1, min(limits.batch, budget.concurrent_requests(isl, osl) // budget.attention_dp_size))
    room, own = budget.tokens_each(requests) - isl, target.variant.reasoning_tokens
    reason = f"a part of the KV cache for each of {requests:,} requests, less a prompt of {isl:,}"
    most = min(limits.longest, dict(target.request.overrides).get(_INFLIGHT_TOKENS) or limits.longest)
    chosen = max(1, min(max(room // 1024 * 1024 or room, own), most - isl))
    if room < own:
        held = budget.concurrent_requests(isl, chosen)
        reason = f"{own:,} ({target.variant.reasoning_source}); the KV cache holds {held:,} of {chosen:,} at once"
    within = limits.within if most == limits.longest else _INFLIGHT_TOKENS
    return Setting(_MAX_TOKENS, chosen, f"for requests without max_tokens: {reason}, within {within}")


def embedded_settings(request: PlanRequest, variant: Variant, engine: str) -> tuple[Setting, ...]:
    """Return all settings of a model on the reference or the simulated engine.

    :raises RefusedPlanError: when the file of a preset can't be read.
    """
    origin = "the folder beside this file" if not request.model else "the checkpoint you named"
    settings = [
        Setting("model", request.model or variant.model, f"{variant.title}; {origin}"),
        Setting(_ENGINE, engine, ENGINE_REASONS[engine]),
        *_transaction(request),
        *_chat_encoding(variant),
        _EMBEDDED_MAX_TOKENS[engine],
    ]
    if engine == "reference":
        reason = "a model this small gains nothing from more, and tritonserver's own threads need the cores"
        settings.append(Setting("triton_config.engine_options.num_threads", 1, reason))
    if request.preset:
        preset: Any = request.preset
        if request.preset.endswith(".json"):
            reason = "the deployment whose pace is kept, which `plan --sla` wrote"
            try:
                preset = json.loads(Path(request.preset).read_text("utf-8"))
            except (OSError, ValueError) as error:
                raise RefusedPlanError(
                    f"preset {request.preset} can't be read: {error}", fix="`plan --sla --write-pace` makes it"
                ) from error
        else:
            reason = "the deployment whose pace is kept; engines/simulated/presets.py has its constants and sources"
        settings.append(Setting("triton_config.engine_options.preset", preset, reason))
    return tuple(settings)


def _chat_encoding(variant: Variant) -> list[Setting]:
    reason = "how conversations are written; neither config.json nor every folder's name tells it"
    return [Setting("triton_config.chat_encoding", variant.chat_encoding, reason)] if variant.chat_encoding else []


def _transaction(request: PlanRequest) -> list[Setting]:
    """Return the settings that repeat config.pbtxt, where upstream's model.py reads them."""
    reason = "a copy of config.pbtxt's value, which decides; upstream's model.py reads it here, and the two must agree"
    return [
        Setting("triton_config.decoupled", request.decoupled, reason),
        Setting("triton_config.max_batch_size", 0, "a copy, too; the engine makes batches, Triton does not"),
    ]
