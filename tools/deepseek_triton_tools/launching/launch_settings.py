"""How a repository, or a pair of them, is launched: the options of all forms, and how long each part waits.

When a server is stopped, no part kills one that still drains. From the inside to the outside, the parts are
tritonserver, the supervisor, mpirun, and the container's runtime or the kubelet.
"""

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from deepseek_triton_build import EXIT_TIMEOUT_S, MPIRUN_SPARE_S
from deepseek_triton_build.arithmetic import load_s
from deepseek_triton_build.check import MANIFEST, read_stamp
from deepseek_triton_build.text import safe_name
from deepseek_triton_tools.repository.launch_facts import START_SCRIPT, LaunchFacts, facts_of
from deepseek_triton_tools.tool_errors import RepositoryError, ToolError

SUPERVISOR_AFTER_S = 15
"""Seconds that tritonserver may take to end after its timeout, in which its stubs and the engine's workers end."""
SPARE_S = 10
"""Seconds for the kernel to end what mpirun has killed, and to free its GPU memory. An assumption."""
PRE_STOP_S = 10
"""Seconds that preStop sleeps before SIGTERM is sent, until no load balancer sends new requests to the pod. A pod is
told to end and is removed from the endpoints at the same time (kubernetes.io, Pod Lifecycle, Pod termination); how long
the removal takes is an assumption."""
GROUP_S = 30
"""Seconds until the LeaderWorkerSet's controller ends the leader of a worker that was told to end. An assumption."""


@dataclass(frozen=True, kw_only=True)
class StopTimes:
    """Times in seconds, counted from SIGTERM unless their docstring says otherwise."""

    exit_timeout_s: int = EXIT_TIMEOUT_S
    """Time that tritonserver gives open requests: start.sh's EXIT_TIMEOUT."""

    @property
    def supervisor_kill_s(self) -> int:
        """When the supervisor kills what is left."""
        return self.exit_timeout_s + SUPERVISOR_AFTER_S

    @property
    def mpirun_kill_s(self) -> int:
        """Open MPI's odls_base_sigkill_timeout: the time between its SIGTERM to the ranks and its SIGKILL. It is 5 s
        more than the supervisor's, which should kill first because it knows what it started."""
        return self.exit_timeout_s + MPIRUN_SPARE_S

    @property
    def docker_stop_timeout_s(self) -> int:
        """Value of `docker run --stop-timeout`."""
        return self.mpirun_kill_s + SPARE_S

    @property
    def grace_period_s(self) -> int:
        """terminationGracePeriodSeconds of the pod with tritonserver, counted from the beginning of preStop."""
        return PRE_STOP_S + self.docker_stop_timeout_s

    @property
    def worker_grace_period_s(self) -> int:
        """terminationGracePeriodSeconds of a pod with ranks only. They end with the leader, which may be told later."""
        return self.grace_period_s + GROUP_S


GATHER_S = 1800
"""Seconds for the pods of a group to find nodes and to pull the image: its 14 GB at 20 MB/s are 700 s, and a node may
have to be added before. An assumption."""
PERIOD_S = 10
"""Seconds between two requests of a startup probe."""
PROBE_SPARE_S = 60
"""Seconds between the end of the supervisor and the end of the probe. An assumption."""
# Share of the bytes that must have been read from storage; with less, the rate is not the storage's but memory's.
_MEASURED_SHARE = 0.5


@dataclass(frozen=True, kw_only=True)
class StartTimes:
    """Deadlines in seconds, counted from the container's start unless their docstring says otherwise."""

    size: int
    """Size of the weights in bytes."""
    rate: int
    """Bytes per second that the storage delivers."""
    ready_within_s: int
    """start.sh's READY_WITHIN: the supervisor's deadline, counted from its own start."""
    num_nodes: int = 1
    stop: StopTimes

    @property
    def load_s(self) -> int:
        """Time to read all of the weights once."""
        return load_s(self.size, self.rate)

    @property
    def gather_s(self) -> int:
        """How long the leader waits for the other pods, before the supervisor starts."""
        return GATHER_S if self.num_nodes > 1 else 0

    @property
    def failure_threshold(self) -> int:
        """Failed requests until the startup probe gives up, after the supervisor, which can name the missing rank."""
        needed = self.gather_s + self.ready_within_s + self.stop.supervisor_kill_s + PROBE_SPARE_S
        return math.ceil(needed / PERIOD_S)

    @property
    def window_s(self) -> int:
        """Time until the startup probe gives up."""
        return self.failure_threshold * PERIOD_S

    @property
    def progress_deadline_s(self) -> int:
        """A Deployment's deadline since the last change of its pods: the probe's window and time for node and image."""
        return self.window_s + GATHER_S


