"""The settings of a plan under the keys of the target's release, in writing order, and the user's own settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepseek_triton_build.build_errors import RefusedPlanError
from deepseek_triton_build.data.model_source import contract
from deepseek_triton_build.data.planned_settings import LLM_ARGS, Omission, Setting, SettingsFile
from deepseek_triton_build.data.releases import Release, honoured_fields, sampler_of
from deepseek_triton_build.data.setting_types import (
    BACKEND_SETTINGS,
    WARMUP_SETTINGS,
    bounded_type,
    sampling_problem,
    warmup_problem,
)
from deepseek_triton_build.data.spelling import canonical, spell
from deepseek_triton_build.data.type_strings import fits, in_words
from deepseek_triton_build.planning.target import Target
from deepseek_triton_build.rules.moe import BALANCER
from deepseek_triton_build.text import nearest_name, short_repr

_NEEDED = (
    "model",
    "backend",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "moe_expert_parallel_size",
    "enable_attention_dp",
    "max_batch_size",
    "max_num_tokens",
    "max_seq_len",
    "kv_cache_config.dtype",
    "kv_cache_config.free_gpu_memory_fraction",
    "moe_config.backend",
)
"""Keys without which nothing can be written for a release. Any other key that the release lacks is left out."""


_BALANCER_FILE = "moe-load-balancer.yaml"


def for_release(target: Target, chosen: Mapping[str, Setting]) -> tuple[tuple[Setting, ...], tuple[Omission, ...]]:
    """Return the settings under the release's keys, in writing order, and those that it has no key for."""
    release = target.release
    written: dict[str, Setting] = {}
    omitted = []
    for key, setting in sorted(chosen.items(), key=_writing_order):
        if key.startswith(f"{BALANCER}.") and (named := _named_by_path(release)):
            reason = f"TensorRT-LLM {release.version} reads the load balancer from a file, which lies beside this one"
            written.setdefault(named, Setting(named, _BALANCER_FILE, reason, source=LLM_ARGS))
            continue
        spelled = spell({key: setting.value}, release.version)
        missing = [name for name in spelled if release.find_key(name) is None]
        if missing and key in _NEEDED:
            release.require_key(missing[0])
        elif missing:
            omitted.append(
                Omission(key=key, value=setting.value, reason=f"TensorRT-LLM {release.version} has no {missing[0]}")
            )
        else:
            for name, value in spelled.items():
                written.setdefault(name, Setting(name, value, setting.reason, source=setting.source))
    _drop_guided_decoding(release, written, omitted)
    return tuple(written.values()), tuple(omitted)


def _named_by_path(release: Release) -> str | None:
    """Return the release's key of the load balancer if it takes a file's path only, None otherwise."""
    (key,) = spell({BALANCER: None}, release.version)
    found = release.find_key(key)
    return key if found is not None and not found.sections else None


def settings_files(chosen: Mapping[str, Setting], written: tuple[Setting, ...]) -> tuple[SettingsFile, ...]:
    """Return the files that the settings `written` name, with the settings of `chosen` that belong into them."""
    if not any(setting.value == _BALANCER_FILE for setting in written):
        return ()
    rows = tuple(setting for key, setting in chosen.items() if key.startswith(f"{BALANCER}."))
    return (SettingsFile(name=_BALANCER_FILE, section=BALANCER, settings=rows),)


def _drop_guided_decoding(release: Release, written: dict[str, Setting], omitted: list[Omission]) -> None:
    """Omit guided_decoding_backend where the release can't do guided decoding beside the other settings."""
    if "guided_decoding_backend" not in written:
        return
    values = {key: setting.value for key, setting in written.items()}
    if "guided_decoding" not in honoured_fields(release, values):
        reason = f"the {sampler_of(release, values)} of {release.version} has no guided decoding"
    elif release.supports("guided_decoding_with_overlap_scheduler") is False and not values.get(
        "disable_overlap_scheduler"
    ):
        reason = f"TensorRT-LLM {release.version} has no guided decoding beside the overlap scheduler"
    else:
        return
    setting = written.pop("guided_decoding_backend")
    omitted.append(Omission(key=setting.key, value=setting.value, reason=reason))


_SECTIONS = (
    "model",
    "backend",
    "trust_remote_code",
    "tensor_parallel_size",
    "moe_expert_parallel_size",
    "pipeline_parallel_size",
    "enable_attention_dp",
    "attention_dp_config",
    "max_batch_size",
    "max_num_tokens",
    "max_seq_len",
    "enable_chunked_prefill",
    "disable_overlap_scheduler",
    "cuda_graph_config",
    "kv_cache_config",
    "moe_config",
    "speculative_config",
    "cache_transceiver_config",
    "sampler_type",
    "guided_decoding_backend",
    "stream_interval",
    "enable_iter_perf_stats",
    "print_iter_log",
)
"""The order of keys in model.yaml; a key that is not listed comes last."""


