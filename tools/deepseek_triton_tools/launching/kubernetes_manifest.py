"""The manifest: a Deployment or, over several nodes, a LeaderWorkerSet, with all objects that belong to it.

The texts are in templates/kubernetes, where @@{name} stands for a value.

These facts about the LeaderWorkerSet come from kubernetes-sigs/lws at 060ab4d,
api/leaderworkerset/v1/leaderworkerset_types.go and pkg/: LWS_LEADER_ADDRESS is NAME-GROUP.SUBDOMAIN.NAMESPACE. Workers
are named NAME-GROUP-N from 1. The controller creates the headless Service NAME, which also has pods that are not ready.
The scale subresource selects leaders, whose label worker-index is "0".

Facts about `--routing`, who chooses the server of a request, come from llm-d/llm-d-inference-scheduler at 520af47
(v0.8.0): pkg/epp/server/options.go has the picker's options and refuses some that config/charts passes; the label and
the metrics of an engine are in pkg/epp/framework/plugins/datalayer/extractor/metrics/factories.go. That Envoy drops
Triton's ORCA reports is in envoyproxy/envoy, source/extensions/load_balancing_policies/common/orca_weight_manager.cc
(3aab63a), and triton-inference-server/server, src/orca_http.cc (e1db8a6).
"""

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import quote

from deepseek_triton_build.arithmetic import ASSUMED_RATE, ENGINE_START_S, ready_within_s
from deepseek_triton_build.check import read_yaml
from deepseek_triton_build.text import for_comment, parse_yaml, yaml_flow
from deepseek_triton_tools._version import __version__
from deepseek_triton_tools.host.host_memory import BUDGET_SHARE
from deepseek_triton_tools.host.units import about, sized
from deepseek_triton_tools.launching import launch_settings
from deepseek_triton_tools.launching.containers import KERNELS_MOUNT, cache_folder, kernel_environment, transports
from deepseek_triton_tools.launching.kubernetes_yaml import (
    RepositoryFile,
    content_hash,
    data_lines,
    document,
    filled,
    literal,
    mapping,
    repository_files,
)
from deepseek_triton_tools.repository.launch_facts import LaunchFacts
from deepseek_triton_tools.text_templates import wrapped
from deepseek_triton_tools.tool_errors import ToolError

REPOSITORY = "/model_repository"
REPOSITORY_MOUNT = "/etc/deepseek-triton/repository"
_SSH_MOUNT = "/etc/deepseek-triton/ssh"
_KEYS_MOUNT = "/etc/deepseek-triton/keys"
HUB_MOUNT = "/models/hub"
# Not 22, which the node's own sshd has when pods use the host's network.
_SSH_PORT = 2222
# Host memory of a rank besides weights and /dev/shm: for CUDA, torch and pinned buffers. An assumption.
_RANK_BYTES = 8 * 2**30
_CHECKPOINT_CLAIM = "deepseek-checkpoint"
_HUB_CLAIM = "huggingface-hub"
PLACEHOLDER = "YOUR-REGISTRY/"
"""Part of an image's name that has to be replaced before the manifest can be applied."""
# Characters. A StatefulSet's pods get a label of its name and a hash, at most 63 characters, and a pod's name has two
# more numbers.
MAX_NAME = 40
NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
"""RFC 1035, because the LeaderWorkerSet's name is also a Service's (pkg/webhooks/leaderworkerset_webhook.go)."""
MAX_INT32 = 2**31 - 1
"""Largest number of seconds or pods in any field."""
# Share of the sequences that run at once, at which the autoscaler aims, because a further replica comes only after a
# whole load. An assumption.
_TARGET_SHARE = 0.8
# Tells an endpoint picker of the Gateway API which metrics to read: nv_trt_llm_*, which every engine here has.
_ENGINE_LABEL = {"llm-d.ai/engine-type": "triton-tensorrt-llm"}
_GATEWAYS = 2
# Largest stabilizationWindowSeconds (autoscaling/v2).
_MAX_WINDOW_S = 3600


def object_name(facts: LaunchFacts, options: launch_settings.LaunchOptions) -> str:
    """Return the name of all objects: --name, or the name of the repository's folder."""
    return options.name or slug_of(facts.folder, MAX_NAME)


def slug_of(folder: Path, max_length: int) -> str:
    """Return the folder's name as far as Kubernetes takes it."""
    slug = re.sub(r"[^a-z0-9]+", "-", folder.name.lower())[:max_length].strip("-")
    return slug if NAME.fullmatch(slug) else "deepseek-triton"