def measured_rate(file: Path) -> int:
    """Return the bytes per second that a warm-up read from storage, by the document of `warm files --json`.

    :raises ToolError: when the file is no such document, or most bytes were in memory already.
    """
    expected = f"expected the document of deepseek-triton warm files --json in {file}"
    try:
        document = json.loads(file.read_text("utf-8"))
    except OSError as error:
        raise ToolError(f"{expected}: {error.strerror}", exit_code=2) from None
    except (ValueError, RecursionError) as error:  # not JSON, or not UTF-8
        raise ToolError(f"{expected}, got {error}", exit_code=2) from None
    result = document.get("result") if isinstance(document, dict) else None
    if not isinstance(result, dict) or not str(document.get("schema")).startswith("deepseek-triton/warm/"):
        raise ToolError(f"{expected}, got something else", exit_code=2)
    rate, read, done = (result.get(key) for key in ("read_bytes_per_s", "read_bytes", "done_bytes"))
    if not (isinstance(rate, int) and isinstance(read, int) and isinstance(done, int) and rate > 0):
        raise ToolError(f"{expected} with a rate, got one in which nothing was read", exit_code=2)
    if read < _MEASURED_SHARE * done:
        raise ToolError(
            f"{file}: only {read:,} of {done:,} bytes were read from storage, the others were in memory: measure after "
            "deepseek-triton warm evict",
            exit_code=2,
        )
    return rate


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
    """Arguments for tritonserver, or for serve.sh."""

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


CONTEXT, GENERATION = "context", "generation"
SIDES = (CONTEXT, GENERATION)
"""Names of the two folders, and of the roles of their servers."""
MAX_SERVERS = 999
"""Servers of a side. Their numbers are parts of names whose length is limited."""


@dataclass(frozen=True, kw_only=True)
class PairSide:
    """The servers of one side, which all run the same repository."""

    role: str
    """One of SIDES."""
    facts: LaunchFacts
    count: int

    @property
    def num_nodes(self) -> int:
        """Nodes of all servers together. No two servers share a node."""
        return self.count * self.facts.nodes


@dataclass(frozen=True, kw_only=True)
class LaunchedPair:
    """Context and generation servers that share requests."""

    source: str
    """The folder's path as the user wrote it."""
    context: PairSide
    generation: PairSide

    @property
    def folder(self) -> Path:
        return self.context.facts.folder.parent

    @property
    def sides(self) -> tuple[PairSide, PairSide]:
        return self.context, self.generation

    @property
    def num_nodes(self) -> int:
        return sum(side.num_nodes for side in self.sides)

    def refusals(self) -> Iterator[str]:
        """Yield what is wrong with the numbers of servers, in every form."""
        for side in self.sides:
            if side.count > MAX_SERVERS:
                yield f"--{side.role}-servers: expected at most {MAX_SERVERS}, got {side.count}"

    @property
    def what(self) -> str:
        """A line about the servers, for people."""
        sides = []
        for side in self.sides:
            servers = f"{side.count} {side.role} server" + ("s" if side.count > 1 else "")
            nodes = f"{side.facts.nodes} nodes" if side.facts.nodes > 1 else "one node"
            ranks = f"{side.facts.num_gpus} ranks" if side.facts.num_gpus > 1 else "one rank"
            sides.append(f"{servers} of {ranks} on {nodes} each")
        return f"{self.context.facts.model}: {' and '.join(sides)}."


def is_pair(source: str) -> bool:
    """Whether the folder is a pair or half of one, and no repository itself."""
    return not _has_start_script(source) and any(_has_start_script(os.path.join(source, role)) for role in SIDES)


def _has_start_script(folder: str) -> bool:
    return os.path.isfile(os.path.join(folder, START_SCRIPT))


def pair_of(source: str, options: LaunchOptions) -> LaunchedPair:
    """Read both sides. Their numbers of servers are the options', else those that the folder was planned for, else 1.

    :raises RepositoryError: when a side is missing, can't be launched, or doesn't fit the other one.
    :raises CheckpointError: when the checkpoint's size is not known.
    """
    missing = [role for role in SIDES if not _has_start_script(os.path.join(source, role))]
    if missing:
        raise RepositoryError(
            f"{safe_name(source)} is half of a pair: expected {CONTEXT}/ and {GENERATION}/ in it, and "
            f"{missing[0]}/{START_SCRIPT} is missing: copy the whole folder, or write it anew with "
            "build --profile disagg"
        )
    stamp, _ = read_stamp(Path(source), "")
    sides = []
    for role, count in ((CONTEXT, options.context_servers), (GENERATION, options.generation_servers)):
        planned = stamp.values.get(f"{role}_servers")
        default = planned if isinstance(planned, int) and planned > 0 else 1
        sides.append(PairSide(role=role, facts=facts_of(os.path.join(source, role)), count=count or default))
    context, generation = sides
    if wrong := list(_misfits(context, generation)):
        raise RepositoryError(
            f"{safe_name(source)}: {'; '.join(wrong)}: write both sides anew with one build --profile disagg"
        )
    return LaunchedPair(source=source, context=context, generation=generation)


def _misfits(context: PairSide, generation: PairSide) -> Iterator[str]:
    stamps = [read_stamp(side.facts.version_dir.parent, "")[0] for side in (context, generation)]
    for side, stamp in zip((context, generation), stamps, strict=True):
        other = stamp.side or side.role
        if other != side.role:
            yield f"{side.role}/ holds a {other} server, by its {MANIFEST}"
    first, second = (
        {
            "models": side.facts.model,
            "engines": side.facts.engine,
            "releases": side.facts.release,
            "variants": stamp.text("variant"),
            "checkpoints": ", ".join(side.facts.serving.checkpoints) if side.facts.serving else "none",
        }
        for side, stamp in zip((context, generation), stamps, strict=True)
    )
    for what, value in first.items():
        if value != second[what]:
            yield f"{CONTEXT}/ and {GENERATION}/ are for different {what}, {value} and {second[what]}"
