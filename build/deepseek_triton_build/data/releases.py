"""Facts about each TensorRT-LLM release: one YAML record a release, and the class that answers from it. At the
end, Dynamo's releases, each of which has a build of TensorRT-LLM.

The backend and the tests read the same records: the generator writes the target's own record beside model.py.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Literal

from deepseek_triton_build.build_errors import RefusedPlanError, UnknownNameError
from deepseek_triton_build.data.own_files import entry_of, load_yaml, read_data
from deepseek_triton_build.text import nearest_name

RELEASES = ("1.2.1", "1.2.0", "1.1.0", "1.0.0", "0.21.0")
"""Releases that repositories are generated for, newest first."""

DEFAULT_RELEASE = RELEASES[0]
"""The TensorRT-LLM of the Triton containers 26.04 to 26.07, the newest that have one."""

CANDIDATES = ("1.3.0rc29",)
"""Release candidates that files of TensorRT-LLM's own programs and of Dynamo are written for. No Triton container has
one, so no repository is."""

READABLE_RELEASES = (*CANDIDATES, *RELEASES, "0.19.0")
"""Releases with a record, newest first. 0.19.0 is there only for checking and translating files of its time."""

# Releases of containers that can't have a record -> why, and what to use instead.
_NO_RECORD = {
    "0.20.0": "it is not established whether it takes its PyTorch options nested, as 0.19.0 does, or flat, as 0.21.0 "
    "does; use 0.21.0 (container 25.08)",
    "1.0.3.2510": "no repository is made for it: only that container has this build, which is not among the published "
    "packages, so nothing public says what it takes; use 1.1.0 (container 25.12) or 1.0.0 (25.10)",
}

Status = Literal["proven", "interpolated"]


@dataclass(frozen=True, kw_only=True)
class Field:
    """One LLM argument, or one key of a section."""

    name: str
    type: str
    """The type as Python writes it, or nearly; type_strings reads it."""
    default: Any
    status: Status
    """proven: read in that release; interpolated: found in releases before and after it."""
    sections: tuple[str, ...] = ()
    """Names of the classes whose keys this key may hold."""
    discriminator: str | None = None
    """The key inside that chooses among `sections`."""


@dataclass(frozen=True, kw_only=True)
class LlmClass:
    """A class of LLM arguments. The engine doesn't load with a key that the class hasn't."""

    name: str
    complete: bool
    """Whether every key of the class is listed: then a missing key is wrong, otherwise it is only unknown."""
    fields: Mapping[str, Field]
    """Fields by name, the inherited ones included."""


@dataclass(frozen=True, kw_only=True)
class ContainerImage:
    """The versions in the container nvcr.io/nvidia/tritonserver:<tag>-trtllm-python-py3."""

    tag: str
    """Year and month, such as `26.07`."""
    trtllm: str
    cuda: str
    driver: str
    """The oldest NVIDIA driver that the container runs on."""


@dataclass(frozen=True, kw_only=True)
class Release:
    """One TensorRT-LLM release."""

    version: str
    default_backend: Literal["pytorch", "tensorrt"]
    """The engine that LLM() runs unless the LLM arguments give `backend`."""
    record: Mapping[str, Any] = field(repr=False)
    """The record, parsed: sampler, mpi, quirks and the Python interface are read from here."""
    classes: Mapping[str, LlmClass] = field(repr=False)
    features: Mapping[str, bool | None] = field(repr=False)
    """Whether something works with DeepSeek, by its name; None: the public sources don't settle it. Every record has
    the same names."""

    @property
    def text(self) -> str:
        """The record as YAML, which is written into a repository: its file, or all where that has only differences."""
        if "before" not in self.record:
            return read_data(f"records/trtllm-{self.version}.yaml")
        import yaml

        return str(yaml.safe_dump(self.record, sort_keys=False))

    @property
    def containers(self) -> tuple[str, ...]:
        """Tags of nvcr.io/nvidia/tritonserver:<tag>-trtllm-python-py3, newest first."""
        return tags_with(self.version)

    def is_before(self, version: str) -> bool:
        """Tell whether this release is older than `version`, compared by number: 1.9 is before 1.10."""
        return version_numbers(self.version) < version_numbers(version)

    @property
    def has_samplers(self) -> bool:
        """Whether the record says which sampling fields work; 0.19.0's, which is only read, does not."""
        return "sampler" in self.record

    def supports(self, feature: str) -> bool | None:
        """Tell whether `feature` works in this release; None when the public sources don't settle it."""
        return self.features.get(feature)

    def find_key(self, key: str) -> Field | None:
        """Return the field of a dotted path such as `kv_cache_config.dtype`; None when it is not known to exist."""
        section, _, name = key.rpartition(".")
        parent = self.find_key(section) if section else None
        if section and parent is None:
            return None
        if parent is not None and name == parent.discriminator:
            return Field(name=name, type="str", default=None, status=parent.status)
        classes = self._classes_of(parent)
        return next((llm_class.fields[name] for llm_class in classes if name in llm_class.fields), None)

    def _classes_of(self, section: Field | None) -> list[LlmClass]:
        """Return the classes of which a section's keys are; None: of the top level."""
        return [self.classes[name] for name in (section.sections if section is not None else ("TorchLlmArgs",))]

    def require_key(self, key: str) -> Field:
        """Return the field of the dotted path `key`.

        :raises RefusedPlanError: when this release doesn't have it, or isn't known to have it. The text says which of
            the two, and the nearest key.
        """
        found = self.find_key(key)
        if found is not None:
            return found
        near = nearest_name(key, self.keys())
        hint = f"; did you mean {near}?" if near else ""
        known = "" if self.is_settled(key) else "known to be "
        raise RefusedPlanError(f"{key} is not {known}an LLM argument of TensorRT-LLM {self.version}{hint}")

    def keys(self) -> list[str]:
        """Return every known key as a dotted path, each section before the keys in it."""
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
        """Tell whether the class that `key` would belong to is listed in full, so that a missing key is proven."""
        section = key.rpartition(".")[0]
        while section and self.find_key(section) is None:
            section = section.rpartition(".")[0]
        return all(llm_class.complete for llm_class in self._classes_of(self.find_key(section) if section else None))


