"""Reads release.yaml: what is known about the TensorRT-LLM release for which this repository was generated.

The generator writes that record beside model.py, so nothing else has to be installed to read it. A repository for vLLM
has the record of a vLLM version under the same name, which `engines/vllm` reads.
"""

import importlib
import logging
import types
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from deepseek_backend.contract import SAMPLING_BY_NAME, SAMPLING_FIELDS
from deepseek_backend.errors import UNREADABLE_YAML, ConfigError

logger = logging.getLogger(__name__)

_ITS_FIELD = {field.name: "guided_decoding" for field in SAMPLING_FIELDS if field.guided}
"""Our field -> the field of TensorRT-LLM's SamplingParams that carries it, where the names differ."""
_FIELD_TYPES: dict[str, type] = {"str": str, "int": int}
FILE_NAME = "release.yaml"
_OPTIONS = ("allow_version_mismatch",)


@dataclass(frozen=True, kw_only=True)
class LogprobSupport:
    """The log-probabilities that a sampler returns for each generated token."""

    of: Literal["sampled", "likeliest"]
    """sampled: the token itself, without its rank. likeliest: the k likeliest tokens; the sampled token is there only
    when it is one of them."""
    most: int | None
    """Largest k that TensorRT-LLM takes. The least is 1, because 0 turns them off. None: no limit."""


@dataclass(frozen=True, kw_only=True)
class Conflict:
    """Sampling fields that a sampler honours one at a time but not together."""

    fields: tuple[str, ...]
    why: str


@dataclass(frozen=True, kw_only=True)
class SamplerSupport:
    """The effect of the fields of the wire contract with the sampler that a configuration selects."""

    sampler: str
    """Name of the sampler in the record."""
    fields: frozenset[str]
    """Names of `contract.SAMPLING_FIELDS` that TensorRT-LLM honours with it."""
    unsupported: Mapping[str, str]
    """Every other field, and priority -> the reason why it is not honoured."""
    conflicts: tuple[Conflict, ...] = ()
    logprobs: LogprobSupport | None = None
    """Set when `fields` has logprobs."""
    formats_refused: str = ""
    """Capabilities.formats_refused."""


@dataclass(frozen=True)
class EngineRelease:
    """The record of one TensorRT-LLM release."""

    record: Mapping[str, Any]

    @property
    def version(self) -> str:
        return str(self.record["release"])

    @property
    def backend_to_name(self) -> str | None:
        """The `backend` that the LLM arguments must name, where LLM() would run a TensorRT engine without it."""
        return "pytorch" if self.record.get("default_backend") == "tensorrt" else None

    def default(self, name: str) -> Any:
        """Return the value of a top-level LLM argument that is not given: its default, or what null stands for."""
        classes = self.record["classes"]
        row = {**classes["BaseLlmArgs"]["fields"], **classes["TorchLlmArgs"]["fields"]}[name]
        return row.get("in_effect", row["default"])

    def sampler_support(self, llm_args: Mapping[str, Any]) -> SamplerSupport:
        """Return what happens to each sampling field under `llm_args`.

        It is needed because the samplers of 1.0 to 1.2 accept many fields and ignore them.
        """
        section = self.record["sampler"]
        name = next(
            rule["sampler"]
            for rule in section["choose"]
            if all(_matches(value, llm_args, path) for path, value in rule["when"].items())
        )
        sampler = section["samplers"][name]
        needs = section["needs"]
        missing = [need for need in needs if not _matches(need.get("value", "any"), llm_args, need["llm_arg"])]
        refusals = [*section["lacks"], *missing, *sampler.get("fails", ()), *sampler["ignores"]]
        reasons = {
            field: f"TensorRT-LLM {self.version}: {entry['why']}" for entry in refusals for field in entry["fields"]
        }
        gives = sampler.get("logprobs", {})
        honoured = {*section["always"], *sampler["honours"]["fields"]} - reasons.keys()
        unknown = f"not established for the {name} of TensorRT-LLM {self.version}"
        formats_refused = ""
        # A record of an earlier version of this project may not have the feature.
        tags = self.record.get("features", {}).get("structural_tags_with_format", {})
        if tags.get("supported") is not True:
            formats_refused = f"TensorRT-LLM {self.version} has no structural tags with a format"
        elif llm_args.get("guided_decoding_backend") != "xgrammar":
            formats_refused = "only guided_decoding_backend: xgrammar has structural tags"
        return SamplerSupport(
            sampler=name,
            fields=frozenset(field for field in SAMPLING_BY_NAME if _ITS_FIELD.get(field, field) in honoured),
            unsupported={
                field: reasons.get(_ITS_FIELD.get(field, field), unknown)
                for field in (*SAMPLING_BY_NAME, "priority")
                if _ITS_FIELD.get(field, field) not in honoured
            },
            conflicts=tuple(
                Conflict(fields=tuple(entry["fields"]), why=f"TensorRT-LLM {self.version}: {entry['why']}")
                for entry in section["conflicts"]
            ),
            logprobs=LogprobSupport(of=gives["of"], most=gives["most"]) if "logprobs" in honoured else None,
            formats_refused=formats_refused,
        )


