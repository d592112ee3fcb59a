"""The options of `supervise.py run`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from deepseek_launcher.restarts import Policy


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The command to run, and how to watch it."""

    command: tuple[str, ...]
    repository: Path | None
    ranks: int
    ranks_per_node: int | None
    hosts: tuple[str, ...]
    http_port: int
    grpc_port: int
    metrics_port: int
    http_address: str
    ready_within_s: float
    """Deadline for becoming ready; 0 for none."""
    exit_timeout_s: float
    max_restarts: int
    restart: Policy
    ready_file: Path | None
    health_every_s: float

    @property
    def ports(self) -> dict[str, int]:
        return {"HTTP": self.http_port, "gRPC": self.grpc_port, "metrics": self.metrics_port}
