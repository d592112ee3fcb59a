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

from deepseek_triton_build.build_errors import RefusedPlanError, UnknownNameError
from deepseek_triton_build.data.yaml_files import load_yaml
from deepseek_triton_build.text import parse_yaml

RELEASES = ("1.2.1", "1.2.0", "1.1.0", "1.0.0", "0.21.0")
"""Releases that repositories are generated for, newest first."""

DEFAULT_RELEASE = RELEASES[0]
"""The TensorRT-LLM of the Triton containers 26.04 to 26.07, the newest published."""

READABLE_RELEASES = (*RELEASES, "0.19.0")
"""Releases with a record. The oldest is read only: to check and translate files of its time."""

_NO_RECORD = {
    "0.20.0": "whether it takes its PyTorch options nested, as 0.19.0, or flat, as 0.21.0, is not established; "
    "use 0.21.0 (container 25.08)",
    "1.0.3.2510": "no repository is made for it: a build of that container alone, not among the published packages, so "
    "that nothing public says what it takes; use 1.1.0 (container 25.12) or 1.0.0 (25.10)",
}
"""Releases in a container that can't have a record -> why, and what to use."""

Status = Literal["proven", "interpolated"]
Support = Literal["yes", "no", "unknown"]


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
class Feature:
    """Whether something works with DeepSeek in a release."""

    name: str
    supported: Support
    """Unknown: the public sources don't settle it."""
    source: str
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class ContainerImage:
    """What nvcr.io/nvidia/tritonserver:<tag>-trtllm-python-py3 carries."""

    tag: str
    """Year and month, `26.07`."""
    trtllm: str
    cuda: str
    driver: str
    """The least NVIDIA driver."""


@dataclass(frozen=True, kw_only=True)
class Release:
    """One TensorRT-LLM release."""

    version: str
    containers: tuple[str, ...]
    """Tags of nvcr.io/nvidia/tritonserver:<tag>-trtllm-python-py3, newest first."""
    default_backend: Literal["pytorch", "tensorrt"]
    """What LLM() runs unless the LLM arguments say `backend`."""
    text: str = field(repr=False)
    """The record as it is written into a repository."""
    record: Mapping[str, Any] = field(repr=False)
    """The record, parsed: sampler, mpi, quirks and the Python interface are read from here."""
    classes: Mapping[str, LlmClass] = field(repr=False)
    features: Mapping[str, Feature] = field(repr=False)
    """By name; every record has the same ones."""

    def is_before(self, version: str) -> bool:
        """Older than `version`, by number: 1.9 is before 1.10."""
        return _parts(self.version) < _parts(version)

    @property
    def has_samplers(self) -> bool:
        """Whether the record says which sampling fields work; those of releases that are only read do not."""
        return "sampler" in self.record

    def supports(self, feature: str) -> bool | None:
        """Whether `feature` works in this release; None when the public sources don't settle it."""
        answers = {"yes": True, "no": False, "unknown": None}
        return answers[self.features[feature].supported] if feature in self.features else None

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
        if self.is_settled(key):
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

    def is_settled(self, key: str) -> bool:
        """The class that `key` would belong to is listed whole, so that its absence is proof."""
        classes = [self.classes["TorchLlmArgs"]]
        for section in key.split(".")[:-1]:
            parent = _first(classes, section)
            if parent is None:
                break
            classes = [self.classes[below] for below in parent.sections]
        return all(llm_class.complete for llm_class in classes)


@cache
def _parts(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def load_release(version: str) -> Release:
    """The record of one release of `READABLE_RELEASES`.

    :raises RefusedPlanError: for a release in a container that has no record for a reason.
    :raises UnknownNameError: for any other without one.
    """
    if version in _NO_RECORD:
        raise RefusedPlanError(f"TensorRT-LLM {version} can't be used: {_NO_RECORD[version]}")
    if version not in READABLE_RELEASES:
        raise UnknownNameError("TensorRT-LLM release", version, READABLE_RELEASES)
    return _load(version)


@cache
def containers() -> Mapping[str, ContainerImage]:
    """Every published container by tag, newest first, those without a usable release too."""
    rows: Mapping[str, Mapping[str, str]] = load_yaml(__name__, "containers.yaml")
    return {tag: ContainerImage(tag=tag, **row) for tag, row in rows.items()}


_TRTLLM = "-trtllm-python-py3"


def image_name(tag: str) -> str:
    """The Triton container with the tag `26.07`."""
    return f"nvcr.io/nvidia/tritonserver:{tag}{_TRTLLM}"


def container_tag(tag: str) -> str:
    """`26.07` of that, of a whole tag, or of a whole image name.

    :raises UnknownNameError: for what is none of them.
    :raises RefusedPlanError: for a Triton container without TensorRT-LLM.
    """
    whole = tag.rpartition(":")[2]
    month, dash, flavour = whole.partition("-")
    if month in containers() and dash and f"{dash}{flavour}" != _TRTLLM:
        raise RefusedPlanError(f"container {whole} carries no TensorRT-LLM; use {month}{_TRTLLM}")
    if month not in containers():
        usable = [known for known, row in containers().items() if row.trtllm in RELEASES]
        raise UnknownNameError("Triton container", whole, usable)
    return month


def release_for_container(tag: str) -> Release:
    """The release in the container nvcr.io/nvidia/tritonserver:<tag>-trtllm-python-py3.

    :param tag: as container_tag takes it.
    :raises UnknownNameError: for a container nobody knows.
    :raises RefusedPlanError: for one whose release repositories are not generated for.
    """
    month = container_tag(tag)
    version = containers()[month].trtllm
    if version not in RELEASES:
        newest = next(known for known, row in containers().items() if row.trtllm == RELEASES[0])
        why = _NO_RECORD.get(version, f"no repository is made for it; use {newest} (TensorRT-LLM {RELEASES[0]})")
        raise RefusedPlanError(f"container {month} carries TensorRT-LLM {version}: {why}")
    return _load(version)


@cache
def _load(version: str) -> Release:
    text = (resources.files(__name__) / f"{version}.yaml").read_text(encoding="utf-8")
    record = parse_yaml(text)
    return Release(
        version=record["release"],
        containers=tuple(record["containers"]),
        default_backend=record["default_backend"],
        text=text,
        record=record,
        classes={name: _llm_class(name, record["classes"]) for name in record["classes"]},
        features={name: _feature(name, row) for name, row in record["features"].items()},
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


_SUPPORT: Mapping[bool | str, Support] = {True: "yes", False: "no", "unknown": "unknown"}


def _feature(name: str, row: Mapping[str, Any]) -> Feature:
    return Feature(name=name, supported=_SUPPORT[row["supported"]], source=row["source"], note=row.get("note", ""))


def _first(classes: list[LlmClass], name: str) -> Field | None:
    return next((llm_class.fields[name] for llm_class in classes if name in llm_class.fields), None)
