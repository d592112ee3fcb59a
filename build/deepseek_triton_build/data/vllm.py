"""Facts about each vLLM version: one YAML record a version, and the class that answers from it.

`tests/support/vllm_records.py` makes a record from the wheel's own source. The generator writes the record beside
model.py, and the engine reads it there.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from deepseek_triton_build.build_errors import UnknownNameError
from deepseek_triton_build.data.own_files import entry_of, load_yaml, read_data
from deepseek_triton_build.data.releases import is_after
from deepseek_triton_build.data.setting_types import DONE_BY_BACKEND

VLLM_VERSIONS = ("0.24.0", "0.25.1", "0.27.1", "0.31.0", "0.33.0")
"""Versions with a record, old to new."""

DEFAULT_VLLM = "0.27.1"
"""The vLLM of Triton's container 26.08, the newest whose vLLM is known."""


@dataclass(frozen=True, kw_only=True)
class Argument:
    """One engine argument (a field of AsyncEngineArgs), or one key of an argument that is a mapping."""

    name: str
    type: str
    """The type as Python writes it, or nearly, every alias written out; type_strings reads it."""
    default: Any
    """Text such as `CompilationConfig()` for a default that is an object."""


@dataclass(frozen=True, kw_only=True)
class Replacement:
    """The successor of a variable or argument that vLLM no longer has, or that is TensorRT-LLM's."""

    by: str | None
    """The argument, or the key of one (`attention_config.flash_attn_version`); None: there is none."""
    source: str
    values: Mapping[str, Any] | None = None
    """Old value, as text, -> new value; `otherwise` stands for all others. None: they are the same."""
    why: str = ""
    """A clause about what differs, or why there is no successor."""
    since: str = ""
    """The first version, of those that were looked at, that no longer reads the variable. Arguments have none."""

    def new_value(self, old: Any) -> Any:
        """Return the value that stands for `old`; None when the table has none."""
        if self.values is None:
            return old
        # The table's keys are as YAML and shells write them.
        text = str(old).lower() if isinstance(old, bool) else str(old)
        return self.values.get(text, self.values.get("otherwise"))


@dataclass(frozen=True, kw_only=True)
class VllmVersion:
    version: str
    arguments: Mapping[str, Argument] = field(repr=False)
    """Engine arguments by name."""
    sections: Mapping[str, Mapping[str, Argument]] = field(repr=False)
    """Argument that is a mapping -> its keys."""
    short_flags: Mapping[str, str] = field(repr=False)
    """Short flag of `vllm serve` (`-tp`) -> its argument. The long one is the argument's name with dashes."""
    serve_flags: frozenset[str] = field(repr=False)
    """Flags of `vllm serve` besides the arguments' own."""
    environment: frozenset[str] = field(repr=False)
    """Names of the VLLM_* variables that it reads. It only warns of others."""
    sampling_params: tuple[str, ...] = field(repr=False)
    limits: Mapping[str, Any] = field(repr=False)
    """Limits of sampling fields, and what is refused."""
    text: str = field(repr=False)
    """The record's YAML text, which is written into a repository."""

    @property
    def containers(self) -> tuple[str, ...]:
        """Tags of nvcr.io/nvidia/tritonserver:<tag>-vllm-python-py3, newest first."""
        return vllm_tags_with(self.version)

    @property
    def replaced_environment(self) -> Mapping[str, Replacement]:
        """Variables that earlier versions read and this one does not -> what replaced them."""
        return {name: row for name, row in _replacements("environment").items() if name not in self.environment}

    @property
    def moved_arguments(self) -> Mapping[str, Replacement]:
        """Names that are taken for arguments, as dotted paths -> what this version has instead."""
        return {name: row for name, row in _replacements("arguments").items() if self.find(name) is None}

    def find(self, key: str) -> Argument | None:
        """Return the argument, or the key of one, of a dotted path such as `speculative_config.method`."""
        section, _, name = key.rpartition(".")
        return (self.sections.get(section, {}) if section else self.arguments).get(name)

    def keys(self) -> list[str]:
        """Return every argument as a dotted path, each section before the keys in it."""
        return [*self.arguments, *(f"{name}.{key}" for name, keys in self.sections.items() for key in keys)]

    def why_refused(self, name: str, *, drafts: bool) -> str:
        """Why a request, with drafted tokens or without, may not have a sampling field of the contract; or nothing."""
        if drafts and name in self.limits.get("speculative_config", {}).get("refuses", ()):
            return f"vLLM {self.version} refuses it beside speculative_config"
        # vLLM has `bad` as bad_words, and the guides in a parameter of their own.
        known = {*self.sampling_params, *DONE_BY_BACKEND, "bad", "best_of", "return_perf_metrics"}
        return "" if name in known or name.startswith("guided_") else f"vLLM {self.version} does not have it"

    def is_before(self, version: str) -> bool:
        """Tell whether this version is older than `version`, compared by number: 0.9 is before 0.10."""
        return _numbers(self.version) < _numbers(version)


