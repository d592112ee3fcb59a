"""Options of the command line that only `launch kubernetes` has."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class KubernetesOptions:
    repository_claim: str | None = None
    """PersistentVolumeClaim that holds the model repository, instead of a ConfigMap."""
    cache_claim: str | None = None
    """PersistentVolumeClaim for compiled kernels. LaunchOptions.cache_dir names a folder of the nodes instead."""
    checkpoint_on_nodes: bool = False
    """Whether every node has the checkpoint at this machine's path, instead of on LaunchOptions.claim."""
    measured: Path | None = None
    """Document of `warm files --json`, whose rate is used. LaunchOptions.rate gives one by hand."""
    host_network: bool = False
    rdma: tuple[str, int] | None = None
    """Resource of a device plugin, and how many of it a pod gets: ("rdma/hca", 8)."""
    scrape: bool = False
    """Whether pods get annotations for Prometheus."""
    target: int | None = None
    """Sequences in flight for each replica that the autoscaler aims at."""
    node_selector: tuple[tuple[str, str], ...] = ()
    """Labels that the nodes must have."""