def _matches(value: Any, llm_args: Mapping[str, Any], path: str) -> bool:
    """Whether the argument at `path`, names joined by dots, has this value; "any" stands for any but null."""
    argument: Any = llm_args
    for name in path.split("."):
        argument = argument.get(name) if isinstance(argument, Mapping) else None
    return argument is not None if value == "any" else bool(argument == value)


def is_release(installed: str, version: str) -> bool:
    """Whether the installed package is this version. A local build (+...) and a post-release of it count."""
    return installed == version or installed.startswith((f"{version}+", f"{version}.post"))


def version_mismatch_allowed(options: Mapping[str, Any], *, engine: str) -> bool:
    """Check `engine_options` of an engine with a record; return its allow_version_mismatch.

    :raises ConfigError: with every problem found.
    """
    problems = [
        f"triton_config.engine_options.{name}: unknown key; known for {engine}: {', '.join(_OPTIONS)}"
        for name in options
        if name not in _OPTIONS
    ]
    allow: bool = options.get("allow_version_mismatch", False)
    if not isinstance(allow, bool):
        problems.append(f"triton_config.engine_options.allow_version_mismatch: expected true or false, got {allow!r}")
    if problems:
        raise ConfigError(problems)
    return allow


def read_release(version_dir: Path) -> EngineRelease:
    """Read the record of a TensorRT-LLM release in `version_dir`.

    :raises ConfigError: when the file is missing or is not such a record.
    """
    record = read_record(version_dir, option="--trtllm RELEASE")
    if not {"release", "classes", "sampler", "quirks", "mpi"} <= record.keys():
        path = version_dir / FILE_NAME
        raise ConfigError([f"{path}: not a TensorRT-LLM release record; generate the repository again"])
    return EngineRelease(record)


def read_record(version_dir: Path, *, option: str) -> Mapping[str, Any]:
    """Read release.yaml in `version_dir`; a document that is no mapping counts as an empty record.

    :param option: option of `deepseek-triton build` that makes a repository with this record, for the error.
    :raises ConfigError: when the file is missing or is not YAML.
    """
    path = version_dir / FILE_NAME
    try:
        # libyaml reads a record in a tenth of the half second that Python's own loader takes.
        record = yaml.load(path.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except OSError as error:
        fix = f"generate the repository with `deepseek-triton build {option}`, which writes it"
        raise ConfigError([f"{path}: can't be read: {error.strerror}; {fix}"]) from error
    except (yaml.YAMLError, *UNREADABLE_YAML) as error:
        raise ConfigError([f"{path}: not YAML: {' '.join(str(error).split())}"]) from error
    return record if isinstance(record, dict) else {}


def recorded_version(version_dir: Path) -> str:
    """Return the release or version whose record is in `version_dir`; "" without one.

    :raises ConfigError: when the file is there but is no record.
    """
    if not (version_dir / FILE_NAME).is_file():
        return ""
    record = read_record(version_dir, option="--trtllm RELEASE")
    return str(record["vllm"]) if "vllm" in record else read_release(version_dir).version


def apply_quirks(release: Mapping[str, Any]) -> list[str]:
    """Supply the names that TensorRT-LLM imports from a package that is too old in the container to have them.

    Call it before tensorrt_llm is imported. A name is supplied only where it is missing: a newer package is left alone.
    The engine's workers have the same faults, and get the names through `process/overlay/sitecustomize.py`: start.sh
    puts that folder on PYTHONPATH.

    :returns: `module.name` of everything supplied; each is logged too.
    """
    supplied = []
    for quirk in release["quirks"]:
        for missing in quirk.get("missing_names", ()):
            try:
                module = importlib.import_module(missing["module"])
            except ModuleNotFoundError:
                continue  # TensorRT-LLM's own message about the missing package is better
            if hasattr(module, missing["name"]):
                continue
            # A class with the base and the fields of the newer package's is enough for its import.
            package, _, base = missing["base"].rpartition(".")
            made = types.new_class(missing["name"], (getattr(importlib.import_module(package), base),))
            made.__module__ = missing["module"]
            made.__annotations__ = {name: _FIELD_TYPES[kind] for name, kind in missing["fields"].items()}
            setattr(module, missing["name"], made)
            supplied.append(f"{missing['module']}.{missing['name']}")
            logger.warning("supplied %s: %s (quirk %s)", supplied[-1], quirk["what"], quirk["id"])
    return supplied
