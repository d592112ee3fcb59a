"""The needs of the repository to be served, what a check finds, and what works on a machine after all checks."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from deepseek_triton_tools.doctor.machine import Machine

TENSORRT_LLM = "tensorrt_llm"
VLLM = "vllm"


@dataclass(frozen=True, kw_only=True)
class Expected:
    """A value is None when it is not known, or when no repository was named."""

    repository: str | None = None
    """Absolute path of its folder, the same on every host."""
    is_ours: bool = False
    """Whether it has this project's backend, with a start.sh that brings work-arounds."""
    by_triton: bool = True
    """False for a file with nothing but LLM arguments, as trtllm-serve and similar programs take it."""
    engine: str | None = None
    release: str | None = None
    """Release of TensorRT-LLM."""
    vllm: str | None = None
    """Version of vLLM."""
    image: str | None = None
    """Full name of the container image that the repository was made for."""
    driver: str | None = None
    """The oldest NVIDIA driver that this container is made for."""
    gpu: str | None = None
    """The catalogue's name of the GPU, such as h200."""
    gpus_per_node: int | None = None
    """GPUs that are used on one machine."""
    world_size: int | None = None
    uses_nvcc: bool = False
    """Whether DeepGEMM compiles its kernels with NVCC."""
    checkpoint: str | None = None
    """Absolute path of its folder, or a Hugging Face name."""
    checkpoint_bytes: int | None = None
    tables: tuple[int, int] = (0, 0)
    """Bytes of Engram's tables in each node's memory: in /dev/shm, and not there."""
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    hosts: tuple[str, ...] = ()
    interface: str | None = None
    tune: bool = False
    """Whether the machine's settings are asked for, in place of the checks."""
    drivers: Mapping[str, str] = field(default_factory=dict)
    """Tag of a Triton container with the engine, such as `26.07` -> the oldest NVIDIA driver that it is made for."""
    last_image: str = ""
    """A sentence about newer containers than these; empty where nothing is known."""

    @property
    def is_tensorrt_llm(self) -> bool:
        """Whether it is known that TensorRT-LLM is to run here."""
        return self.engine == TENSORRT_LLM

    @property
    def uses_gpus(self) -> bool:
        """Whether it is known that an engine on GPUs is to run here."""
        return self.engine in (TENSORRT_LLM, VLLM)

    @property
    def num_nodes(self) -> int:
        if self.world_size is None or not self.gpus_per_node:
            return 1
        return -(-self.world_size // self.gpus_per_node)

    @property
    def has_several_hosts(self) -> bool:
        return self.num_nodes > 1 or len(self.hosts) > 1


def expected_from_json(text: str) -> Expected:
    values = json.loads(text)
    return Expected(**{**values, **{name: tuple(values[name]) for name in ("hosts", "tables")}})


Level = Literal["ok", "skipped", "note", "warning", "error"]
LEVELS: tuple[Level, ...] = ("ok", "skipped", "note", "warning", "error")
"""From the best to the worst."""


@dataclass(frozen=True, kw_only=True)
class MachineFinding:
    level: Level
    result: str
    """The observation, on one line."""
    cause: str = ""
    """The consequence of the result, and the reason for it."""
    fix: str = ""
    """The steps that repair it."""
    blocks: bool = False
    """Whether the capabilities in MachineCheck.needs can't work. A note may block too, when nobody asked for them."""


@dataclass(frozen=True, kw_only=True)
class RepositoryFinding(MachineFinding):
    """A finding about what the repository needs and smaller models, such as the demo's, don't."""


def ok(result: str) -> MachineFinding:
    return MachineFinding(level="ok", result=result)


def skipped(reason: str) -> MachineFinding:
    """There was nothing to check."""
    return MachineFinding(level="skipped", result=reason)


def note(result: str, cause: str = "", fix: str = "", *, blocks: bool = False) -> MachineFinding:
    return MachineFinding(level="note", result=result, cause=cause, fix=fix, blocks=blocks)


def warning(result: str, cause: str, fix: str) -> MachineFinding:
    return MachineFinding(level="warning", result=result, cause=cause, fix=fix)


def error(result: str, cause: str, fix: str) -> MachineFinding:
    return MachineFinding(level="error", result=result, cause=cause, fix=fix, blocks=True)


def error_if(is_needed: object, result: str, cause: str, fix: str) -> MachineFinding:
    """An error where what can't work is needed, else a note that blocks."""
    return error(result, cause, fix) if is_needed else note(result, cause, fix, blocks=True)


def error_or_note(expected: Expected, result: str, cause: str, fix: str) -> MachineFinding:
    """An error when a repository for an engine on GPUs is to be served here, else a note that blocks."""
    return error_if(expected.uses_gpus, result, cause, fix)


def warning_or_note(expected: Expected, result: str, cause: str, fix: str) -> MachineFinding:
    """A warning when a repository for an engine on GPUs is to be served here, else a note."""
    return warning(result, cause, fix) if expected.uses_gpus else note(result, cause, fix)


@dataclass(frozen=True)
class MachineCheck:
    id: str
    title: str
    needs: tuple[str, ...]
    """Ids of the capabilities that don't work when this check's finding blocks."""
    run: Callable[[Machine, Expected], MachineFinding]


@dataclass(frozen=True, kw_only=True)
class Reported:
    """A finding, with the check and the host that it comes from."""

    check: str
    title: str
    host: str
    """The host's name. A comparison names all its hosts, separated by commas."""
    finding: MachineFinding
    needs: tuple[str, ...] = ()


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

NEED_ENGINE = (SERVE, SERVE_VLLM)
NEED_GPUS = (*NEED_ENGINE, DOCKER)
"""Those that need GPUs of this machine. Docker's container brings the rest."""
NEED_TRITONSERVER = (*NEED_ENGINE, DEMO, SIMULATED, LOCAL)
"""Those that need a tritonserver on this machine."""
NEED_REPOSITORY = (*NEED_GPUS, LOCAL)
"""Those that serve the repository that was named here."""
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


_ELSEWHERE = {form: form for form in (DOCKER, SLURM, KUBERNETES)}
_OF_TRITON = (LOCAL, SLURM, KUBERNETES)  # they refuse a folder without it
# Engine of the repository -> the launch forms that start it -> the capability they need besides.
_STARTED_BY: Mapping[str, Mapping[str, str]] = {
    TENSORRT_LLM: {LOCAL: SERVE, MPIRUN: SERVE, **_ELSEWHERE},
    VLLM: {LOCAL: SERVE_VLLM, **_ELSEWHERE},
    "reference": {LOCAL: DEMO},
    "simulated": {LOCAL: SIMULATED},
}


def concerns(needs: Sequence[str], expected: Expected) -> bool:
    """Return whether a check matters to the repository: one for an embedded engine needs no GPU, MPI or cluster.

    :param needs: the capabilities that the check's finding would block; none is a check of the machine itself.
    """
    started = _STARTED_BY.get(expected.engine or "", {})
    used = {CLIENT, *started, *started.values()}.difference(() if expected.by_triton else _OF_TRITON)
    return expected.engine is None or not needs or not used.isdisjoint(needs)


def is_for(capability: str, expected: Expected) -> bool:
    """Return whether the repository may have a use for it: not for another engine, nor for MPI on one node."""
    if capability == MPIRUN and expected.engine and not expected.has_several_hosts:
        return False
    needed = (*NEED_ENGINE, MPIRUN, *(() if expected.by_triton else _OF_TRITON))
    return capability not in needed or concerns((capability,), expected)


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
    capabilities = []
    for name, title in CAPABILITIES.items():
        needs = {name, started.get(name, name)}
        blocked_by = tuple(each for each in blocking if not needs.isdisjoint(each.needs))
        capabilities.append(Capability(id=name, title=title, works=not blocked_by, blocked_by=blocked_by))
    return capabilities
