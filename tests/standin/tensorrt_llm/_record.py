"""The release record this package stands in for."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml


def _read() -> dict[str, Any]:
    beside = Path(__file__).parents[1] / "release.yaml"
    path = Path(os.environ.get("STANDIN_RELEASE", beside))
    record: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return record


RECORD = _read()


def fields_of(class_name: str) -> dict[str, dict[str, Any]]:
    """The recorded fields of a class of LLM arguments, inherited ones included."""
    entry = RECORD["classes"][class_name]
    inherited = fields_of(entry["inherits"]) if "inherits" in entry else {}
    return {**inherited, **entry["fields"]}


def selected_sampler(llm_args: dict[str, Any]) -> str:
    """The sampler that the first fitting rule of the record names."""
    for rule in RECORD["sampler"]["choose"]:
        if all(_fits(wanted, _at(llm_args, path)) for path, wanted in rule["when"].items()):
            return str(rule["sampler"])
    raise AssertionError("the record has no last rule")


def honoured_fields(sampler: str) -> set[str]:
    section = RECORD["sampler"]
    return {*section["always"], *section["samplers"][sampler]["honours"]["fields"]}


def _fits(wanted: Any, given: Any) -> bool:
    return given is not None if wanted == "any" else bool(given == wanted)


def _at(llm_args: dict[str, Any], path: str) -> Any:
    value: Any = llm_args
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value
