"""The options of `supervise.py run`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from deepseek_launcher.restarts import Policy


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The command to run, and how to watch it."""

    command: tuple[str, ...]
    repository: Path | None = None
    ranks: int = 1
    ranks_per_node: int | None = None
    hosts: tuple[str, ...] = ()
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    http_address: str = "0.0.0.0"
    ready_within_s: float = 0
    """Deadline for becoming ready; 0 for none."""
    exit_timeout_s: float = 30
    max_restarts: int = 3
    restart: Policy = "fatal"
    ready_file: Path | None = None
    health_every_s: float = 5

    @property
    def ports(self) -> dict[str, int]:
        return {"HTTP": self.http_port, "gRPC": self.grpc_port, "metrics": self.metrics_port}
