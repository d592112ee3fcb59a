"""The needs of the repository to be served, as data that travels to every host with the checks."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

TENSORRT_LLM = "tensorrt_llm"
VLLM = "vllm"


@dataclass(frozen=True, kw_only=True)
class KnownContainer:
    """A published Triton container."""

    tag: str
    """Such as `26.07`."""
    trtllm: str
    driver: str
    """The oldest NVIDIA driver that it is made for."""


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
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    hosts: tuple[str, ...] = ()
    interface: str | None = None
    tune: bool = False
    """Whether the machine's settings are asked for, in place of the checks."""
    containers: tuple[KnownContainer, ...] = ()
    """All containers that are known, newest first."""

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


def expected_to_json(expected: Expected) -> str:
    return json.dumps(dataclasses.asdict(expected))


def expected_from_json(text: str) -> Expected:
    values = json.loads(text)
    values["hosts"] = tuple(values["hosts"])
    values["containers"] = tuple(KnownContainer(**row) for row in values["containers"])
    return Expected(**values)
