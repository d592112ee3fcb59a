"""What stands under triton_config: the settings of the model.py that reads it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from deepseek_triton_build.check.codes import WRONG_SETTING, WRONG_SETTING_VALUE
from deepseek_triton_build.check.documents import Document
from deepseek_triton_build.check.finding import Finding
from deepseek_triton_build.check.schema import TRITON_SECTION
from deepseek_triton_build.data import type_strings
from deepseek_triton_build.data.model_source import contract
from deepseek_triton_build.data.setting_types import BACKEND_SETTINGS, WARMUP_SETTINGS, sampling_problem, warmup_problem
from deepseek_triton_build.text import nearest, plain, shown

_UPSTREAM_SETTINGS: Mapping[str, str] = {
    "max_batch_size": "int 0..",
    "decoupled": "bool",
    "cancellation_check_period_ms": "int 1..",
}
"""Of upstream's model.py, which takes other keys too (NVIDIA/TensorRT-LLM llmapi model.yaml)."""


def check_triton_config(document: Document, *, is_ours: bool) -> Iterator[Finding]:
    section = document.values.get(TRITON_SECTION)
    if section is not None and not isinstance(section, dict):
        yield _wrong_value(
            document, TRITON_SECTION, f"expected a section, found {shown(section)}", "write its keys below it"
        )
        return
    settings = BACKEND_SETTINGS if is_ours else _UPSTREAM_SETTINGS
    for key, value in (section or {}).items():
        if key in settings:
            yield from _check_value(document, str(key), value, settings[key])
        elif is_ours:
            yield _unknown(document, f"{TRITON_SECTION}.{plain(str(key))}", "the backend", nearest(key, settings))
    if is_ours:
        yield from _check_sampling(document, (section or {}).get("default_sampling"))
        yield from _check_warmup(document, (section or {}).get("warmup"))


def triton_settings(document: Document) -> Mapping[str, Any]:
    """What triton_config holds."""
    section = document.values.get(TRITON_SECTION)
    return section if isinstance(section, dict) else {}


def _check_value(document: Document, key: str, value: Any, spelled: str) -> Iterator[Finding]:
    if type_strings.fits(value, spelled):
        return
    expected = type_strings.in_words(spelled)
    dotted = f"{TRITON_SECTION}.{key}"
    yield _wrong_value(document, dotted, f"expected {expected}, found {shown(value)}", f"write {expected}")


def _check_sampling(document: Document, given: Any) -> Iterator[Finding]:
    known = contract().SAMPLING_BY_NAME
    for name, value in given.items() if isinstance(given, dict) else ():
        dotted = f"{TRITON_SECTION}.default_sampling.{plain(str(name))}"
        if name not in known:
            yield _unknown(document, dotted, "the sampling fields", nearest(name, known))
        elif problem := sampling_problem(name, value):
            yield _wrong_value(document, dotted, problem, "write one, or leave it out")


def _check_warmup(document: Document, given: Any) -> Iterator[Finding]:
    dotted = f"{TRITON_SECTION}.warmup"
    for name, value in given.items() if isinstance(given, dict) else ():
        key = f"{dotted}.{plain(str(name))}"
        if name not in WARMUP_SETTINGS:
            yield _unknown(document, key, "the warm-up", nearest(name, WARMUP_SETTINGS))
        elif problem := warmup_problem(name, value):
            yield _wrong_value(document, key, problem, "write one, or leave it out")
    if isinstance(given, dict) and "shapes" not in given:
        yield _wrong_value(document, dotted, "expected shapes, found none", "write shapes: [[1, 64]], or warmup: null")


def _unknown(document: Document, dotted: str, of: str, near: str | None) -> Finding:
    fix = f"did you mean {near}?" if near else "remove it; docs/configuration.md has the keys there are"
    line = document.line(dotted)
    return WRONG_SETTING.finding(f"{dotted} is not a key of {of}", fix, file=document.file, line=line, key=dotted)


def _wrong_value(document: Document, dotted: str, message: str, fix: str) -> Finding:
    line = document.line(dotted)
    return WRONG_SETTING_VALUE.finding(f"{dotted}: {message}", fix, file=document.file, line=line, key=dotted)
