"""The section triton_config: the settings of the model.py that reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from deepseek_triton_build.check.codes import WRONG_SETTING, WRONG_SETTING_VALUE
from deepseek_triton_build.check.documents import Document, key_name
from deepseek_triton_build.check.finding import Finding
from deepseek_triton_build.check.schema import TRITON_SECTION
from deepseek_triton_build.data import type_strings
from deepseek_triton_build.data.model_source import contract
from deepseek_triton_build.data.setting_types import BACKEND_SETTINGS, WARMUP_SETTINGS, sampling_problem, warmup_problem
from deepseek_triton_build.text import nearest_name, short_repr

_UPSTREAM_SETTINGS: Mapping[str, str] = {
    "max_batch_size": "int 0..",
    "decoupled": "bool",
    "cancellation_check_period_ms": "int 1..",
}
"""Settings of upstream's model.py -> their types. It takes other keys too (NVIDIA/TensorRT-LLM llmapi model.yaml)."""


def check_triton_config(
    document: Document, find_argument: Callable[[str], object | None], *, is_ours: bool
) -> Iterator[Finding]:
    """Find unknown keys and wrong values in triton_config.

    :param find_argument: returns the engine's argument of a name; None when it has none.
    :param is_ours: whether model.py is this project's; upstream's takes other keys.
    """
    section = document.values.get(TRITON_SECTION)
    if section is not None and not isinstance(section, dict):
        message = f"expected a section, found {short_repr(section)}"
        yield document.finding(WRONG_SETTING_VALUE, TRITON_SECTION, message, "write its keys below it")
        return
    settings = BACKEND_SETTINGS if is_ours else _UPSTREAM_SETTINGS
    for key, value in (section or {}).items():
        if key in settings:
            if not type_strings.fits(value, settings[key]):
                expected = type_strings.in_words(settings[key])
                message = f"expected {expected}, found {short_repr(value)}"
                yield document.finding(WRONG_SETTING_VALUE, f"{TRITON_SECTION}.{key}", message, f"write {expected}")
        elif is_ours and find_argument(key_name(key)) is not None:
            dotted = f"{TRITON_SECTION}.{key_name(key)}"
            message = f"{dotted} is not a key of the backend, but an LLM argument"
            yield document.finding(WRONG_SETTING, dotted, message, "move it to the top level, without an indent")
        elif is_ours:
            yield _unknown(document, f"{TRITON_SECTION}.{key_name(key)}", "the backend", nearest_name(key, settings))
    if is_ours:
        sampling, warmup = ((section or {}).get(name) for name in ("default_sampling", "warmup"))
        fields = contract().SAMPLING_BY_NAME
        yield from _check_entries(document, "default_sampling", sampling, fields, sampling_problem)
        yield from _check_entries(document, "warmup", warmup, WARMUP_SETTINGS, warmup_problem)
        if isinstance(warmup, dict) and "shapes" not in warmup:
            fix = "write shapes: [[1, 64]], or warmup: null"
            key = f"{TRITON_SECTION}.warmup"
            yield document.finding(WRONG_SETTING_VALUE, key, "expected shapes, found none", fix)


def triton_settings(document: Document) -> Mapping[str, Any]:
    """Return the content of triton_config; nothing when it is no section."""
    section = document.values.get(TRITON_SECTION)
    return section if isinstance(section, dict) else {}


def _check_entries(
    document: Document,
    section: str,
    entries: Any,
    known: Mapping[str, Any],
    problem_of: Callable[[str, Any], str | None],
) -> Iterator[Finding]:
    """Find unknown keys and wrong values in a section below triton_config.

    :param problem_of: returns what is wrong with the value of a known key, if anything.
    """
    for name, value in entries.items() if isinstance(entries, dict) else ():
        dotted = f"{TRITON_SECTION}.{section}.{key_name(name)}"
        if name not in known:
            yield _unknown(document, dotted, section, nearest_name(name, known))
        elif problem := problem_of(name, value):
            fix = "write such a value, or leave the key out"
            yield document.finding(WRONG_SETTING_VALUE, dotted, problem, fix)


def _unknown(document: Document, dotted: str, owner: str, near: str | None) -> Finding:
    fix = f"did you mean {near}?" if near else "remove it, or write one of the keys in docs/configuration.md"
    return document.finding(WRONG_SETTING, dotted, f"{dotted} is not a key of {owner}", fix)
