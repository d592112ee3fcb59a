"""The pods of the manifest: one with tritonserver, and over several nodes further ones with ranks only."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import quote

from deepseek_triton_build.arithmetic import ASSUMED_RATE, ENGINE_START_S, ready_within_s
from deepseek_triton_build.text import for_comment, parse_yaml
from deepseek_triton_tools.host.host_memory import BUDGET_SHARE
from deepseek_triton_tools.host.units import about, sized
from deepseek_triton_tools.launching.containers import KERNELS_MOUNT, cache_folder, kernel_environment, transports
from deepseek_triton_tools.launching.kubernetes_yaml import RepositoryFile, content_hash, filled, literal, mapping
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

    def pod(self, *, serves: bool) -> str:
        """Return the spec of a pod.

        :param serves: whether tritonserver runs in it, instead of ranks only.
        """
        facts, options, stop = self.facts, self.options, self.start.stop
        hub = bool(facts.serving and facts.serving.names)
        keeps_kernels = bool(options.cache_claim or options.cache_dir)
        folder = cache_folder(self.image, facts.gpu, options.cache_dir)
        sub_folder = f", subPath: {json.dumps(folder.name)}" if options.cache_claim else ""
        checkpoints = list(self._checkpoints())
        words = ("launch", *options.server_args) if options.server_args else ()  # the first is the script's own name
        environment = [mapping({"name": name, "value": literal(value)}) for name, value in options.environment]
        caches = kernel_environment() if keeps_kernels else {}
        return filled(
            "pod.yaml",
            {
                **(self._server_values() if serves else self._worker_values()),
                "serves": serves,
                "ssh": self.uses_ssh,
                "has_gpus": bool(facts.gpus_per_node),
                "host_network": options.host_network,
                "pull_secret": _quoted(options.pull_secret),
                "node_selector": options.node_selector and mapping(dict(options.node_selector)),
                "image": json.dumps(self.image),
                "server_args": [json.dumps(literal(word)) for word in words],
                "http_port": options.http_port,
                "exit_timeout_s": stop.exit_timeout_s,
                "ready_file": options.ready_file and _quoted(literal(str(options.ready_file))),
                "needs_home": not self.uses_ssh and "HOME" not in dict(options.environment),
                "interface": options.interface and _quoted(literal(options.interface)),
                "ssh_port": options.ssh_port or SSH_PORT,
                "hub": HUB_MOUNT if hub else None,
                "kernel_variables": [mapping({"name": name, "value": value}) for name, value in caches.items()],
                "variables": environment,
                **self._resource_values(),
                "config_map": self.config_map,
                "files": [mapping(file.item) for file in self.files],
                "repository": REPOSITORY,
                "repository_source": REPOSITORY_MOUNT,
                "repository_claim": _quoted(options.repository_claim),
                "sub_path": self.sub_path,
                "checkpoints": [name for name, *_ in checkpoints],
                "checkpoint_paths": [json.dumps(path) for _, path, *_ in checkpoints],
                "checkpoint_volumes": [
                    line
                    for name, _, what, source in checkpoints
                    for line in (f"# {what}", f"- {mapping({'name': name} | source)}")
                ],
                "kernels": f"{KERNELS_MOUNT}{sub_folder}" if keeps_kernels else None,
                "cache_claim": _quoted(options.cache_claim),
                "cache_folder": json.dumps(str(folder)) if keeps_kernels and not options.cache_claim else None,
                "keys": KEYS_MOUNT,
                "ssh_secret": f"{self.name}-ssh",
            },
        )

    @property
    def sub_path(self) -> str:
        """Where in the volume of a claim the repository is, as further fields of the mount."""
        return ""

    def variables(self) -> list[str]:
        """Return the names of the server's environment variables, in order and with repeated ones."""
        pod = parse_yaml(self.pod(serves=True))
        return [entry["name"] for entry in pod["containers"][0]["env"]]

    def _server_values(self) -> dict[str, Any]:
        options, start = self.options, self.start
        script = "start-node.sh" if self.is_group else "start-server.sh"
        mpirun = f"mpirun after {start.stop.mpirun_kill_s} s, " if self.facts.uses_mpi else ""
        return {
            "container": "tritonserver",
            "grace_why": (
                f"preStop takes {PRE_STOP_S} s. Counted from then, tritonserver gives open requests "
                f"{start.stop.exit_timeout_s} s (EXIT_TIMEOUT), the supervisor kills what is left after "
                f"{start.stop.supervisor_kill_s} s, {mpirun}and the kernel gets {SPARE_S} s to end it all."
            ),
            "grace_s": start.stop.grace_period_s,
            "script": self._script("start-leader.sh" if self.uses_ssh else script),
            "grpc_port": options.grpc_port,
            "metrics_port": options.metrics_port,
            "ready_within_s": 0 if options.ready_within == 0 else start.ready_within_s,
            "probe_why": self._probe_why(),
            "period_s": PERIOD_S,
            "failures": start.failure_threshold,
            "ready_path": json.dumps(f"/v2/models/{quote(self.facts.model)}/ready"),
            "pre_stop_s": PRE_STOP_S,
        }

    def _worker_values(self) -> dict[str, Any]:
        stop = self.start.stop
        start, end = ("start-worker.sh", "stop-worker.sh") if self.uses_ssh else ("start-node.sh", "stop-node.sh")
        return {
            "container": "ranks" if self.uses_ssh else "workers",
            "grace_why": (
                f"The leader's {stop.grace_period_s} s, and {GROUP_S} s (an assumption) in case this pod is told "
                "to end before the leader is."
            ),
            "grace_s": stop.worker_grace_period_s,
            "script": self._script(start),
            "stop_script": filled(end, {"port": self.options.http_port}).splitlines(),
        }

    def _script(self, name: str) -> list[str]:
        values = {"copies": bool(self.config_map), "mounted": REPOSITORY_MOUNT, "repository": REPOSITORY}
        return filled(name, values | {"keys": KEYS_MOUNT, "gather_s": self.start.gather_s}).splitlines()

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

    def _resource_values(self) -> dict[str, Any]:
        facts, rdma = self.facts, self.options.rdma
        shm_bytes = self.options.shm_size or facts.shm_bytes
        size = facts.serving.size if facts.serving else 0
        memory = _gib(size / BUDGET_SHARE + facts.workers_per_node * RANK_BYTES + shm_bytes)
        limits: dict[str, object] = {"memory": memory}
        limits |= {"nvidia.com/gpu": facts.gpus_per_node} if facts.gpus_per_node else {}
        limits |= {rdma[0]: rdma[1]} if rdma else {}
        weights = (
            f"{sized(size)} of weights / {BUDGET_SHARE} (page cache is charged to the pod that reads it, and every "
            "rank maps all weights; with less memory the first shards are dropped while the last are read) + "
            if size
            else ""
        )
        where = f" on each of {facts.nodes} nodes" if facts.nodes > 1 else " on this node"
        if self.options.shm_size:
            shm_why = f"/dev/shm, {sized(shm_bytes)} as requested. A container's default is 64 MiB."
        else:
            shm_why = (
                f"/dev/shm: 1 GiB for each of {facts.workers_per_node} ranks, for {transports(facts)}, and 1 GiB for "
                f"tritonserver and its Python backend (an assumption).{facts.expert_copy_why} A container's default is "
                "64 MiB. Only the part that is used takes memory."
            )
        security = "ssh" if self.uses_ssh else "gpu" if facts.gpus_per_node else "cpu"
        return {
            "security": filled(f"security-{security}.yaml", {}).splitlines(),
            "memory": memory,
            "memory_why": (
                f"Memory: {weights}{facts.workers_per_node} x {sized(RANK_BYTES)} for the ranks (an assumption) + "
                f"{sized(shm_bytes)} for /dev/shm, which is memory too."
            ),
            "cpus": 2 * facts.workers_per_node + 2,
            "cpu_why": (
                "A rank keeps two threads busy (one polls, one feeds its GPU), tritonserver and the backend one "
                f"each: 2 x {facts.workers_per_node} + 2, an assumption. There is no limit, because a throttled "
                "rank slows down all others."
            ),
            "gpus_why": f"{facts.num_gpus} ranks with a GPU each, {facts.workers_per_node}{where}.",
            "limits": mapping(limits),
            "shm_why": shm_why,
            "shm_size": _gib(shm_bytes),
        }

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


def _claim(name: str) -> dict[str, object]:
    return {"claimName": name, "readOnly": True}


def _quoted(text: str | None) -> str | None:
    return text and json.dumps(text)


def _gib(num_bytes: float) -> str:
    return f"{math.ceil(num_bytes / 2**30)}Gi"