@cache
def version_numbers(version: str) -> tuple[int, ...]:
    """Return the numbers that versions are compared by. A candidate, 1.3.0rc29, is not before its release."""
    return tuple(map(int, re.findall(r"\d+", version)))


def load_release(version: str | None) -> Release:
    """Return the record of a release of `READABLE_RELEASES`. None: the default.

    :raises RefusedPlanError: for a release of a container that can't have a record; the text says why.
    :raises UnknownNameError: for any other release.
    """
    version = DEFAULT_RELEASE if version is None else version
    if version in _NO_RECORD:
        raise RefusedPlanError(f"TensorRT-LLM {version} can't be used: {_NO_RECORD[version]}")
    if version not in READABLE_RELEASES:
        raise UnknownNameError("TensorRT-LLM release", version, READABLE_RELEASES)
    return _load(version)


@cache
def containers() -> Mapping[str, ContainerImage]:
    """Return every published container by tag, newest first, also those whose release can't be used."""
    rows: Mapping[str, Mapping[str, str]] = load_yaml("trtllm_containers.yaml")
    return {tag: entry_of(f"trtllm_containers.yaml: {tag}", ContainerImage, row, tag=tag) for tag, row in rows.items()}


def without_image() -> str:
    """Say that no Triton container has a candidate."""
    tag, last = next(iter(containers().items()))
    return f"no public Triton container has it, they end at {tag} with {last.trtllm}"


def last_image() -> str:
    """Say that newer containers have no TensorRT-LLM, so that nobody waits for one."""
    return f"no Triton container after {next(iter(containers()))} is known to have TensorRT-LLM"


def is_after(month: str, known: Iterable[str]) -> bool:
    """Tell whether `month` is one as of containers, such as `26.08`, and none of those known is as new."""
    return re.fullmatch(r"\d\d\.\d\d", month) is not None and month > max(known)


def tags_with(version: str) -> tuple[str, ...]:
    """Return the tags of the containers with a release, newest first. No record is read."""
    return tuple(tag for tag, container in containers().items() if container.trtllm == version)


_TRTLLM = "-trtllm-python-py3"


def image_name(tag: str) -> str:
    """Return the full name of the Triton container with a tag such as `26.07`."""
    return f"nvcr.io/nvidia/tritonserver:{tag}{_TRTLLM}"


def release_image_name(version: str) -> str:
    """Return the full name of TensorRT-LLM's own container (deployment guide for DeepSeek-R1, Run Docker Container)."""
    return f"nvcr.io/nvidia/tensorrt-llm/release:{version}"


def container_tag(tag: str) -> str:
    """Return the year and month, `26.07`, of a container.

    :param tag: `26.07` itself, a whole tag, or a whole image name.
    :raises UnknownNameError: for anything else.
    :raises RefusedPlanError: for a Triton container without TensorRT-LLM.
    """
    whole = tag.rpartition(":")[2]
    month, dash, flavour = whole.partition("-")
    if month in containers() and dash and f"{dash}{flavour}" != _TRTLLM:
        raise RefusedPlanError(f"container {whole} carries no TensorRT-LLM; use {month}{_TRTLLM}")
    if month not in containers():
        usable = [known for known, row in containers().items() if row.trtllm in RELEASES]
        note = last_image() if is_after(month, containers()) else ""
        raise UnknownNameError("Triton container", whole, usable, note=note)
    return month


