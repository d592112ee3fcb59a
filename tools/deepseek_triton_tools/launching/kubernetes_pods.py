"""The pods: the one with tritonserver, and those with ranks only."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from deepseek_triton_build.arithmetic.load_time import ENGINE_START_S
from deepseek_triton_build.render.yaml_text import one_line
from deepseek_triton_tools.host.host_memory import BUDGET_SHARE
from deepseek_triton_tools.host.units import about, sized
from deepseek_triton_tools.launching import kernel_caches
from deepseek_triton_tools.launching.kubernetes_text import block, filled, items, literal, mapping
from deepseek_triton_tools.launching.launch_settings import LaunchOptions
from deepseek_triton_tools.launching.start_times import PERIOD_S, StartTimes
from deepseek_triton_tools.launching.stop_times import GROUP_S, SPARE_S
from deepseek_triton_tools.repository.launch_facts import LaunchFacts

REPOSITORY = "/model_repository"
REPOSITORY_MOUNT = "/etc/deepseek-triton/repository"
KEYS_MOUNT = "/etc/deepseek-triton/ssh"
HUB_MOUNT = "/models/hub"
SSH_PORT = 2222
"""With hostNetwork the node's own sshd has 22."""
RANK_BYTES = 8 * 2**30
"""Host memory of a rank besides weights and /dev/shm: CUDA's and torch's own, pinned buffers. An assumption."""
CHECKPOINT_CLAIM = "deepseek-checkpoint"
HUB_CLAIM = "huggingface-hub"

Entries = Iterator["Mapping[str, object] | str"]
"""Of a list; a text is the comment of what follows."""