_VLLM = "-vllm-python-py3"


def vllm_image_name(tag: str) -> str:
    """Return the full name of the Triton container with a tag such as `26.07`."""
    return f"nvcr.io/nvidia/tritonserver:{tag}{_VLLM}"


def load_vllm(version: str) -> VllmVersion:
    """Return the record of a version of `VLLM_VERSIONS`.

    :raises UnknownNameError: for any other. For a version that a Triton container has, the text names the container and
        the nearest version with a record.
    """
    if version not in VLLM_VERSIONS:
        tags = vllm_tags_with(version)
        note = f"Triton's container {tags[0]} has it; the nearest known is {nearest_vllm(version)}" if tags else ""
        raise UnknownNameError("vLLM version", version, VLLM_VERSIONS, note=note)
    return _load(version)


def vllm_for_container(tag: str) -> VllmVersion:
    """Return the vLLM in the container nvcr.io/nvidia/tritonserver:<tag>-vllm-python-py3.

    :param tag: `26.07` itself, a whole tag, or a whole image name.
    :raises UnknownNameError: for an unknown container, and for one whose vLLM has no record.
    """
    month = container_month(tag)
    if month not in vllm_containers():
        newer = "no public page says which vLLM it has, and --vllm VERSION takes one that you know"
        note = newer if is_after(month, vllm_containers()) else ""
        known = [tag for tag, version in vllm_containers().items() if version in VLLM_VERSIONS]
        raise UnknownNameError("Triton container", tag.rpartition(":")[2], known, note=note)
    return load_vllm(vllm_containers()[month])


def container_month(tag: str) -> str:
    """Return the year and month, `26.07`, of a container, in one of the forms that vllm_for_container takes."""
    return tag.rpartition(":")[2].removesuffix(_VLLM)


@cache
def vllm_containers() -> Mapping[str, str]:
    """Return the vLLM version of every container whose version is known by its tag, newest first."""
    return {tag: row["vllm"] for tag, row in load_yaml("vllm_containers.yaml").items()}


def vllm_drivers() -> Mapping[str, str]:
    """Return the oldest NVIDIA driver that each of these containers runs on, by its tag."""
    return {tag: row["driver"] for tag, row in load_yaml("vllm_containers.yaml").items()}


def vllm_tags_with(version: str) -> tuple[str, ...]:
    """Return the tags of the containers with a version, newest first. No record is read."""
    return tuple(tag for tag, known in vllm_containers().items() if known == version)


def vllm_since(version: str) -> str:
    """Return DEFAULT_VLLM or, if that is older than `version`, the oldest version with a record that is not.

    :param version: empty for any.
    """
    least = _numbers(version or "0")
    return next(known for known in (DEFAULT_VLLM, *VLLM_VERSIONS) if _numbers(known) >= least)


def nearest_vllm(version: str) -> str:
    """Return the version with a record whose number is nearest to `version`; of two, the newer."""
    try:
        wanted = _numbers(version)
    except ValueError:
        return DEFAULT_VLLM
    return min(
        reversed(VLLM_VERSIONS),
        key=lambda known: [abs(ours - theirs) for ours, theirs in zip(_numbers(known), wanted, strict=False)],
    )


@cache
def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.partition("+")[0].split(".")[:3]))


@cache
def _replacements(kind: Literal["environment", "arguments"]) -> Mapping[str, Replacement]:
    file = "vllm_replaced_environment.yaml" if kind == "environment" else "vllm_moved_arguments.yaml"
    return {name: entry_of(f"{file}: {name}", Replacement, row) for name, row in load_yaml(file).items()}


@cache
def _load(version: str) -> VllmVersion:
    file = f"records/vllm-{version}.yaml"
    record = load_yaml(file)
    if record["vllm"] != version:
        raise LookupError(f"{file}: vllm: expected {version}, found {record['vllm']}")
    return VllmVersion(
        version=record["vllm"],
        arguments=_arguments(record["arguments"]),
        sections={name: _arguments(rows) for name, rows in record["sections"].items()},
        short_flags=record["short_flags"],
        serve_flags=frozenset(record["serve_flags"]),
        environment=frozenset(record["environment"]),
        sampling_params=tuple(record["sampling_params"]),
        limits=record["limits"],
        text=read_data(file),
    )


def _arguments(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Argument]:
    return {name: Argument(name=name, **row) for name, row in rows.items()}
