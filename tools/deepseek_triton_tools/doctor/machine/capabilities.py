"""Capabilities of a machine. A blocking finding says no to the capabilities in its check's `needs`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from deepseek_triton_tools.doctor.machine.expected import TENSORRT_LLM, VLLM, Expected
from deepseek_triton_tools.doctor.machine.machine_finding import Reported

SERVE = "tensorrt-llm"
SERVE_VLLM = "vllm"
DEMO = "demo"
SIMULATED = "simulated"
CLIENT = "client"
GENERATOR = "generator"
WARM = "warm"
LOCAL = "launch-local"
DOCKER = "launch-docker"
MPIRUN = "launch-mpirun"
SLURM = "launch-slurm"
KUBERNETES = "launch-kubernetes"

NEED_GPUS = (SERVE, SERVE_VLLM)
NEED_TRITONSERVER = (*NEED_GPUS, DEMO, SIMULATED, LOCAL)
"""Those that need a tritonserver on this machine."""
NEED_REPOSITORY = (*NEED_GPUS, LOCAL)
"""Those that serve the repository that was named."""
NEED_TOOLS = (GENERATOR, WARM, DEMO, SIMULATED, LOCAL, DOCKER, MPIRUN, SLURM, KUBERNETES)
"""Those that need the packages of the extra `tools`."""

CAPABILITIES = {
    SERVE: "serve with TensorRT-LLM",
    SERVE_VLLM: "serve with vLLM",
    DEMO: "the demo: a tiny DeepSeek on a real tritonserver (demo, serve)",
    SIMULATED: "the simulated engine (demo --engine simulated, serve)",
    CLIENT: "ask a server (generate, chat)",
    GENERATOR: "plan, build, check; launch ... --dry-run",
    WARM: "warm a checkpoint",
    LOCAL: "launch local",
    DOCKER: "launch docker",
    MPIRUN: "launch mpirun",
    SLURM: "launch slurm --submit",
    KUBERNETES: "launch kubernetes --submit",
}


_STARTED_BY: Mapping[str, Mapping[str, str]] = {
    TENSORRT_LLM: {LOCAL: SERVE, MPIRUN: SERVE},
    VLLM: {LOCAL: SERVE_VLLM},
    "reference": {LOCAL: DEMO},
    "simulated": {LOCAL: SIMULATED},
}
"""Engine of the repository -> the launch forms that start it on this machine -> the capability they need besides."""


def concerns(needs: Sequence[str], expected: Expected) -> bool:
    """Return whether a check matters to the repository: one for an embedded engine needs no GPU, MPI or cluster.

    :param needs: the capabilities that the check's finding would block; none is a check of the machine itself.
    """
    if expected.engine in (None, TENSORRT_LLM) or not needs:
        return True
    started = _STARTED_BY.get(expected.engine, {})
    return not {CLIENT, *started, *started.values()}.isdisjoint(needs)


@dataclass(frozen=True, kw_only=True)
class Capability:
    id: str
    title: str
    works: bool
    blocked_by: tuple[Reported, ...]


def assess_capabilities(reported: Iterable[Reported], expected: Expected) -> Sequence[Capability]:
    """Return every capability, with the findings that block it."""
    blocking = [each for each in reported if each.finding.blocks]
    started = _STARTED_BY.get(expected.engine or "", {})
    assessed = []
    for name, title in CAPABILITIES.items():
        needed = {name, started.get(name, name)}
        blocked_by = tuple(each for each in blocking if not needed.isdisjoint(each.needs))
        assessed.append(Capability(id=name, title=title, works=not blocked_by, blocked_by=blocked_by))
    return assessed
