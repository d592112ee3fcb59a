"""Reads release.yaml as the record of a vLLM version, and compares the installed vLLM with it."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepseek_backend.errors import ConfigError
from deepseek_backend.release import FILE_NAME, is_release, read_record

CORE_ATTRIBUTES = ("engine_core", "input_processor")


@dataclass(frozen=True)
class VllmRelease:
    """The record of one vLLM version."""

    record: Mapping[str, Any]

    @property
    def version(self) -> str:
        return str(self.record["vllm"])

    @property
    def containers(self) -> Sequence[str]:
        """Triton's containers that carry this version, such as "26.07"."""
        return tuple(self.record.get("containers") or ())

    def matches(self, installed: str) -> bool:
        return is_release(installed, self.version)

    @property
    def max_temperature(self) -> float | None:
        """The highest temperature that vLLM takes; None where it takes any."""
        limit = (self.record["limits"].get("temperature") or {}).get("max")
        return None if limit is None else float(limit)

    @property
    def refused_with_drafts(self) -> frozenset[str]:
        """The fields of vLLM's SamplingParams that it refuses with speculative decoding."""
        return frozenset((self.record["limits"].get("speculative_config") or {}).get("refuses") or ())

    @property
    def spreads_by_reports(self) -> bool:
        """Whether vLLM spreads requests over ranks of data parallelism by their reports alone (`RankChoice`)."""
        return (self.record["limits"].get("data_parallel_size") or {}).get("spreads_by") == "reports"

    def differences(self, llm: Any) -> list[str]:
        """Return how the installed vLLM's own objects differ from those in the record, a line for each.

        :param llm: the AsyncLLM, of which `core_connection` reads two attributes that its class does not have.
        """
        missing = [f"AsyncLLM.{name} is not there" for name in CORE_ATTRIBUTES if not hasattr(llm, name)]
        interfaces = self.record["interfaces"].items()
        return missing + [line for name, recorded in interfaces if (line := _difference(str(name), recorded))]


def read_vllm_release(version_dir: Path) -> VllmRelease:
    """Read the record of a vLLM version in `version_dir`.

    :raises ConfigError: when the file is missing or is not such a record.
    """
    record = read_record(version_dir, option="--engine vllm --vllm VERSION")
    if not {"vllm", "arguments", "sampling_params", "structured_outputs", "limits", "interfaces"} <= record.keys():
        path = version_dir / FILE_NAME
        raise ConfigError([f"{path}: not the record of a vLLM version; generate the repository again"])
    return VllmRelease(record)


def _difference(name: str, recorded: Sequence[str]) -> str:
    """Return how the object `name`, such as "vllm.v1.engine:EngineCoreOutput", differs; "" when it does not."""
    module, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return f"{name} is not there"
    names = _names(found)
    return "" if names == list(recorded) else f"{name} has {', '.join(names)} instead of {', '.join(recorded)}"


def _names(found: Any) -> list[str]:
    """Return the fields of a class, or the parameters of a function without self."""
    if isinstance(found, type):
        if dataclasses.is_dataclass(found):
            return [field.name for field in dataclasses.fields(found)]
        # In this order: a Struct of msgspec, a NamedTuple, an Enum.
        for attribute in ("__struct_fields__", "_fields", "__members__"):
            if (names := getattr(found, attribute, None)) is not None:
                return list(names)
    return [name for name in inspect.signature(found).parameters if name not in ("self", "cls")]
