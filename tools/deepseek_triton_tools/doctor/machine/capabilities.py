"""What can be done on a machine. Check.needs names those that a check's blocking findings stand in the way of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from deepseek_triton_tools.doctor.machine.expected import TENSORRT_LLM, Expected
from deepseek_triton_tools.doctor.machine.machine_finding import Reported

SERVE = "tensorrt-llm"
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

TRITON = (SERVE, DEMO, SIMULATED, LOCAL)
"""What needs a tritonserver on this machine."""
OF_REPOSITORY = (SERVE, LOCAL)
"""What serves the repository that was named."""

CAPABILITIES = {
    SERVE: "serve with TensorRT-LLM",
    DEMO: "the demo: a tiny DeepSeek on a real tritonserver (demo, serve)",
    SIMULATED: "the simulated engine (demo --engine simulated, serve)",
    CLIENT: "ask a server (generate, chat)",
    GENERATOR: "plan, build, check; launch --dry-run",
    WARM: "warm a checkpoint",
    LOCAL: "launch local",
    DOCKER: "launch docker",
    MPIRUN: "launch mpirun",
    SLURM: "launch slurm --submit",
    KUBERNETES: "launch kubernetes --submit",
}


_STARTED_BY: Mapping[str, Mapping[str, str]] = {
    TENSORRT_LLM: {LOCAL: SERVE, MPIRUN: SERVE},
    "transformers": {LOCAL: DEMO},
    "simulated": {LOCAL: SIMULATED},
}
"""Engine of the repository that was named -> the forms that start it here, each with what it needs for that."""


@dataclass(frozen=True, kw_only=True)
class Capability:
    id: str
    title: str
    works: bool
    in_the_way: tuple[Reported, ...]


def capabilities(reported: Iterable[Reported], expected: Expected) -> Sequence[Capability]:
    """Each with the findings that stand in its way."""
    blocking = [each for each in reported if each.finding.blocks]
    started = _STARTED_BY.get(expected.engine or "", {})
    found = []
    for name, title in CAPABILITIES.items():
        needed = {name, started.get(name, name)}
        in_the_way = tuple(each for each in blocking if not needed.isdisjoint(each.needs))
        found.append(Capability(id=name, title=title, works=not in_the_way, in_the_way=in_the_way))
    return found
