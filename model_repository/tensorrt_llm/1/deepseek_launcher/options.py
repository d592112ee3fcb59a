"""The options of `supervise.py run`, and every error of the launcher, whose text is one line and says how to fix it.

LauncherError          `exit_code` is what the command line returns
├── UsageError         the command line is wrong, or something that it names is missing or taken: exit code 2
└── StillRunningError  processes that can't be killed
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Policy = Literal["fatal", "always", "never"]
POLICIES: tuple[Policy, ...] = ("fatal", "always", "never")


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
    with_parent: int | None
    """Process whose end is also the end of the launch."""

    @property
    def ports(self) -> dict[str, int]:
        return {"HTTP": self.http_port, "gRPC": self.grpc_port, "metrics": self.metrics_port}


class LauncherError(Exception):
    exit_code = 1


class UsageError(LauncherError):
    exit_code = 2


class StillRunningError(LauncherError):
    """Processes can't be killed, for example because a driver holds them."""
