"""Versions that are known not to work together, each with who saw it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deepseek_triton_tools.doctor.machine.versions import is_within

CONTAINER = "container"
"""The tag of the Triton container, beside the distributions."""


@dataclass(frozen=True, kw_only=True)
class Range:
    since: str | None = None
    before: str | None = None

    def holds(self, version: str) -> bool:
        return is_within(version, since=self.since, before=self.before)


@dataclass(frozen=True, kw_only=True)
class Bad:
    versions: Mapping[str, Range]
    """All of them at once."""
    what: str
    fix: str
    source: str
    stops_the_load: bool = True
    by_start_sh: bool = False
    """The start.sh of a generated repository works around it."""


KNOWN_BAD: Sequence[Bad] = (
    Bad(
        versions={"openai": Range(before="1.108.1"), "tensorrt_llm": Range(since="1.2.0", before="1.3.0")},
        what="openai lacks PartReasoningText, which every worker of TensorRT-LLM imports: no model loads",
        fix="start it by the start.sh of a generated repository, which supplies the name, or "
        "pip install 'openai>=1.108.1'",
        source="triton-inference-server/tutorials, Qwen2.5-VL guide, containers 26.03 to 26.07; openai-python d296d858",
        by_start_sh=True,
    ),
    Bad(
        versions={"cuda-python": Range(since="13"), "tensorrt_llm": Range(before="1.0.1")},
        what="`import tensorrt_llm` ends with ImportError: cannot import name 'cuda' from 'cuda'",
        fix="pip install 'cuda-python>=12,<13'",
        source="ai-dynamo/dynamo pull request 2379, NVIDIA/TensorRT-LLM pull request 6703; seen with 1.0.0rc4",
    ),
    Bad(
        versions={"transformers": Range(since="5"), "tensorrt_llm": Range(before="1.3.0rc14")},
        what="TensorRT-LLM imports AutoModelForVision2Seq, which transformers 5 has no longer",
        fix="pip install the transformers that TensorRT-LLM pins (4.x)",
        source="NVIDIA/TensorRT-LLM issue 13822, seen with 1.3.0rc13; that older ones import it too, and later ones "
        "don't (its pull request 14456), is assumed",
    ),
    Bad(
        versions={"mpi4py": Range(before="4"), "tensorrt_llm": Range(since="0.13.0", before="0.15.0")},
        what="built against mpi4py 4; with 3 `import tensorrt_llm` hangs",
        fix="install mpi4py 4, built against the MPI that mpirun is of",
        source="NVIDIA/TensorRT-LLM issues 2286 and 2172",
    ),
    Bad(
        versions={"tensorrt_llm": Range(since="1.0.3", before="1.0.4")},
        what="a build of container 25.11 alone; nothing public says which keys it takes, no repository is made for it",
        fix="use container 25.12 (1.1.0) or 25.10 (1.0.0)",
        source="triton-inference-server/server docs/introduction/compatibility.md",
        stops_the_load=False,
    ),
    Bad(
        versions={CONTAINER: Range(before="26.03"), "tensorrt_llm": Range()},
        what="this Triton does not ask a model whether it is ready: /v2/models/MODEL/ready stays 200 over an engine "
        "that is stuck",
        fix="probe with `deepseek-triton probe generate` too, or use container 26.03 or newer",
        source="triton-inference-server/python_backend 65529b0 (2026-03)",
        stops_the_load=False,
    ),
)
"""Of what is read from the packages installed. Open MPI, whose version only mpirun knows, is in checks/mpi.py."""


def find_bad(versions: Mapping[str, str]) -> list[Bad]:
    """Those that `versions` has."""
    return [
        bad
        for bad in KNOWN_BAD
        if all(name in versions and allowed.holds(versions[name]) for name, allowed in bad.versions.items())
    ]
