"""How a repository is launched: the options of the command line, for all forms."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from deepseek_triton_build import EXIT_TIMEOUT_S
from deepseek_triton_tools.launching.stop_times import StopTimes


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """An option that is not given is None when the form, start.sh or the cluster has its own default."""

    # The server; these are variables of start.sh
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    address: str | None = None
    """Address on which HTTP, gRPC and metrics listen; every address of the machine unless given."""
    exit_timeout: int = EXIT_TIMEOUT_S
    """Seconds that tritonserver gives open requests when it is stopped."""
    ready_within: int | None = None
    """Seconds until the model must be ready; 0 for no deadline."""
    max_restarts: int | None = None
    ready_file: Path | None = None
    environment: tuple[tuple[str, str], ...] = ()
    """Further variables for the server."""
    server_args: tuple[str, ...] = ()
    """Arguments for tritonserver."""

    # Containers, of docker, slurm and kubernetes
    image: str | None = None
    """Image to use instead of the repository's own."""
    name: str | None = None
    """Name of the container, the job or the Kubernetes objects."""
    gpus: str | None = None
    """ "all", "none" or a number; for docker also devices such as "0,1"."""
    shm_size: int | None = None
    """Size of /dev/shm in bytes."""
    cache_dir: Path | None = None
    """Folder for compiled kernels, which gets a folder for each image and GPU."""

    # A pair, of slurm and kubernetes
    context_servers: int | None = None
    generation_servers: int | None = None

    # docker
    ipc_host: bool = False
    network: str = "host"
    restart: str | None = None
    detach: bool = False

    # mpirun
    hosts: tuple[str, ...] = ()
    ssh_port: int | None = None
    ssh_args: str | None = None
    interface: str | None = None
    """Network interface between the nodes."""

    # slurm
    partition: str | None = None
    account: str | None = None
    time: str | None = None
    log: str | None = None
    """Pattern of the log's path, as for sbatch --output."""
    slurm_mpi: str = "pmix"
    container: bool = True
    requeue: bool = True
    python: str = "python3"
    """Python 3.10 or newer on the first node, which runs the supervisor."""
    sbatch: tuple[str, ...] = ()
    """Further options of sbatch."""

    # kubernetes
    namespace: str | None = None
    rate: int | None = None
    """Bytes per second that the storage delivers."""
    replicas: int = 1
    max_replicas: int | None = None
    """Largest number of replicas. When it is given, an autoscaler follows the load."""
    claim: str | None = None
    """PersistentVolumeClaim that holds the checkpoint."""
    pull_secret: str | None = None
    repository_claim: str | None = None
    """PersistentVolumeClaim that holds the model repository, instead of a ConfigMap."""
    cache_claim: str | None = None
    """PersistentVolumeClaim for compiled kernels; `cache_dir` names a folder of the nodes instead."""
    checkpoint_on_nodes: bool = False
    """Whether every node has the checkpoint at this machine's path, instead of on `claim`."""
    measured: Path | None = None
    """Document of `warm files --json`, whose rate is used; `rate` gives one by hand."""
    host_network: bool = False
    rdma: tuple[str, int] | None = None
    """Resource of a device plugin, and how many of it a pod gets: ("rdma/hca", 8)."""
    scrape: bool = False
    """Whether pods get annotations for Prometheus."""
    target: int | None = None
    """Sequences in flight for each replica that the autoscaler aims at."""
    node_selector: tuple[tuple[str, str], ...] = ()
    """Labels that the nodes must have."""
    gateway_image: str | None = None
    """Image with `deepseek-triton gateway`. When it is given, a gateway stands in front of the servers."""
    gateway_replicas: int | None = None
    gateway_keys: str | None = None
    """Secret whose entry `keys` is the gateway's file of API keys."""
    routing: Literal["gateway", "epp", "envoy"] | None = None
    """Who chooses the server of a request. Without it, the Service does, or the gateway if there is one."""
    route_parent: tuple[str | None, str] | None = None
    """Namespace, if it is another one, and name of the Gateway object that gets a route to the servers."""
    picker_image: str | None = None
    """Image of the endpoint picker."""
    autoscale: Literal["hpa", "keda"] | None = None
    """Who follows the load when `max_replicas` is given; a HorizontalPodAutoscaler by default."""

    @property
    def stop_times(self) -> StopTimes:
        return StopTimes(exit_timeout_s=self.exit_timeout)
