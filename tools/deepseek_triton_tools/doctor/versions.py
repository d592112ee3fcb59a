"""Versions, compared by their numbers, and those that are known not to work together.

"1.10" comes after "1.9", and "4.1.9a1" counts as 4.1.9. A release candidate is told apart only when it is compared with
another candidate: "1.3.0rc13" is before "1.3.0rc14", and "1.3.0" is not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


def version_numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers; () when there are none."""
    match = re.match(r"[v=]?(\d+(?:\.\d+)*)", version.strip())
    return tuple(map(int, match[1].split("."))) if match else ()


def _candidate(version: str) -> int | None:
    """Return 13 for "1.3.0rc13"."""
    match = re.search(r"rc(\d+)", version)
    return int(match[1]) if match else None


def is_before(version: str, other: str) -> bool:
    """Return whether `version` is older than `other`; False when it has no number."""
    mine, theirs = version_numbers(version), version_numbers(other)
    length = max(len(mine), len(theirs))
    if not mine:
        return False
    padded, bound = (each + (0,) * (length - len(each)) for each in (mine, theirs))
    if padded == bound and (candidate := _candidate(other)):
        return (_candidate(version) or candidate) < candidate
    return padded < bound


CONTAINER = "container"
"""Key of the Triton container's tag, among the names of distributions."""


@dataclass(frozen=True, kw_only=True)
class Versions:
    """Versions from `since` on, and older than `before`."""

    since: str | None = None
    before: str | None = None

    def contains(self, version: str) -> bool:
        """Return False also for a version without a number."""
        if not version_numbers(version) or (self.since and is_before(version, self.since)):
            return False
        return self.before is None or is_before(version, self.before)


@dataclass(frozen=True, kw_only=True)
class BadCombination:
    versions: Mapping[str, Versions]
    """Distribution -> versions. All of them must be present at once."""
    what: str
    """The failure, in words."""
    fix: str
    source: str
    stops_the_load: bool = True
    fixed_by_start_sh: bool = False
    """Whether the start.sh of a generated repository works around it."""


# Combinations of what is read from the installed packages. mpi.py judges Open MPI, because only mpirun
# tells its version.
KNOWN_BAD: Sequence[BadCombination] = (
    BadCombination(
        versions={"openai": Versions(before="1.108.1"), "tensorrt_llm": Versions(since="1.2.0", before="1.3.0")},
        what="openai lacks PartReasoningText, which every worker of TensorRT-LLM imports: no model loads",
        fix="start it by the start.sh of a generated repository, which supplies the name, or "
        "pip install 'openai>=1.108.1'",
        source="triton-inference-server/tutorials, Qwen2.5-VL guide, containers 26.03 to 26.07; openai-python d296d858",
        fixed_by_start_sh=True,
    ),
    BadCombination(
        versions={"cuda-python": Versions(since="13"), "tensorrt_llm": Versions(before="1.0.1")},
        what="`import tensorrt_llm` ends with ImportError: cannot import name 'cuda' from 'cuda'",
        fix="pip install 'cuda-python>=12,<13'",
        source="ai-dynamo/dynamo pull request 2379, NVIDIA/TensorRT-LLM pull request 6703; seen with 1.0.0rc4",
    ),
    BadCombination(
        versions={"transformers": Versions(since="5"), "tensorrt_llm": Versions(before="1.3.0rc14")},
        what="TensorRT-LLM imports AutoModelForVision2Seq, which transformers 5 no longer has",
        fix="pip install the transformers version that TensorRT-LLM pins (4.x)",
        source="NVIDIA/TensorRT-LLM issue 13822, seen with 1.3.0rc13; it is assumed that older releases import it "
        "too and later ones don't (pull request 14456 of that repository)",
    ),
    BadCombination(
        versions={"mpi4py": Versions(before="4"), "tensorrt_llm": Versions(since="0.13.0", before="0.15.0")},
        what="this TensorRT-LLM is built against mpi4py 4: with mpi4py 3 `import tensorrt_llm` hangs",
        fix="install mpi4py 4, built against the MPI that mpirun belongs to",
        source="NVIDIA/TensorRT-LLM issues 2286 and 2172",
    ),
    BadCombination(
        versions={"tensorrt_llm": Versions(since="1.0.3", before="1.0.4")},
        what="this build exists in container 25.11 only; nothing public says which keys it takes, so no repository is "
        "made for it",
        fix="use container 25.12 (1.1.0) or 25.10 (1.0.0)",
        source="triton-inference-server/server docs/introduction/compatibility.md",
        stops_the_load=False,
    ),
    BadCombination(
        versions={CONTAINER: Versions(before="26.03"), "tensorrt_llm": Versions()},
        what="this Triton does not ask a model whether it is ready: /v2/models/MODEL/ready keeps answering 200 while "
        "the engine is stuck",
        fix="also probe with `deepseek-triton probe generate`, or use container 26.03 or newer",
        source="triton-inference-server/python_backend 65529b0 (2026-03)",
        stops_the_load=False,
    ),
)


def find_bad_combinations(versions: Mapping[str, str]) -> list[BadCombination]:
    """Return those that are in `versions`, distribution -> version."""
    return [
        bad
        for bad in KNOWN_BAD
        if all(name in versions and allowed.contains(versions[name]) for name, allowed in bad.versions.items())
    ]
