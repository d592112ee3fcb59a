"""What the repository to be served expects of its machines, as data that goes along to every host."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

TENSORRT_LLM = "tensorrt_llm"


@dataclass(frozen=True, kw_only=True)
class KnownContainer:
    """A published Triton container."""

    tag: str
    """`26.07`."""
    trtllm: str
    driver: str
    """The least NVIDIA driver."""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """None: not known, or no repository was named."""

    repository: str | None = None
    """Its folder, absolute: the same on every host."""
    is_ours: bool = False
    """With this project's backend, whose start.sh brings work-arounds along."""
    by_triton: bool = True
    """False of LLM arguments in a file by itself: trtllm-serve and its siblings take that."""
    engine: str | None = None
    release: str | None = None
    """Of TensorRT-LLM."""
    image: str | None = None
    """The whole name of the container that it is for."""
    driver: str | None = None
    """The least NVIDIA driver of that container."""
    gpu: str | None = None
    """As the catalogue calls it: h200."""
    gpus_per_node: int | None = None
    """GPUs of one machine that are used."""
    world_size: int | None = None
    checkpoint: str | None = None
    """Its folder, absolute, or a Hugging Face name."""
    checkpoint_bytes: int | None = None
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    hosts: tuple[str, ...] = ()
    interface: str | None = None
    containers: tuple[KnownContainer, ...] = ()
    """All that are known, newest first."""

    @property
    def is_tensorrt_llm(self) -> bool:
        """It is known that TensorRT-LLM is to run here."""
        return self.engine == TENSORRT_LLM

    @property
    def num_nodes(self) -> int:
        if self.world_size is None or not self.gpus_per_node:
            return 1
        return -(-self.world_size // self.gpus_per_node)


def to_json(expected: Expected) -> str:
    return json.dumps(dataclasses.asdict(expected))


def from_json(text: str) -> Expected:
    values = json.loads(text)
    values["hosts"] = tuple(values["hosts"])
    values["containers"] = tuple(KnownContainer(**row) for row in values["containers"])
    return Expected(**values)
