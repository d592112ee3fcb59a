"""The pods of the manifest: one with tritonserver, and over several nodes further ones with ranks only."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from urllib.parse import quote

from deepseek_triton_build.arithmetic import ASSUMED_RATE, ENGINE_START_S, ready_within_s
from deepseek_triton_build.text import for_comment
from deepseek_triton_tools.host.host_memory import BUDGET_SHARE
from deepseek_triton_tools.host.units import about, sized
from deepseek_triton_tools.launching.containers import KERNELS_MOUNT, cache_folder, kernel_environment, transports
from deepseek_triton_tools.launching.kubernetes_yaml import (
    RepositoryFile,
    block,
    content_hash,
    filled,
    items,
    literal,
    mapping,
)
from deepseek_triton_tools.launching.launch_settings import (
    GROUP_S,
    PERIOD_S,
    PRE_STOP_S,
    SPARE_S,
    LaunchOptions,
    StartTimes,
    measured_rate,
)
from deepseek_triton_tools.repository.launch_facts import LaunchFacts
from deepseek_triton_tools.tool_errors import ToolError

REPOSITORY = "/model_repository"
REPOSITORY_MOUNT = "/etc/deepseek-triton/repository"
KEYS_MOUNT = "/etc/deepseek-triton/ssh"
HUB_MOUNT = "/models/hub"
SSH_PORT = 2222
"""Not 22, which the node's own sshd has when pods use the host's network."""
RANK_BYTES = 8 * 2**30
"""Host memory of a rank besides weights and /dev/shm: for CUDA, torch and pinned buffers. An assumption."""
CHECKPOINT_CLAIM = "deepseek-checkpoint"
HUB_CLAIM = "huggingface-hub"
PLACEHOLDER = "YOUR-REGISTRY/"
"""Part of an image's name that has to be replaced before the manifest can be applied."""
MAX_NAME = 40
"""Characters. A StatefulSet's pods get a label of its name and a hash, at most 63 characters, and a pod's name has two
more numbers."""
NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
"""RFC 1035, because the LeaderWorkerSet's name is also a Service's (pkg/webhooks/leaderworkerset_webhook.go)."""
MAX_INT32 = 2**31 - 1
"""Largest number of seconds or pods in any field."""

Entries = Iterator["Mapping[str, object] | str"]
"""Entries of a list; a text is a comment for the entry after it."""


def object_name(facts: LaunchFacts, options: LaunchOptions) -> str:
    """Return the name of all objects: --name, or the name of the repository's folder."""
    return options.name or slug_of(facts.folder, MAX_NAME)


def slug_of(folder: Path, max_length: int) -> str:
    """Return the folder's name as far as Kubernetes takes it."""
    slug = re.sub(r"[^a-z0-9]+", "-", folder.name.lower())[:max_length].strip("-")
    return slug if NAME.fullmatch(slug) else "deepseek-triton"


