"""What is known of each TensorRT-LLM release: one YAML record each, and questions to it.

The record is also what the backend and the tests read: the generator writes the target's own beside model.py.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any, Literal

import yaml

from deepseek_triton_build.errors import RefusedPlanError, UnknownNameError

RELEASES = ("1.2.1", "1.2.0", "1.1.0", "1.0.0")
"""Releases with a record, newest first."""

Status = Literal["proven", "interpolated"]


@dataclass(frozen=True, kw_only=True)
class Field:
    """One LLM argument, or one key of a section."""

    name: str
    type: str
    """As Python would spell it, for people."""
    default: Any
    status: Status
    """Proven: read in that release. Interpolated: in releases before and after it."""
    sections: tuple[str, ...] = ()
    """Classes whose keys may stand below this one."""
    discriminator: str | None = None
    """The key below this one that chooses among `sections`."""


@dataclass(frozen=True, kw_only=True)
class LlmClass:
    """A class of LLM arguments; unknown keys stop the load."""

    name: str
    complete: bool
    """Every key of the class is listed, so a key that isn't is wrong; otherwise it is only unknown."""
    fields: Mapping[str, Field]
    """Inherited ones included."""


@dataclass(frozen=True, kw_only=True)
class Release:
    """One TensorRT-LLM release."""

    version: str
    containers: tuple[str, ...]
    """Tags of nvcr.io/nvidia/tritonserver:<tag>-trtllm-python-py3, newest first."""
    text: str = field(repr=False)
    """The record as it is written into a repository."""
    record: Mapping[str, Any] = field(repr=False)
    """The record, parsed: sampler, mpi, quirks and the Python interface are read from here."""
    classes: Mapping[str, LlmClass] = field(repr=False)

    @property
    def image(self) -> str:
        """The newest Triton container that carries this release."""
        return f"nvcr.io/nvidia/tritonserver:{self.containers[0]}-trtllm-python-py3"

    def find_key(self, key: str) -> Field | None:
        """The field a dotted path such as `kv_cache_config.dtype` names, or None when it is not known to exist."""
        classes = [self.classes["TorchLlmArgs"]]
        *sections, name = key.split(".")
        for section in sections:
            parent = _first(classes, section)
            if parent is None:
                return None
            classes = [self.classes[below] for below in parent.sections]
            if name == parent.discriminator:
                return Field(name=name, type="str", default=None, status=parent.status)
        return _first(classes, name)

    def require_key(self, key: str) -> Field:
        """The field `key` names.

        :raises RefusedPlanError: when this release doesn't have it or isn't known to; says which, and the nearest key.
        """
        found = self.find_key(key)
        if found is not None:
            return found
        nearest = difflib.get_close_matches(key, self.keys(), n=1)
        hint = f"; did you mean {nearest[0]}?" if nearest else ""
        if self._is_settled(key):
            raise RefusedPlanError(f"{key} is not an LLM argument of TensorRT-LLM {self.version}{hint}")
        raise RefusedPlanError(f"{key} is not known to be an LLM argument of TensorRT-LLM {self.version}{hint}")

    def keys(self) -> list[str]:
        """Every known key as a dotted path, sections before what is in them."""
        return list(self._keys(self.classes["TorchLlmArgs"], ""))

    def _keys(self, llm_class: LlmClass, prefix: str) -> list[str]:
        keys = []
        for name, entry in llm_class.fields.items():
            keys.append(prefix + name)
            if entry.discriminator:
                keys.append(f"{prefix}{name}.{entry.discriminator}")
            for section in entry.sections:
                keys += self._keys(self.classes[section], f"{prefix}{name}.")
        return keys

    def _is_settled(self, key: str) -> bool:
        """The class that `key` would belong to is listed whole, so that its absence is proof."""
        classes = [self.classes["TorchLlmArgs"]]
        for section in key.split(".")[:-1]:
            parent = _first(classes, section)
            if parent is None:
                break
            classes = [self.classes[below] for below in parent.sections]
        return all(llm_class.complete for llm_class in classes)


def load_release(version: str) -> Release:
    """The record of one release.

    :raises UnknownNameError: for a release without one.
    """
    if version not in RELEASES:
        raise UnknownNameError("TensorRT-LLM release", version, RELEASES)
    return _load(version)


def release_for_container(tag: str) -> Release:
    """The release in the container nvcr.io/nvidia/tritonserver:<tag>-trtllm-python-py3.

    `tag` may be `26.07`, a whole tag or a whole image name.

    :raises UnknownNameError: for a container without a recorded release.
    """
    month = tag.rpartition(":")[2].partition("-")[0]
    by_container = {container: version for version in RELEASES for container in _load(version).containers}
    if month not in by_container:
        raise UnknownNameError("Triton container", month, by_container)
    return _load(by_container[month])


@cache
def _load(version: str) -> Release:
    text = resources.files(__name__).joinpath(f"{version}.yaml").read_text(encoding="utf-8")
    record = yaml.safe_load(text)
    return Release(
        version=record["release"],
        containers=tuple(record["containers"]),
        text=text,
        record=record,
        classes={name: _llm_class(name, record["classes"]) for name in record["classes"]},
    )


def _llm_class(name: str, entries: Mapping[str, Any]) -> LlmClass:
    entry = entries[name]
    inherited = _llm_class(entry["inherits"], entries) if "inherits" in entry else None
    own = {key: _field(key, row) for key, row in entry["fields"].items()}
    return LlmClass(
        name=name,
        complete=entry["complete"] and (inherited is None or inherited.complete),
        fields={**inherited.fields, **own} if inherited else own,
    )


def _field(name: str, row: Mapping[str, Any]) -> Field:
    choice = row.get("class_by", {})
    return Field(
        name=name,
        type=row["type"],
        default=row["default"],
        status=row["status"],
        sections=(row["class"],) if "class" in row else tuple(choice.get("classes", {}).values()),
        discriminator=choice.get("key"),
    )


def _first(classes: list[LlmClass], name: str) -> Field | None:
    return next((llm_class.fields[name] for llm_class in classes if name in llm_class.fields), None)