def sequences_at_once(facts: LaunchFacts) -> int | None:
    """Return max_batch_size of model.yaml, or vLLM's max_num_seqs, over all ranks; None when it has none."""
    document, _ = read_yaml(facts.version_dir / "model.yaml", "model.yaml")
    values = document.values if document else {}
    if facts.vllm is not None:
        batch, ranks = values.get("max_num_seqs"), values.get("data_parallel_size", 1)
    else:
        is_split = values.get("enable_attention_dp") is True
        batch, ranks = values.get("max_batch_size"), values.get("tensor_parallel_size") if is_split else 1
    return batch * ranks if isinstance(batch, int) and isinstance(ranks, int) else None


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The pods of one repository, and all objects that belong to them."""

    facts: LaunchFacts
    options: launch_settings.LaunchOptions
    pair: str | None = None
    """Name of the set, where these are the servers of one side of a pair."""
    role: str = ""
    """The side's name."""

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
        component = {"app.kubernetes.io/component": self.role} if self.pair else {}
        return _labels("deepseek-triton", self.pair or self.name) | component

    @cached_property
    def files(self) -> list[RepositoryFile]:
        """Those of the ConfigMap; none when the repository is on a claim.

        :raises RepositoryError: when a ConfigMap can't hold them.
        """
        return [] if self.options.repository_claim else repository_files(self.facts.folder)

    @cached_property
    def config_map(self) -> str | None:
        return f"{self.name}-repository-{content_hash(self.files)}" if self.files else None

    @property
    def image(self) -> str:
        stock = f"{PLACEHOLDER}NAME" if self.uses_ssh else self.facts.image or ""
        return self.options.image or stock

    @cached_property
    def _rate(self) -> tuple[int, str]:
        """Bytes per second of the storage, and where the number comes from.

        :raises ToolError: when the document of --measured has no rate.
        """
        measured = self.options.measured
        if measured:
            return launch_settings.measured_rate(measured), for_comment(f"measured, by {measured}")
        if self.options.rate:
            return self.options.rate, "given with --rate"
        return ASSUMED_RATE, "assumed, because nothing was measured; give --rate"

    @cached_property
    def start(self) -> launch_settings.StartTimes:
        """:raises ToolError: when the load would take longer than a field of Kubernetes can say."""
        size, (rate, _) = self.facts.serving.size if self.facts.serving else 0, self._rate
        times = launch_settings.StartTimes(
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

    def documents(self) -> Iterator[str]:
        """:raises ToolError: when the storage's rate can't be right."""
        options, values = self.options, self._values
        workload = "leader-worker-set.yaml" if self.is_group else "deployment.yaml"
        yield wrapped(self._header()) + document(workload, self.group_values())
        yield document("service.yaml", values)
        yield document("disruption-budget.yaml", values)
        if options.max_replicas is not None:
            yield document("scaled-object.yaml" if options.autoscale == "keda" else "autoscaler.yaml", values)
        if options.gateway_image is not None:
            servers = f"{self.name}-servers"
            yield self.headless_service(servers)
            yield from self.gateway(options.gateway_image, self.name, ["--server", self.server_address(servers)])
        if options.routing == "epp":
            # The servers' Service and budget select by name and instance, so the picker's pod needs another name.
            picker = {
                "picker": f"{self.name}-picker",
                "picker_labels": mapping(_labels("deepseek-triton-picker", self.name)),
                "picker_image": yaml_flow(options.picker_image or ""),
                "picker_grace_s": options.stop_times.grace_period_s,
            }
            for template in ("inference-pool", "picker-rights", "picker-service", "picker-deployment"):
                yield document(f"{template}.yaml", values | picker)
        if options.routing and options.route_parent:
            namespace, name = options.route_parent
            backends: dict[str, tuple[dict[str, object], str]] = {
                "epp": (
                    {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": self.name},
                    "the pool",
                ),
                "gateway": ({"name": f"{self.name}-gateway", "port": 9000}, "OpenAI's API"),
                "envoy": ({"name": values["service"], "port": 8000}, "the servers"),
            }
            backend, route_to = backends[options.routing]
            route = {
                "parent": mapping({"name": name} | ({"namespace": namespace} if namespace else {})),
                "parent_name": "/".join(part for part in (namespace, name) if part),
                "backend": mapping(backend),
                "route_to": route_to,
            }
            yield document("http-route.yaml", values | route)
            if options.routing == "envoy":
                yield document("traffic-policy.yaml", values)
        if self.files:  # the longest comes last
            yield self.config_map_document()

    def side_documents(self) -> Iterator[str]:
        """Yield the Service and the budget of a pair's side."""
        yield self.headless_service(self.name)
        yield document("disruption-budget.yaml", self._values)

    def headless_service(self, name: str) -> str:
        return document("gateway-servers.yaml", self._values | {"servers": name})

    def server_address(self, service: str) -> str:
        """Return where a gateway finds the servers of a headless service."""
        return f"dns+http://{service}:{self.options.http_port}#metrics={self.options.metrics_port}"

    def gateway(self, image: str, name: str, servers: Sequence[str]) -> Iterator[str]:
        """Yield the gateway's objects.

        :param servers: the options of the gateway that name its servers.
        """
        options, exit_timeout_s = self.options, self.options.exit_timeout
        # The servers' Service and budget select by name and instance, so the gateway's pods need another name.
        labels, gateway = mapping(_labels("deepseek-triton-gateway", name)), f"{name}-gateway"
        command = [
            *("deepseek-triton", "gateway", "--host", "0.0.0.0", "--triton-model", self.facts.model),
            *servers,
            *("--drain-seconds", str(exit_timeout_s)),
            *(("--keys", f"{_KEYS_MOUNT}/keys") if options.gateway_keys else ()),
        ]
        values = self._values | {
            "gateway": gateway,
            "gateway_labels": labels,
            "gateway_image": yaml_flow(image),
            "comment_image": for_comment(image),
            "gateway_replicas": options.gateway_replicas or _GATEWAYS,
            "gateway_is_counted": bool(options.gateway_replicas),
            "gateway_scrape": self._scrape(9000),
            "command": [json.dumps(literal(word)) for word in command],
            "exit_timeout_s": exit_timeout_s,
            "spare_s": launch_settings.SPARE_S,
            "grace_s": launch_settings.PRE_STOP_S + exit_timeout_s + launch_settings.SPARE_S,
            "pre_stop_s": launch_settings.PRE_STOP_S,
            "keys": options.gateway_keys,
            "quoted_keys": json.dumps(options.gateway_keys),
            "keys_mount": _KEYS_MOUNT,
        }
        yield document("gateway-deployment.yaml", values)
        yield document("gateway-service.yaml", values)
        budget = {"name": yaml_flow(gateway), "labels": labels, "several": True, "is_group": False}
        yield document("disruption-budget.yaml", values | budget)

    @cached_property
    def _values(self) -> dict[str, Any]:
        """Values that every template may use."""
        options, running = self.options, sequences_at_once(self.facts)
        kind = ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet") if self.is_group else ("apps/v1", "Deployment")
        server_labels = self.labels
        # The controller of the set adds these labels.
        leader = {"leaderworkerset.sigs.k8s.io/worker-index": "0"}
        if self.pair:
            server_labels |= leader
        elif self.is_group:
            server_labels = {"leaderworkerset.sigs.k8s.io/name": self.name, **leader}
        return {
            "name": yaml_flow(self.name),
            "namespace": options.namespace and yaml_flow(options.namespace),
            "namespace_name": options.namespace or "",
            "pull_secret": _quoted(options.pull_secret),
            "labels": mapping(self.labels),
            "server_labels": mapping(server_labels),
            "is_group": self.is_group,
            "several": options.replicas > 1,
            "service": f"{self.name}-server",
            "http_port": options.http_port,
            "grpc_port": options.grpc_port,
            "metrics_port": options.metrics_port,
            "replicas": options.replicas,
            "max_replicas": options.max_replicas,
            "target_object": mapping({"apiVersion": kind[0], "kind": kind[1], "name": self.name}),
            "target": options.target or max(1, int((running or 0) * _TARGET_SHARE)),
            "target_is_given": bool(options.target),
            "target_share": _TARGET_SHARE,
            "running": running,
            "ready_time": about(self.start.ready_within_s),
            "down_s": min(_MAX_WINDOW_S, self.start.ready_within_s),
            "max_window_s": _MAX_WINDOW_S,
        }

    def _header(self) -> str:
        facts, namespace = self.facts, self.options.namespace
        where = f"{facts.nodes} nodes: a LeaderWorkerSet" if self.is_group else "one node: a Deployment"
        values = {
            "version": __version__,
            "source": for_comment(facts.source),
            "what": f"{for_comment(facts.model)}, {facts.num_gpus or 1} ranks on {where}.",
            "namespace_option": f" --namespace {namespace}" if namespace else "",
            "name": self.name,
            "base": for_comment(facts.image or "YOUR-IMAGE"),
        }
        ssh = filled("before-ssh.yaml", values) if self.uses_ssh else ""
        return filled("header.yaml", values | {"is_group": self.is_group, "is_pair": False}) + ssh

    def config_map_document(self) -> str:
        size = sum(len(file.content) for file in self.files)
        values = {"num_files": len(self.files), "size": sized(size), "config_map": self.config_map or ""}
        return document("config-map.yaml", self._values | values) + "\n".join(data_lines(self.files)) + "\n"

    def group_values(self) -> dict[str, Any]:
        """Return the values of the pods, of which a single one is a group without workers."""
        facts, options = self.facts, self.options
        return self._values | {
            "autoscaled": options.max_replicas is not None,
            "pod_labels": mapping(self.labels | _ENGINE_LABEL),
            "role": self.role,
            "scrape": self._scrape(options.metrics_port),
            "ssh": self.uses_ssh,
            "nodes": facts.nodes,
            "ranks": facts.num_gpus,
            "ranks_per_node": facts.gpus_per_node,
            "window_s": self.start.window_s,
            "node_s": launch_settings.GATHER_S,
            "progress_s": self.start.progress_deadline_s,
            "server_pod": self._pod(serves=True).splitlines(),
            "worker_pod": self._pod(serves=False).splitlines() if self.is_group else [],
        }

    def _scrape(self, port: int) -> str | None:
        """Return the annotations for Prometheus, if they were asked for."""
        values = {"scrape": "true", "port": str(port), "path": "/metrics"}
        annotations = {f"prometheus.io/{key}": value for key, value in values.items()}
        return mapping(annotations) if self.options.scrape else None

    def _pod(self, *, serves: bool) -> str:
        """Return the spec of a pod.

        :param serves: whether tritonserver runs in it, instead of ranks only.
        """
        facts, options, stop = self.facts, self.options, self.options.stop_times
        words = ("launch", *options.server_args) if options.server_args else ()  # the first is the script's own name
        script, stop_script = "start-node.sh" if self.is_group else "start-server.sh", "stop-node.sh"
        if self.uses_ssh:
            script, stop_script = "start-leader.sh" if serves else "start-worker.sh", "stop-worker.sh"
        places = {"copies": bool(self.config_map), "mounted": REPOSITORY_MOUNT, "repository": REPOSITORY}
        places |= {"keys": _SSH_MOUNT, "gather_s": self.start.gather_s}
        values = self._values | {
            "serves": serves,
            "ssh": self.uses_ssh,
            "container": "tritonserver" if serves else "ranks" if self.uses_ssh else "workers",
            "has_gpus": bool(facts.gpus_per_node),
            "host_network": options.host_network,
            "node_selector": options.node_selector and mapping(dict(options.node_selector)),
            "image": json.dumps(self.image),
            "script": filled(script, places).splitlines(),
            "stop_script": filled(stop_script, {"port": options.http_port}).splitlines(),
            "server_args": [json.dumps(literal(word)) for word in words],
            "exit_timeout_s": stop.exit_timeout_s,
            "supervisor_kill_s": stop.supervisor_kill_s,
            "mpirun_kill": f"mpirun after {stop.mpirun_kill_s} s, " if facts.uses_mpi else "",
            "grace_s": stop.grace_period_s if serves else stop.worker_grace_period_s,
            "leader_grace_s": stop.grace_period_s,
            "group_s": launch_settings.GROUP_S,
            "pre_stop_s": launch_settings.PRE_STOP_S,
            "spare_s": launch_settings.SPARE_S,
            "ready_file": options.ready_file and _quoted(literal(str(options.ready_file))),
            "needs_home": not self.uses_ssh and "HOME" not in dict(options.environment),
            "interface": options.interface and _quoted(literal(options.interface)),
            "ssh_port": options.ssh_port or _SSH_PORT,
            "variables": [mapping({"name": name, "value": literal(value)}) for name, value in options.environment],
            "config_map": self.config_map,
            "files": [mapping(file.item) for file in self.files],
            "repository": REPOSITORY,
            "repository_source": REPOSITORY_MOUNT,
            "repository_claim": _quoted(options.repository_claim),
            # The claim of a pair has the whole pair's folder.
            "sub_path": f", subPath: {self.role}" if self.pair else "",
            "keys": _SSH_MOUNT,
            "ssh_secret": f"{self.name}-ssh",
        }
        return filled("pod.yaml", values | self._start_values() | self._resource_values() | self._volume_values())

    def variables(self) -> list[str]:
        """Return the names of the server's environment variables, in order and with repeated ones."""
        pod = parse_yaml(self._pod(serves=True))
        return [entry["name"] for entry in pod["containers"][0]["env"]]

    def _start_values(self) -> dict[str, Any]:
        """Return the values of the startup probe."""
        start, serving = self.start, self.facts.serving
        return {
            "ready_within_s": 0 if self.options.ready_within == 0 else start.ready_within_s,
            "start_ready_within_s": start.ready_within_s,
            "gather_s": start.gather_s,
            "size": f"{serving.size:,}" if serving else "",
            "size_from": for_comment(serving.size_from) if serving else "",
            "rate": sized(start.rate),
            "rate_from": self._rate[1],
            "load_s": start.load_s,
            "load_time": about(start.load_s),
            "engine_start": about(ENGINE_START_S),
            "period_s": launch_settings.PERIOD_S,
            "failures": start.failure_threshold,
            "ready_path": json.dumps(f"/v2/models/{quote(self.facts.model)}/ready"),
        }

    def _resource_values(self) -> dict[str, Any]:
        facts, rdma, shm_size = self.facts, self.options.rdma, self.options.shm_size
        shm_bytes = shm_size or facts.shm_bytes
        size = facts.serving.size if facts.serving else 0
        memory = _gib(size / BUDGET_SHARE + facts.workers_per_node * _RANK_BYTES + facts.pinned_tables + shm_bytes)
        limits: dict[str, object] = {"memory": memory}
        limits |= {"nvidia.com/gpu": facts.gpus_per_node} if facts.gpus_per_node else {}
        limits |= {rdma[0]: rdma[1]} if rdma else {}
        security = "ssh" if self.uses_ssh else "gpu" if facts.gpus_per_node else "cpu"
        return {
            "security": filled(f"security-{security}.yaml", {}).splitlines(),
            "memory": memory,
            "weights": sized(size),
            "budget_share": BUDGET_SHARE,
            "rank_size": sized(_RANK_BYTES),
            "workers": facts.workers_per_node,
            "cpus": 2 * facts.workers_per_node + 2,
            "ranks": facts.num_gpus,
            "nodes": facts.nodes,
            "limits": mapping(limits),
            "shm": sized(shm_bytes),
            "shm_size": shm_size,
            "shm_limit": _gib(shm_bytes),
            "transports": transports(facts),
            "shared_memory_why": facts.shared_memory_why,
        }

    def _volume_values(self) -> dict[str, Any]:
        """Return the values of the volumes with checkpoints and with compiled kernels."""
        options, serving = self.options, self.facts.serving
        keeps_kernels = bool(options.cache_claim or options.cache_dir)
        folder = cache_folder(self.image, self.facts.gpu, options.cache_dir)
        sub_folder = f", subPath: {json.dumps(folder.name)}" if options.cache_claim else ""
        caches = kernel_environment() if keeps_kernels else {}
        volumes = []  # name, path in the pod, path here, claim, comment
        for n, (path, here) in enumerate(self.facts.mounts.items(), 1):
            number = f"-{n}" if n > 1 else ""
            what = f"The folder that was {here} on the machine where this was made."
            claim = f"{options.claim or _CHECKPOINT_CLAIM}{number}"
            volumes.append((f"checkpoint{number}", path, here, claim, what))
        if serving and serving.names:
            what = f"The hub folder of a Hugging Face cache that holds {' and '.join(serving.names)}."
            volumes.append(("hub", HUB_MOUNT, serving.hub_cache, options.claim or _HUB_CLAIM, what))
        lines = []
        for name, _, here, claim, what in volumes:
            source: dict[str, object] = {"persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
            if options.checkpoint_on_nodes:
                source = {"hostPath": {"path": here, "type": "Directory"}}
            lines += [f"# {for_comment(what)}", f"- {mapping({'name': name} | source)}"]
        return {
            "hub": HUB_MOUNT if serving and serving.names else None,
            "kernel_variables": [mapping({"name": name, "value": value}) for name, value in caches.items()],
            "checkpoints": [name for name, *_ in volumes],
            "checkpoint_paths": [json.dumps(path) for _, path, *_ in volumes],
            "checkpoint_volumes": lines,
            "kernels": f"{KERNELS_MOUNT}{sub_folder}" if keeps_kernels else None,
            "cache_claim": _quoted(options.cache_claim),
            "cache_folder": json.dumps(str(folder)) if keeps_kernels and not options.cache_claim else None,
        }


def _labels(name: str, instance: str) -> dict[str, str]:
    return {"app.kubernetes.io/name": name, "app.kubernetes.io/instance": instance}


def _quoted(text: str | None) -> str | None:
    return text and json.dumps(text)


def _gib(num_bytes: float) -> str:
    return f"{math.ceil(num_bytes / 2**30)}Gi"