@dataclass(frozen=True, kw_only=True)
class Pods:
    """The pods, and the names and times that all objects share."""

    facts: LaunchFacts
    options: LaunchOptions
    files: tuple[RepositoryFile, ...]
    """Files of the repository; none when it is on a claim."""

    @property
    def name(self) -> str:
        return object_name(self.facts, self.options)

    @property
    def is_group(self) -> bool:
        return self.facts.nodes > 1

    @property
    def uses_ssh(self) -> bool:
        """Whether mpirun in the leader starts the ranks of the other pods. vLLM's nodes are pods that start alike."""
        return self.is_group and self.facts.uses_mpi

    @property
    def labels(self) -> dict[str, str]:
        return {"app.kubernetes.io/name": "deepseek-triton", "app.kubernetes.io/instance": self.name}

    @cached_property
    def config_map(self) -> str | None:
        return f"{self.name}-repository-{content_hash(self.files)}" if self.files else None

    @property
    def image(self) -> str:
        if self.options.image or not self.uses_ssh:
            return self.options.image or self.facts.image or ""
        return f"{PLACEHOLDER}NAME"

    @cached_property
    def _rate(self) -> tuple[int, str]:
        """Bytes per second of the storage, and where the number comes from.

        :raises ToolError: when the document of --measured has no rate.
        """
        measured = self.options.measured
        if measured:
            return measured_rate(measured), for_comment(f"measured, by {measured}")
        if self.options.rate:
            return self.options.rate, "given with --rate"
        return ASSUMED_RATE, "assumed, because nothing was measured; give --rate"

    @cached_property
    def start(self) -> StartTimes:
        """:raises ToolError: when the load would take longer than a field of Kubernetes can say."""
        size, (rate, _) = self.facts.serving.size if self.facts.serving else 0, self._rate
        times = StartTimes(
            size=size,
            rate=rate,
            ready_within_s=self.options.ready_within
            or (ready_within_s(size, rate) if size else self.facts.ready_within_s),
            num_nodes=self.facts.nodes if self.uses_ssh else 1,
            stop=self.options.stop_times,
        )
        if times.progress_deadline_s > MAX_INT32:
            raise ToolError(
                f"--rate: expected a size such as 2GB, got {sized(rate)}/s, at which {sized(size)} take "
                f"{times.load_s:,} s",
                exit_code=2,
            )
        return times

    def server(self) -> str:
        """Return the spec of the pod with tritonserver."""
        stop, script = self.start.stop, "start-node.sh" if self.is_group else "start-server.sh"
        script = "start-leader.sh" if self.uses_ssh else script
        mpirun = f"mpirun after {stop.mpirun_kill_s} s, " if self.facts.uses_mpi else ""
        return filled(
            "server-pod.yaml",
            self._common()
            | {
                "grace_why": (
                    f"preStop takes {PRE_STOP_S} s. Counted from then, tritonserver gives open requests "
                    f"{stop.exit_timeout_s} s (EXIT_TIMEOUT), the supervisor kills what is left after "
                    f"{stop.supervisor_kill_s} s, {mpirun}and the kernel gets {SPARE_S} s to end it all."
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
                    "During this time the pod is taken out of its Services, so that new requests stop coming before "
                    f"the server refuses them. {PRE_STOP_S} s is an assumption."
                ),
                "pre_stop_s": str(PRE_STOP_S),
            },
        )

    def worker(self) -> str:
        """Return the spec of a pod with ranks only."""
        stop = self.start.stop
        start, end = ("start-worker.sh", "stop-worker.sh") if self.uses_ssh else ("start-node.sh", "stop-node.sh")
        return filled(
            "worker-pod.yaml" if self.uses_ssh else "node-pod.yaml",
            self._common()
            | {
                "grace_why": (
                    f"The leader's {stop.grace_period_s} s, and {GROUP_S} s (an assumption) in case this pod is told "
                    "to end before the leader is."
                ),
                "grace_s": str(stop.worker_grace_period_s),
                "script": block(self._script(start), 8),
                "stop_script": block(filled(end, {"port": str(self.options.http_port)}), 14),
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
        """Return the arguments of the script. The first is its own name, the others are for tritonserver."""
        if not self.options.server_args:
            return ""
        words = ("launch", *self.options.server_args)
        return "".join(f"      - {json.dumps(literal(word))}\n" for word in words)

    # --- environment ---

    def _server_environment(self) -> Entries:
        options, start = self.options, self.start
        yield "Ports of tritonserver, which the probes and the Service use."
        yield {"name": "HTTP_PORT", "value": str(options.http_port)}
        yield {"name": "GRPC_PORT", "value": str(options.grpc_port)}
        yield {"name": "METRICS_PORT", "value": str(options.metrics_port)}
        yield "Seconds for open requests when the server is stopped; terminationGracePeriodSeconds is computed from it."
        yield {"name": "EXIT_TIMEOUT", "value": str(start.stop.exit_timeout_s)}
        yield self._ready_within_why()
        yield {"name": "READY_WITHIN", "value": str(0 if options.ready_within == 0 else start.ready_within_s)}
        yield (
            "The kubelet restarts the server, with its own back-off and a new startupProbe. If the supervisor "
            "restarted it within the container, the livenessProbe would end the load."
        )
        yield {"name": "MAX_RESTARTS", "value": "0"}
        if options.ready_file:
            yield "This file exists inside the container while the server is ready."
            yield {"name": "READY_FILE", "value": literal(str(options.ready_file))}
        if self.uses_ssh:
            yield "Without these mpirun cuts a pod's address NAME.SUBDOMAIN down to NAME (Open MPI 4, then 5)."
            yield {"name": "OMPI_MCA_orte_keep_fqdn_hostnames", "value": "true"}
            yield {"name": "PRTE_MCA_prte_keep_fqdn_hostnames", "value": "true"}
        yield from self._environment()

    def variables(self) -> Iterator[str]:
        """Yield the names of the server's environment variables, in order and with repeated ones."""
        return (str(entry["name"]) for entry in self._server_environment() if not isinstance(entry, str))

    def _ready_within_why(self) -> str:
        if self.options.ready_within == 0:
            return "The supervisor has no deadline, as requested. The startupProbe has one, but it can't name a rank."
        return (
            "Seconds until the supervisor gives up and names the missing rank. The startupProbe gives up later, "
            "because it can't name the rank."
        )

    def _environment(self) -> Entries:
        """Yield the variables of every pod."""
        if not self.uses_ssh and "HOME" not in dict(self.options.environment):
            yield "Where programs keep what they write, because the image is read-only."
            yield {"name": "HOME", "value": "/tmp"}
        if self.options.interface:
            yield "The network interface between the nodes."
            yield {"name": "INTERFACE", "value": literal(self.options.interface)}
        if self.uses_ssh:
            yield "Port of the pods' sshd. It must be free on the node too, whose own sshd has 22."
            yield {"name": "SSH_PORT", "value": str(self._ssh_port)}
        if self.facts.serving and self.facts.serving.names:
            yield "The checkpoint is on a read-only volume already, so nothing is downloaded."
            yield {"name": "HF_HUB_CACHE", "value": HUB_MOUNT}
            yield {"name": "HF_HUB_OFFLINE", "value": "1"}
        if self._keeps_caches:
            yield "Compiled kernels outlive the pod. Otherwise the first requests of every shape wait for them again."
            for variable, folder in kernel_environment().items():
                yield {"name": variable, "value": folder}
        if self.options.environment:
            yield "As requested, or as set where this was made."
            for variable, value in self.options.environment:
                yield {"name": variable, "value": literal(value)}

    @property
    def _ssh_port(self) -> int:
        return self.options.ssh_port or SSH_PORT

    # --- reasons ---

    def _probe_why(self) -> str:
        start, serving = self.start, self.facts.serving
        gather = (
            f"{start.gather_s} s until the other pods are there (an assumption: a node may have to be added, and 14 GB "
            "of image be pulled). "
            if start.gather_s
            else ""
        )
        load = (
            f"{serving.size:,} bytes of weights (by {for_comment(serving.size_from)}) at {sized(start.rate)}/s "
            f"({self._rate[1]}) take {start.load_s} s, {about(start.load_s)}. The engine's kernels and CUDA graphs "
            f"take {about(ENGINE_START_S)} (an assumption). So "
            if serving
            else ""
        )
        return (
            f"{gather}{load}READY_WITHIN is {start.ready_within_s} s. Then the supervisor ends its processes within "
            f"{start.stop.supervisor_kill_s} s, and a minute is to spare. The probe waits longer than all of these "
            f"together: {start.failure_threshold} x {PERIOD_S} s."
        )

    # --- the rest of a pod ---

    def _common(self) -> dict[str, str]:
        return {
            "pod_common": "".join(self._pod_lines()),
            "image": json.dumps(self.image),
            "security": block(self._security(), 4),
            "resources": self._resources(),
            "mounts": items(self._mounts(), 6),
            "volumes": (self._config_map_volume() + items(self._volumes(), 2)).rstrip("\n"),
        }

    def _security(self) -> str:
        if self.uses_ssh:
            return filled("security-ssh.yaml", {})
        return filled("security-gpu.yaml" if self.facts.gpus_per_node else "security-cpu.yaml", {})

    def _pod_lines(self) -> Iterator[str]:
        options = self.options
        yield "# Nothing here talks to Kubernetes. A Service named http would set HTTP_PORT, which start.sh reads.\n"
        yield "automountServiceAccountToken: false\nenableServiceLinks: false\n"
        if options.host_network:
            yield "# The node's own network, for its fast interfaces. Names of the cluster are resolved nevertheless.\n"
            yield "hostNetwork: true\ndnsPolicy: ClusterFirstWithHostNet\n"
        if options.pull_secret:
            yield f"imagePullSecrets: [{mapping({'name': options.pull_secret})}]\n"
        if options.node_selector:
            yield f"nodeSelector: {mapping(dict(options.node_selector))}\n"
        if self.facts.gpus_per_node:
            yield "# Nodes with GPUs often have a taint that keeps other pods away.\ntolerations:\n"
            yield items([{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}], 2)

    @property
    def _shm_bytes(self) -> int:
        return self.options.shm_size or self.facts.shm_bytes

    def _resources(self) -> str:
        facts, rdma = self.facts, self.options.rdma
        size = facts.serving.size if facts.serving else 0
        memory = _gib(size / BUDGET_SHARE + facts.workers_per_node * RANK_BYTES + self._shm_bytes)
        limits: dict[str, object] = {"memory": memory}
        limits |= {"nvidia.com/gpu": facts.gpus_per_node} if facts.gpus_per_node else {}
        limits |= {rdma[0]: rdma[1]} if rdma else {}
        return filled(
            "resources.yaml",
            {
                "memory": memory,
                "memory_why": self._memory_why(size),
                "cpus": str(2 * facts.workers_per_node + 2),
                "cpu_why": (
                    "A rank keeps two threads busy (one polls, one feeds its GPU), tritonserver and the backend one "
                    f"each: 2 x {facts.workers_per_node} + 2, an assumption. There is no limit, because a throttled "
                    "rank slows down all others."
                ),
                "gpus_why": self._gpus_why(),
                "limits": mapping(limits),
            },
        )

    def _memory_why(self, size: int) -> str:
        weights = (
            f"{sized(size)} of weights / {BUDGET_SHARE} (page cache is charged to the pod that reads it, and every "
            "rank maps all weights; with less memory the first shards are dropped while the last are read) + "
            if size
            else ""
        )
        return (
            f"Memory: {weights}{self.facts.workers_per_node} x {sized(RANK_BYTES)} for the ranks (an assumption) + "
            f"{sized(self._shm_bytes)} for /dev/shm, which is memory too."
        )

    def _gpus_why(self) -> str:
        facts = self.facts
        if not facts.gpus_per_node:
            return "The same memory as in requests: memory above the request can be taken back."
        where = f" on each of {facts.nodes} nodes" if facts.nodes > 1 else " on this node"
        return f"{facts.num_gpus} ranks with a GPU each, {facts.workers_per_node}{where}."

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
        if not self.uses_ssh:
            yield {"name": "tmp", "mountPath": "/tmp"}
        if self._keeps_caches:
            yield {"name": "kernels", "mountPath": KERNELS_MOUNT} | (
                {"subPath": self._cache_folder.name} if self.options.cache_claim else {}
            )
        if self.uses_ssh:
            yield {"name": "ssh", "mountPath": KEYS_MOUNT, "readOnly": True}

    def _config_map_volume(self) -> str:
        if not self.config_map:
            return ""
        head = f"  - name: repository-source\n    configMap:\n      name: {self.config_map}\n"
        entries = items((file.item for file in self.files), 8)
        return f"{head}      # A key has no slash, a path may.\n      items:\n{entries}"

    def _volumes(self) -> Entries:
        options = self.options
        if self.config_map:
            yield {"name": "repository", "emptyDir": {}}
        else:
            yield {"name": "repository", "persistentVolumeClaim": _claim(options.repository_claim or "")}
        for name, _, what, source in self._checkpoints():
            yield what
            yield {"name": name} | source
        yield self._shm_why()
        yield {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": _gib(self._shm_bytes)}}
        if not self.uses_ssh:
            yield "What programs write, and kernels that are compiled. The rest of the container is read-only."
            yield {"name": "tmp", "emptyDir": {}}
        if options.cache_claim:
            yield {"name": "kernels", "persistentVolumeClaim": {"claimName": options.cache_claim}}
        elif self._keeps_caches:
            yield "The folder is for one image and GPU: kernels of another image's compilers must not be loaded."
            yield {"name": "kernels", "hostPath": {"path": str(self._cache_folder), "type": "DirectoryOrCreate"}}
        if self.uses_ssh:
            yield "The key pair of the group."
            yield {"name": "ssh", "secret": {"secretName": f"{self.name}-ssh"}}

    def _shm_why(self) -> str:
        if self.options.shm_size:
            return f"/dev/shm, {sized(self._shm_bytes)} as requested. A container's default is 64 MiB."
        return (
            f"/dev/shm: 1 GiB for each of {self.facts.workers_per_node} ranks, for {transports(self.facts)}, and "
            f"1 GiB for tritonserver and its Python backend (an assumption).{self.facts.expert_copy_why} A "
            "container's default is 64 MiB. Only the part that is used takes memory."
        )

    def _checkpoints(self) -> Iterator[tuple[str, str, str, dict[str, object]]]:
        """Yield name, path in the pod, comment and source of each volume with a checkpoint."""
        serving, claim = self.facts.serving, self.options.claim
        for n, (path, here) in enumerate(self.facts.mounts.items(), 1):
            number = f"-{n}" if n > 1 else ""
            what = for_comment(f"The folder that was {here} on the machine where this was made.")
            yield f"checkpoint{number}", path, what, self._source(here, f"{claim or CHECKPOINT_CLAIM}{number}")
        if serving and serving.names:
            what = for_comment(f"The hub folder of a Hugging Face cache that holds {' and '.join(serving.names)}.")
            yield "hub", HUB_MOUNT, what, self._source(serving.hub_cache, claim or HUB_CLAIM)

    def _source(self, here: str, claim: str) -> dict[str, object]:
        if self.options.checkpoint_on_nodes:
            return {"hostPath": {"path": here, "type": "Directory"}}
        return {"persistentVolumeClaim": _claim(claim)}

    @property
    def _keeps_caches(self) -> bool:
        return bool(self.options.cache_claim or self.options.cache_dir)

    @property
    def _cache_folder(self) -> Path:
        return cache_folder(self.image, self.facts.gpu, self.options.cache_dir)


def _claim(name: str) -> dict[str, object]:
    return {"claimName": name, "readOnly": True}


def _gib(num_bytes: float) -> str:
    return f"{math.ceil(num_bytes / 2**30)}Gi"
