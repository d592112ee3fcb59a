"""Dynamo's releases: the TensorRT-LLM build in each, and which LLM arguments are proven for that build."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from deepseek_triton_build.build_errors import UnknownNameError
from deepseek_triton_build.data.own_files import load_yaml
from deepseek_triton_build.data.releases import RELEASES, load_release

DEFAULT_DYNAMO = "1.5.0"
"""The newest Dynamo release with a known TensorRT-LLM build."""


@dataclass(frozen=True, kw_only=True)
class DynamoRelease:
    """One release of Dynamo."""

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
        return self._final in RELEASES

    @property
    def keys_of(self) -> str:
        """The release whose keys are written: the final one of the build, or else the newest."""
        return self._final if self.is_candidate else RELEASES[0]

    @property
    def _final(self) -> str:
        return self.trtllm.partition("rc")[0]

    def unproven(self, keys: Iterable[str], release: str) -> list[str]:
        """Return those of `keys`, in the spelling of `release`, that nothing public shows for this build.

        A key is proven when the final releases before and after the build have it, or, for a build without a final
        release, when the record of RELEASES[0] has it and NVIDIA's own files for such a build do.
        """
        if self.is_candidate:
            before = next(known for known in RELEASES if load_release(known).is_before(self._final))
            records = [load_release(version) for version in {before, self._final, release}]
            return [key for key in keys if not all(record.find_key(key) for record in records)]
        newest, seen = load_release(RELEASES[0]), _table()["seen_in_1_3"]
        # A section that is null is seen where a key in it is.
        return [
            key
            for key in keys
            if newest.find_key(key) is None or not any(entry == key or entry.startswith(f"{key}.") for entry in seen)
        ]


def dynamo_releases() -> tuple[str, ...]:
    """Return the names of the known releases, oldest first."""
    return tuple(_table()["releases"])


def find_dynamo(version: str | None) -> DynamoRelease:
    """Return the Dynamo release of that name, or raise UnknownNameError, which names the nearest. None: the newest."""
    version = DEFAULT_DYNAMO if version is None else version
    rows = _table()["releases"]
    if version not in rows:
        raise UnknownNameError("Dynamo release", version, rows)
    return DynamoRelease(version=version, **rows[version])


@cache
def _table() -> Mapping[str, Any]:
    table: Mapping[str, Any] = load_yaml("dynamo_releases.yaml")
    return table