def release_for_container(tag: str) -> Release:
    """Return the release in the container nvcr.io/nvidia/tritonserver:<tag>-trtllm-python-py3.

    :param tag: in one of the forms that container_tag takes.
    :raises UnknownNameError: for an unknown container.
    :raises RefusedPlanError: for a container whose release no repository is generated for.
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
    record = load_yaml(f"records/trtllm-{version}.yaml")
    if before := record.get("before"):
        # What differs is listed by classes and features, everything else by sections.
        known = _load(before).record
        both = {name: {**known[name], **record.get(name, {})} for name in ("classes", "features")}
        record = {**known, **record, **both}
    if record["release"] != version:
        raise LookupError(f"records/trtllm-{version}.yaml: release: expected {version}, found {record['release']}")
    return Release(
        version=record["release"],
        default_backend=record["default_backend"],
        record=record,
        classes={name: _llm_class(name, record["classes"]) for name in record["classes"]},
        features={
            name: None if row["supported"] == "unknown" else bool(row["supported"])
            for name, row in record["features"].items()
        },
    )


def _llm_class(name: str, entries: Mapping[str, Any]) -> LlmClass:
    entry = entries[name]
    inherited = _llm_class(entry["inherits"], entries) if "inherits" in entry else None
    own = {
        key: Field(
            name=key,
            type=row["type"],
            default=row["default"],
            status=row["status"],
            sections=(row["class"],) if "class" in row else tuple(row.get("class_by", {}).get("classes", {}).values()),
            discriminator=row.get("class_by", {}).get("key"),
        )
        for key, row in entry["fields"].items()
    }
    return LlmClass(
        name=name,
        complete=entry["complete"] and (inherited is None or inherited.complete),
        fields={**inherited.fields, **own} if inherited else own,
    )


# The samplers of 0.21 to 1.2 accept every sampling field and ignore many, so a default that the sampler ignores is
# never written.


def sampler_of(release: Release, settings: Mapping[str, Any]) -> str:
    """Return the sampler that `settings` select: the one of the record's first rule whose conditions all hold.

    :param settings: LLM arguments as dotted paths, under the release's own keys.
    """

    def holds(key: str, value: Any) -> bool:
        if value == "any":
            return settings.get(key) is not None or any(name.startswith(f"{key}.") for name in settings)
        return bool(settings.get(key) == value)

    for rule in release.record["sampler"]["choose"]:
        if all(holds(key, value) for key, value in rule["when"].items()):
            return str(rule["sampler"])
    raise LookupError(f"the record of {release.version} has no rule at its end that always holds")


def honoured_fields(release: Release, settings: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of the SamplingParams fields that work under `settings`."""
    section = release.record["sampler"]
    sampler = section["samplers"][sampler_of(release, settings)]
    return frozenset((*section["always"], *sampler["honours"]["fields"]))


DEFAULT_DYNAMO = "1.6.2"
"""The newest Dynamo release whose API and flags are known."""


@dataclass(frozen=True, kw_only=True)
class DynamoRelease:
    version: str
    trtllm: str
    """The TensorRT-LLM build in its container, such as 1.3.0rc25."""
    api: Literal["v1alpha1", "v1beta1"]

    @property
    def image(self) -> str:
        return f"nvcr.io/nvidia/ai-dynamo/tensorrtllm-runtime:{self.version}"

    @property
    def is_candidate(self) -> bool:
        """Whether the build is a candidate of a release that is known here."""
        return self.final in RELEASES

    @property
    def keys_of(self) -> str:
        """The release whose keys are written: the final one of the build, or else the newest that is not after it."""
        newest_first = (known for known in (*CANDIDATES, *RELEASES) if not self.is_before(known))
        return self.final if self.is_candidate else next(newest_first)

    def is_before(self, version: str) -> bool:
        """Tell whether the build is older than `version`."""
        return version_numbers(self.trtllm) < version_numbers(version)

    @property
    def final(self) -> str:
        """The release that its build leads to, such as 1.3.0."""
        return self.trtllm.partition("rc")[0]

    def unproven(self, keys: Iterable[str], release: str) -> list[str]:
        """Return those of `keys`, in the spelling of `release`, that nothing public shows for this build.

        A key is proven when the build's own record says so; when the final releases before and after the build have it;
        or, for a build with neither, when the record of `keys_of` has it and NVIDIA's own files for such a build do.
        """
        if release == self.trtllm:
            return [key for key in keys if load_release(release).require_key(key).status != "proven"]
        if self.is_candidate:
            before = next(known for known in RELEASES if load_release(known).is_before(self.final))
            records = [load_release(version) for version in {before, self.final, release}]
            return [key for key in keys if not all(record.find_key(key) for record in records)]
        newest, seen = load_release(self.keys_of), _dynamo_table()["seen_in"][self.final]
        # A section that is null is seen where a key in it is.
        return [
            key
            for key in keys
            if newest.find_key(key) is None or not any(entry == key or entry.startswith(f"{key}.") for entry in seen)
        ]


def find_dynamo(version: str | None) -> DynamoRelease:
    """Return the Dynamo release of that name, or raise UnknownNameError, which names the nearest. None: the newest."""
    version = DEFAULT_DYNAMO if version is None else version
    rows = _dynamo_table()["releases"]
    if version not in rows:
        raise UnknownNameError("Dynamo release", version, rows)
    return entry_of(f"dynamo_releases.yaml: {version}", DynamoRelease, rows[version], version=version)


_dynamo_table = cache(partial(load_yaml, "dynamo_releases.yaml"))