@dataclass(frozen=True, kw_only=True)
class Pods:
    facts: LaunchFacts
    options: LaunchOptions
    start: StartTimes
    rate_from: str
    """For people."""
    image: str
    name: str
    config_map: str | None
    """Its name; None where the repository is on a claim."""
    repository_items: tuple[Mapping[str, object], ...]
    """Of the ConfigMap's volume."""

    def server(self) -> str:
        """The spec of the pod with tritonserver."""
        stop, script = self.start.stop, "start-leader.sh" if self.facts.nodes > 1 else "start-server.sh"
        return filled(
            "server-pod.yaml",
            self._common()
            | {
                "grace_why": (
                    f"preStop {stop.pre_stop_s} s, then tritonserver gives open requests {stop.exit_timeout_s} s "
                    f"(EXIT_TIMEOUT), the supervisor kills what is left after {stop.supervisor_kill_s} s, nobody else "
                    f"before {stop.mpirun_kill_s} s; and {SPARE_S} s for the kernel to take it all down."
                ),
                "grace_s": str(stop.grace_period_s),
                "script": block(self._script(script), 8),
                "args": self._args(),
                "environment": items(self._server_environment(), 6),
                "http_port": str(self.options.http_port),
                "grpc_port": str(self.options.grpc_port),
                "metrics_port": str(self.options.metrics_port),
                "probe_why": self._probe_why(),
                "period_s": str(PERIOD_S),
                "failures": str(self.start.failure_threshold),
                "ready_path": json.dumps(f"/v2/models/{quote(self.facts.model)}/ready"),
                "pre_stop_why": (
                    "A pod that ends is taken out of its Services meanwhile: new requests stop coming before the "
                    f"server refuses them. {stop.pre_stop_s} s is an assumption."
                ),
                "pre_stop_s": str(stop.pre_stop_s),
            },
        )

    def worker(self) -> str:
        """The spec of a pod with ranks only."""
        stop = self.start.stop
        return filled(
            "worker-pod.yaml",
            self._common()
            | {
                "grace_why": (
                    f"The leader's {stop.grace_period_s} s, and {GROUP_S} s for the case that this pod is told first. "
                    "An assumption."
                ),
                "grace_s": str(stop.worker_grace_period_s),
                "script": block(self._script("start-worker.sh"), 8),
                "stop_script": block(filled("stop-worker.sh", {}), 14),
                "environment": items(self._environment(), 6),
                "ssh_port": str(self._ssh_port),
            },
        )

    # --- scripts ---

    def _script(self, name: str) -> str:
        copy = filled("copy-repository.sh", {"mounted": REPOSITORY_MOUNT, "repository": REPOSITORY})
        return filled(
            name,
            {
                "copy": copy if self.config_map else "",
                "ssh": filled("ssh.sh", {"keys": KEYS_MOUNT}),
                "repository": REPOSITORY,
                "gather_s": str(self.start.gather_s),
            },
        )

    def _args(self) -> str:
        """For tritonserver; the first is the script's name."""
        if not self.options.server_args:
            return ""
        words = ("launch", *self.options.server_args)
        return "".join(f"      - {json.dumps(literal(word))}\n" for word in words)

    # --- environment ---

    def _server_environment(self) -> Entries:
        options, start = self.options, self.start
        yield "The ports of Triton that are probed and served below."
        yield {"name": "HTTP_PORT", "value": str(options.http_port)}
        yield {"name": "GRPC_PORT", "value": str(options.grpc_port)}
        yield {"name": "METRICS_PORT", "value": str(options.metrics_port)}
        yield "Seconds for open requests on a stop; terminationGracePeriodSeconds follows from it."
        yield {"name": "EXIT_TIMEOUT", "value": str(start.stop.exit_timeout_s)}
        yield self._ready_within_why()
        yield {"name": "READY_WITHIN", "value": str(self._ready_within_s)}
        yield (
            "The kubelet starts it again, with its own back-off and a startupProbe of its own: a load within the "
            "container would be ended by the livenessProbe."
        )
        yield {"name": "MAX_RESTARTS", "value": "0"}
        if options.ready_file:
            yield "Within the container, while it is ready."
            yield {"name": "READY_FILE", "value": literal(str(options.ready_file))}
        if options.interface:
            yield "The network between the nodes."
            yield {"name": "INTERFACE", "value": literal(options.interface)}
        if self.facts.nodes > 1:
            yield "A pod's address is NAME.SUBDOMAIN, of which mpirun would keep NAME alone: Open MPI 4, Open MPI 5."
            yield {"name": "OMPI_MCA_orte_keep_fqdn_hostnames", "value": "true"}
            yield {"name": "PRTE_MCA_prte_keep_fqdn_hostnames", "value": "true"}
        yield from self._environment()

    def variables(self) -> Iterator[str]:
        """Their names."""
        return (str(entry["name"]) for entry in self._server_environment() if not isinstance(entry, str))

    @property
    def _ready_within_s(self) -> int:
        given = self.options.ready_within
        return self.start.ready_within_s if given is None else given

    def _ready_within_why(self) -> str:
        if self.options.ready_within == 0:
            return "No deadline of the supervisor's, as asked for; the startupProbe's stays, which names no rank."
        return (
            "Seconds until the supervisor gives up and names the rank that is missing; the startupProbe, which can't, "
            "comes after it."
        )

    def _environment(self) -> Entries:
        """Of every pod."""
        if self.facts.nodes > 1:
            yield "A port that is free on a node too, whose own sshd has 22."
            yield {"name": "SSH_PORT", "value": str(self._ssh_port)}
        if self.facts.serving and self.facts.serving.names:
            yield "The checkpoint is there already, on a volume that can't be written to: nothing is to be downloaded."
            yield {"name": "HF_HUB_CACHE", "value": HUB_MOUNT}
            yield {"name": "HF_HUB_OFFLINE", "value": "1"}
        if self._keeps_caches:
            yield "Compiled kernels outlive the pod; else the first requests of every shape wait for them again."
            for variable, folder in kernel_caches.environment().items():
                yield {"name": variable, "value": folder}
        if self.options.environment:
            yield "As asked for."
            for variable, value in self.options.environment:
                yield {"name": variable, "value": literal(value)}

    @property
    def _ssh_port(self) -> int:
        return self.options.ssh_port or SSH_PORT

    # --- reasons ---

    def _probe_why(self) -> str:
        start, serving = self.start, self.facts.serving
        gather = (
            f"{start.gather_s} s until the other pods are there (an assumption: a node to be added, 14 GB of image to "
            "be pulled); "
            if start.gather_s
            else ""
        )
        load = (
            f"{serving.size:,} bytes of weights (by {one_line(serving.size_from)}) at {sized(start.rate)}/s "
            f"({self.rate_from}) take {start.load_s} s, {about(start.load_s)}, the engine's kernels and CUDA graphs "
            f"{about(ENGINE_START_S)} (an assumption): "
            if serving
            else ""
        )
        return (
            f"{gather}{load}READY_WITHIN is {start.ready_within_s} s; the supervisor then ends its processes within "
            f"{start.stop.supervisor_kill_s} s, and there is a spare minute. All that is less than "
            f"{start.failure_threshold} x {PERIOD_S} s."
        )

    # --- the rest of a pod ---

    def _common(self) -> dict[str, str]:
        return {
            "pod_common": "".join(self._pod_lines()),
            "image": json.dumps(self.image),
            "resources": self._resources(),
            "mounts": items(self._mounts(), 6),
            "volumes": (self._config_map_volume() + items(self._volumes(), 2)).rstrip("\n"),
        }

    def _pod_lines(self) -> Iterator[str]:
        options = self.options
        yield "# Nothing in it talks to Kubernetes. A Service named http would set HTTP_PORT, which start.sh reads.\n"
        yield "automountServiceAccountToken: false\nenableServiceLinks: false\n"
        if options.kubernetes.host_network:
            yield "# The node's own network, for its fast interfaces; cluster names are known all the same.\n"
            yield "hostNetwork: true\ndnsPolicy: ClusterFirstWithHostNet\n"
        if options.pull_secret:
            yield f"imagePullSecrets: [{mapping({'name': options.pull_secret})}]\n"
        if options.kubernetes.node_selector:
            yield f"nodeSelector: {mapping(dict(options.kubernetes.node_selector))}\n"
        if self.facts.gpus_per_node:
            yield "# Nodes with GPUs are often kept free of what needs none.\ntolerations:\n"
            yield items([{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}], 2)

    @property
    def _shm_bytes(self) -> int:
        return self.options.shm_size or self.facts.shm_bytes

    def _resources(self) -> str:
        facts, rdma = self.facts, self.options.kubernetes.rdma
        size = facts.serving.size if facts.serving else 0
        memory = _gib(size / BUDGET_SHARE + facts.ranks_per_node * RANK_BYTES + self._shm_bytes)
        limits: dict[str, object] = {"memory": memory}
        limits |= {"nvidia.com/gpu": facts.gpus_per_node} if facts.gpus_per_node else {}
        limits |= {rdma[0]: rdma[1]} if rdma else {}
        return filled(
            "resources.yaml",
            {
                "memory": memory,
                "memory_why": self._memory_why(size),
                "cpus": str(2 * facts.ranks_per_node + 2),
                "cpu_why": (
                    "A rank keeps a thread that polls and one that feeds its GPU busy, tritonserver and the backend "
                    f"one each: 2 x {facts.ranks_per_node} + 2. An assumption. No limit: a throttled rank holds up all "
                    "others."
                ),
                "gpus_why": self._gpus_why(),
                "limits": mapping(limits),
            },
        )

    def _memory_why(self, size: int) -> str:
        weights = (
            f"{sized(size)} of weights / {BUDGET_SHARE} (page cache is charged to the pod that reads it, every rank "
            "maps all of them, and with less the first shards are dropped while the last are read) + "
            if size
            else ""
        )
        return (
            f"Memory: {weights}{self.facts.ranks_per_node} x {sized(RANK_BYTES)} for the ranks (an assumption) + "
            f"{sized(self._shm_bytes)} for /dev/shm, which counts too."
        )

    def _gpus_why(self) -> str:
        facts = self.facts
        if not facts.gpus_per_node:
            return "As requested: memory that is lent can be taken back."
        where = f" on each of {facts.nodes} nodes" if facts.nodes > 1 else ""
        return f"{facts.world_size} ranks, a GPU each, {facts.ranks_per_node}{where}."

    # --- volumes ---

    def _mounts(self) -> Entries:
        if self.config_map:
            yield {"name": "repository-source", "mountPath": REPOSITORY_MOUNT, "readOnly": True}
            yield {"name": "repository", "mountPath": REPOSITORY}
        else:
            yield {"name": "repository", "mountPath": REPOSITORY, "readOnly": True}
        for name, path, _, _ in self._checkpoints():
            yield {"name": name, "mountPath": path, "readOnly": True}
        yield {"name": "shm", "mountPath": "/dev/shm"}
        if self._keeps_caches:
            yield {"name": "kernels", "mountPath": kernel_caches.MOUNTED_AT} | (
                {"subPath": self._cache_folder.name} if self.options.kubernetes.cache_claim else {}
            )
        if self.facts.nodes > 1:
            yield {"name": "ssh", "mountPath": KEYS_MOUNT, "readOnly": True}

    def _config_map_volume(self) -> str:
        if not self.config_map:
            return ""
        head = f"  - name: repository-source\n    configMap:\n      name: {self.config_map}\n"
        return f"{head}      # A key can't hold a slash.\n      items:\n{items(self.repository_items, 8)}"

    def _volumes(self) -> Entries:
        kubernetes = self.options.kubernetes
        if self.config_map:
            yield {"name": "repository", "emptyDir": {}}
        else:
            yield {"name": "repository", "persistentVolumeClaim": _claim(kubernetes.repository_claim or "")}
        for name, _, what, source in self._checkpoints():
            yield what
            yield {"name": name} | source
        yield self._shm_why()
        yield {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": _gib(self._shm_bytes)}}
        if kubernetes.cache_claim:
            yield {"name": "kernels", "persistentVolumeClaim": {"claimName": kubernetes.cache_claim}}
        elif self._keeps_caches:
            yield "Of one image and GPU: what one compiler made another must not load."
            yield {"name": "kernels", "hostPath": {"path": str(self._cache_folder), "type": "DirectoryOrCreate"}}
        if self.facts.nodes > 1:
            yield "The key pair of the group."
            yield {"name": "ssh", "secret": {"secretName": f"{self.name}-ssh"}}

    def _shm_why(self) -> str:
        if self.options.shm_size:
            return f"/dev/shm, {sized(self._shm_bytes)} as asked for; a container's own is 64 MiB."
        return (
            f"/dev/shm: 1 GiB for each of {self.facts.ranks_per_node} ranks, for NCCL and MPI, and 1 GiB for "
            "tritonserver and its Python backend (an assumption); a container's own is 64 MiB. Only what is used takes "
            "memory."
        )

    def _checkpoints(self) -> Iterator[tuple[str, str, str, dict[str, object]]]:
        """Name, path in the pod, comment, source."""
        serving, claim = self.facts.serving, self.options.claim
        for n, (path, here) in enumerate(self.facts.mounts.items(), 1):
            number = f"-{n}" if n > 1 else ""
            what = one_line(f"The folder that is {here} where this was made.")
            yield f"checkpoint{number}", path, what, self._source(here, f"{claim or CHECKPOINT_CLAIM}{number}")
        if serving and serving.names:
            what = one_line(f"The hub folder of a Hugging Face cache with {' and '.join(serving.names)}.")
            yield "hub", HUB_MOUNT, what, self._source(serving.hub_cache, claim or HUB_CLAIM)

    def _source(self, here: str, claim: str) -> dict[str, object]:
        if self.options.kubernetes.checkpoint_on_nodes:
            return {"hostPath": {"path": here, "type": "Directory"}}
        return {"persistentVolumeClaim": _claim(claim)}

    @property
    def _keeps_caches(self) -> bool:
        return bool(self.options.kubernetes.cache_claim or self.options.cache_dir)

    @property
    def _cache_folder(self) -> Path:
        return kernel_caches.cache_folder(self.image, self.facts.gpu, self.options.cache_dir)


def _claim(name: str) -> dict[str, object]:
    return {"claimName": name, "readOnly": True}


def _gib(num_bytes: float) -> str:
    return f"{math.ceil(num_bytes / 2**30)}Gi"
