"""What the command line says of Kubernetes alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class KubernetesOptions:
    repository_claim: str | None = None
    """A PersistentVolumeClaim with the model repository, instead of a ConfigMap."""
    cache_claim: str | None = None
    """One for compiled kernels; LaunchOptions.cache_dir names a folder of the nodes instead."""
    checkpoint_on_nodes: bool = False
    """The checkpoint lies on every node where it lies here, instead of on LaunchOptions.claim."""
    measured: Path | None = None
    """A document of `warm files --json`, whose rate counts; LaunchOptions.rate gives one by hand."""
    host_network: bool = False
    rdma: tuple[str, int] | None = None
    """A device plugin's resource, and how many of it a pod gets: ("rdma/hca", 8)."""
    scrape: bool = False
    """Annotate pods for Prometheus."""
    target: int | None = None
    """Sequences in flight that the autoscaler aims at, for each replica."""
    node_selector: tuple[tuple[str, str], ...] = ()
    """Labels of the nodes."""
