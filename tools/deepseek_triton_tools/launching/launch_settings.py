"""How a repository is launched: everything that the command line says, for every form."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from deepseek_triton_tools.launching.kubernetes_settings import KubernetesOptions
from deepseek_triton_tools.launching.stop_times import EXIT_TIMEOUT_S, StopTimes


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """What is not given is None where the form, start.sh or the cluster has a default of its own."""

    # The server: variables of start.sh
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    address: str | None = None
    """Where HTTP, gRPC and metrics are listened on; every address of the machine unless given."""
    exit_timeout: int = EXIT_TIMEOUT_S
    """Seconds that tritonserver gives open requests on a stop."""
    ready_within: int | None = None
    """Seconds; 0: no deadline."""
    max_restarts: int | None = None
    ready_file: Path | None = None
    environment: tuple[tuple[str, str], ...] = ()
    """Further variables of the server."""
    server_args: tuple[str, ...] = ()
    """For tritonserver."""

    # Containers: docker, slurm, kubernetes
    image: str | None = None
    """Instead of the repository's own."""
    name: str | None = None
    """Of the container, the job or the Kubernetes objects."""
    gpus: str | None = None
    """ "all", "none", a number, or for docker devices as "0,1"."""
    shm_size: int | None = None
    """Bytes of /dev/shm."""
    cache_dir: Path | None = None
    """Where compiled kernels are kept, below it a folder for each image and GPU."""

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
    """As sbatch's --output."""
    slurm_mpi: str = "pmix"
    container: bool = True
    requeue: bool = True
    python: str = "python3"
    """On the first node, for the supervisor: 3.10 or newer."""
    sbatch: tuple[str, ...] = ()
    """Further directives."""

    # kubernetes
    namespace: str | None = None
    rate: int | None = None
    """Bytes a second that the storage gives."""
    replicas: int = 1
    max_replicas: int | None = None
    """With it the number of replicas follows the load."""
    claim: str | None = None
    """PersistentVolumeClaim of the checkpoint."""
    pull_secret: str | None = None
    kubernetes: KubernetesOptions = field(default_factory=KubernetesOptions)
    """What concerns no other form."""

    @property
    def stop_times(self) -> StopTimes:
        return StopTimes(exit_timeout_s=self.exit_timeout)