def _writing_order(item: tuple[str, Setting]) -> tuple[int, str]:
    section = item[0].partition(".")[0]
    position = _SECTIONS.index(section) if section in _SECTIONS else len(_SECTIONS)
    return position, section


_REPLACES = {
    "cuda_graph_config.batch_sizes": "cuda_graph_config.max_batch_size",
    "cuda_graph_config.max_batch_size": "cuda_graph_config.batch_sizes",
}
"""Canonical keys that exclude each other: setting one by hand removes the other."""


def with_overrides(target: Target, chosen: tuple[Setting, ...]) -> tuple[tuple[Setting, ...], dict[str, Any]]:
    """Return the settings with the user's own LLM arguments put in, and the user's own for triton_config apart.

    :raises RefusedPlanError: for a key that the release or the backend doesn't have, or a value that it doesn't take.
    """
    merged = {setting.key: setting for setting in chosen}
    triton = {}
    for key, given in target.request.overrides:
        value = with_lists(given)
        if key.startswith(_TRITON):
            refuse_backend_setting(key.removeprefix(_TRITON), value)
            triton[key] = value
            continue
        canonical_key = _checked_argument(target, key, value)
        is_other = key in merged and merged[key].value != value
        before = f" instead of {short_repr(merged[key].value)}" if is_other else ""
        for replaced in _replaced(target.release, key, canonical_key, merged):
            del merged[replaced]
        merged[key] = Setting(key, value, target.request.why_measured(key) or f"set by hand{before}")
    _refuse_sections_without_kind(target.release, merged)
    # A section is written in one piece, so a new key goes to where its section is.
    sections = list(dict.fromkeys(key.partition(".")[0] for key in merged))
    return tuple(sorted(merged.values(), key=lambda setting: sections.index(setting.key.partition(".")[0]))), triton


def with_lists(value: Any) -> Any:
    """Return `value` with lists for tuples; a request holds tuples, as they can be hashed."""
    return [with_lists(item) for item in value] if isinstance(value, tuple) else value


def _refuse_sections_without_kind(release: Release, written: Mapping[str, Setting]) -> None:
    """Refuse a section without the key that says its kind: the engine can't read the other keys then."""
    for section in {key.partition(".")[0] for key in written if "." in key}:
        found = release.find_key(section)
        if found is not None and found.discriminator and f"{section}.{found.discriminator}" not in written:
            by_option = ", or use --mtp N, which sets both" if section == "speculative_config" else ""
            raise RefusedPlanError(f"{section} also needs {section}.{found.discriminator}; set it{by_option}")


def _replaced(release: Release, key: str, canonical_key: str, present: Mapping[str, Setting]) -> list[str]:
    """Return the keys that `key` replaces: those inside of it, those it is inside of, and those it excludes."""
    instead = spell({_REPLACES[canonical_key]: None}, release.version) if canonical_key in _REPLACES else {}
    return [
        other for other in present if other in instead or other.startswith(f"{key}.") or key.startswith(f"{other}.")
    ]


_TRITON = "triton_config."
_NOT_BY_HAND = {
    "tensor_parallel_size": "other settings depend on it; use --gpus and --pp",
    "pipeline_parallel_size": "other settings depend on it; use --pp",
    "model": "other settings depend on it; use --model",
    "backend": "DeepSeek runs on pytorch only; leave it out",
}


def _checked_argument(target: Target, key: str, value: Any) -> str:
    """Return the canonical key of an LLM argument that is set by hand.

    :raises RefusedPlanError: when it can't be set by hand, the release doesn't have it, or the value doesn't fit.
    """
    if key in _NOT_BY_HAND:
        raise RefusedPlanError(f"--set {key}: {_NOT_BY_HAND[key]}")
    found = target.release.require_key(key)
    if value is None and not found.sections:
        raise RefusedPlanError(f"{key}: expected a value, got null")
    canonical_key = next(iter(canonical({key: value}, target.release.version)), key)
    _refuse_misfit(key, value, bounded_type(canonical_key, found.type))
    return canonical_key


def refuse_backend_setting(key: str, value: Any) -> None:
    """Refuse a setting of triton_config that the backend doesn't have, or a value that it doesn't take."""
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
        _refuse_misfit(f"{_TRITON}{key}", value, BACKEND_SETTINGS[section])


def _refuse_misfit(key: str, value: Any, spelled: str) -> None:
    if not fits(value, spelled):
        raise RefusedPlanError(f"{key}: expected {in_words(spelled)}, got {short_repr(value)}")
