"""The user's own settings (--set): engine arguments and triton_config.*, put in last."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from deepseek_triton_build.build_errors import RefusedPlanError
from deepseek_triton_build.data.model_source import contract
from deepseek_triton_build.data.planned_settings import Omission, Setting, SettingsFile
from deepseek_triton_build.data.setting_types import (
    BACKEND_SETTINGS,
    WARMUP_SETTINGS,
    sampling_problem,
    warmup_problem,
)
from deepseek_triton_build.data.type_strings import fits, in_words
from deepseek_triton_build.planning.plan_request import PlanRequest
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
        is_other = key in merged and merged[key].value != value
        before = f" instead of {short_repr(merged[key].value)}" if is_other else ""
        for other in [name for name in merged if name in excluded or (name != key and holds_or_lies_in(key, name))]:
            del merged[other]
        merged[key] = Setting(key, value, request.why_measured(key) or f"set by hand{before}")
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
