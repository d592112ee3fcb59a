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

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from deepseek_triton_build.check import read_yaml
from deepseek_triton_build.text import for_comment, yaml_flow
from deepseek_triton_tools._version import __version__
from deepseek_triton_tools.host.units import about, sized
from deepseek_triton_tools.launching.kubernetes_pods import Pods
from deepseek_triton_tools.launching.kubernetes_yaml import data_lines, document, filled, literal, mapping
from deepseek_triton_tools.launching.launch_settings import PRE_STOP_S, SPARE_S, LaunchOptions
from deepseek_triton_tools.repository.launch_facts import LaunchFacts
from deepseek_triton_tools.text_templates import wrapped


def routing_refusals(options: LaunchOptions) -> Iterator[str]:
    routing, gateway = options.routing, options.gateway_image
    if routing == "gateway" and gateway is None:
        yield "--routing gateway: name with --gateway-image an image that has deepseek-triton[gateway]"
    if routing in ("epp", "envoy") and gateway is not None:
        yield (
            f"--routing {routing} and --gateway-image: the gateway chooses servers by itself: give --routing gateway, "
            "or no --gateway-image"
        )
    if routing in ("epp", "envoy") and options.route_parent is None:
        yield f"--routing {routing}: name with --route-parent the Gateway object whose requests are for these servers"
    if routing == "epp" and options.picker_image is None:
        yield (
            "--routing epp: name with --picker-image an image of llm-d's endpoint picker 0.8, such as "
            "ghcr.io/llm-d/llm-d-router-endpoint-picker:v0.8.0"
        )
    if routing != "epp" and options.picker_image is not None:
        yield "--picker-image is for the endpoint picker, and without --routing epp there is none"
    if routing is None and options.route_parent is not None:
        yield "--route-parent is for a route, and without --routing there is none"


def scaling_refusals(options: LaunchOptions) -> Iterator[str]:
    if options.autoscale is None:
        return
    if options.max_replicas is None or options.max_replicas == options.replicas:
        found = options.max_replicas or "none"
        yield f"--autoscale: expected --max-replicas above --replicas ({options.replicas}), got {found}"
    if options.autoscale == "keda" and options.namespace is None:
        yield "--autoscale keda: name the namespace with --namespace, because KEDA looks for the servers there"


def routing_documents(pods: Pods, values: Mapping[str, Any]) -> Iterator[str]:
    """:param values: those that every template may use, with the server's ports."""
    options = pods.options
    if options.routing == "epp":
        yield from _picker(pods, values)
    if options.routing is None or options.route_parent is None:
        return
    backends: dict[str, tuple[dict[str, object], str]] = {
        "epp": ({"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": pods.name}, "the pool"),
        "gateway": ({"name": f"{pods.name}-gateway", "port": 9000}, "OpenAI's API"),
        "envoy": ({"name": values["service"], "port": 8000}, "the servers"),
    }
    backend, route_to = backends[options.routing]
    namespace, name = options.route_parent
    parent = {"name": name} | ({"namespace": namespace} if namespace else {})
    route = {
        "parent": mapping(parent),
        "parent_name": "/".join(part for part in (namespace, name) if part),
        "backend": mapping(backend),
        "route_to": route_to,
    }
    yield document("http-route.yaml", {**values, **route})
    if options.routing == "envoy":
        yield document("traffic-policy.yaml", values)


def _picker(pods: Pods, values: Mapping[str, Any]) -> Iterator[str]:
    options = pods.options
    # The servers' Service and budget select by name and instance, so the picker's pod needs another name.
    labels = {"app.kubernetes.io/name": "deepseek-triton-picker", "app.kubernetes.io/instance": pods.name}
    picker = {
        "picker": f"{pods.name}-picker",
        "picker_labels": mapping(labels),
        "picker_image": yaml_flow(options.picker_image or ""),
        "picker_grace_s": pods.start.stop.grace_period_s,
    }
    for template in ("inference-pool", "picker-rights", "picker-service", "picker-deployment"):
        yield document(f"{template}.yaml", {**values, **picker})


_TARGET_SHARE = 0.8
"""Share of the sequences that run at once, at which the autoscaler aims, because a further replica comes only after a
whole load. An assumption."""
_ENGINE_LABEL = {"llm-d.ai/engine-type": "triton-tensorrt-llm"}
"""Tells an endpoint picker of the Gateway API which metrics to read: nv_trt_llm_*, which every engine here has."""
_KEYS_MOUNT = "/etc/deepseek-triton/keys"
_GATEWAYS = 2
_MAX_WINDOW_S = 3600
"""Largest stabilizationWindowSeconds (autoscaling/v2)."""


def sequences_at_once(facts: LaunchFacts) -> int | None:
    """Return max_batch_size of model.yaml, or vLLM's max_num_seqs, over all ranks; None when it has none."""
    document, _ = read_yaml(facts.version_dir / "model.yaml", "model.yaml")
    values = document.values if document else {}
    if facts.vllm is not None:
        batch, ranks = values.get("max_num_seqs"), values.get("data_parallel_size", 1)
        return batch * ranks if isinstance(batch, int) and isinstance(ranks, int) else None
    batch, ranks = values.get("max_batch_size"), values.get("tensor_parallel_size")
    if not isinstance(batch, int):
        return None
    return batch * ranks if values.get("enable_attention_dp") is True and isinstance(ranks, int) else batch


class Manifest(Pods):
    """The pods, and all objects that belong to them."""

    def documents(self) -> Iterator[str]:
        """:raises ToolError: when the storage's rate can't be right."""
        head = wrapped(self._header())
        if self.files:
            yield head + self.config_map_document()
            head = ""
        yield head + wrapped(self._workload())
        yield document("service.yaml", self._values())
        yield document("disruption-budget.yaml", self._values() | self.budget())
        if self.options.max_replicas is not None:
            scaler = "scaled-object.yaml" if self.options.autoscale == "keda" else "autoscaler.yaml"
            yield document(scaler, self._values() | self._autoscaling())
        if self.options.gateway_image is not None:
            servers = f"{self.name}-servers"
            yield self.headless_service(servers)
            yield from self.gateway(self.options.gateway_image, self.name, ["--server", self.server_address(servers)])
        yield from routing_documents(self, self._values())

    def headless_service(self, name: str) -> str:
        values = {"servers": name, "http_port": str(self.options.http_port)}
        return document("gateway-servers.yaml", self._values() | values)

    def server_address(self, service: str) -> str:
        """Return where a gateway finds the servers of a headless service."""
        return f"dns+http://{service}:{self.options.http_port}#metrics={self.options.metrics_port}"

    def gateway(self, image: str, name: str, servers: Sequence[str]) -> Iterator[str]:
        """Yield the gateway's objects.

        :param servers: the options of the gateway that name its servers.
        """
        options, stop = self.options, self.start.stop
        # The servers' Service and budget select by name and instance, so the gateway's pods need another name.
        labels = {"app.kubernetes.io/name": "deepseek-triton-gateway", "app.kubernetes.io/instance": name}
        gateway = f"{name}-gateway"
        command = [
            *("deepseek-triton", "gateway", "--host", "0.0.0.0", "--triton-model", self.facts.model),
            *servers,
            *("--drain-seconds", str(stop.exit_timeout_s)),
            *(("--keys", f"{_KEYS_MOUNT}/keys") if options.gateway_keys else ()),
        ]
        values = self._values() | {
            "gateway": gateway,
            "gateway_labels": mapping(labels),
            "gateway_image": yaml_flow(image),
            "comment_image": for_comment(image),
            "gateway_replicas": options.gateway_replicas or _GATEWAYS,
            "gateway_is_counted": bool(options.gateway_replicas),
            "gateway_scrape": self._scrape(9000),
            "command": [json.dumps(literal(word)) for word in command],
            "exit_timeout_s": stop.exit_timeout_s,
            "spare_s": SPARE_S,
            "grace_s": PRE_STOP_S + stop.exit_timeout_s + SPARE_S,
            "pre_stop_s": PRE_STOP_S,
            "keys": options.gateway_keys,
            "quoted_keys": json.dumps(options.gateway_keys),
            "keys_mount": _KEYS_MOUNT,
        }
        yield document("gateway-deployment.yaml", values)
        yield document("gateway-service.yaml", values)
        budget = {"name": yaml_flow(gateway), "labels": mapping(labels), "several": True, "as_group": ""}
        yield document("disruption-budget.yaml", values | budget)

    def _values(self) -> dict[str, Any]:
        """Return the values that every template may use."""
        namespace = self.options.namespace
        service = f"{self.name}-server"
        why = f"The address for users: http://{service}:8000."
        server_labels = self.labels
        if self.is_group:
            why += " It reaches leaders only, because nothing else listens."
            # The controller of the set adds these labels.
            server_labels = {
                "leaderworkerset.sigs.k8s.io/name": self.name,
                "leaderworkerset.sigs.k8s.io/worker-index": "0",
            }
        return {
            "name": yaml_flow(self.name),
            "namespace": namespace and yaml_flow(namespace),
            "pull_secret": self.options.pull_secret and json.dumps(self.options.pull_secret),
            "labels": mapping(self.labels),
            "server_labels": mapping(server_labels),
            "service": service,
            "service_why": why,
            "http_port": str(self.options.http_port),
            "metrics_port": str(self.options.metrics_port),
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
        values = {"num_files": str(len(self.files)), "size": sized(size), "config_map": self.config_map or ""}
        head = filled("config-map.yaml", self._values() | values)
        return wrapped(head) + "\n".join(data_lines(self.files)) + "\n"

    def _workload(self) -> str:
        values = self._values() | self.group_values()
        if self.is_group:
            return filled("leader-worker-set.yaml", values)
        start = self.start
        times = {"window_s": start.window_s, "progress_s": start.progress_deadline_s}
        spare = {"progress_spare_s": start.progress_deadline_s - start.window_s}
        return filled("deployment.yaml", values | times | spare)

    def group_values(self) -> dict[str, Any]:
        """Return the values of the pods, of which a single one is a group without workers."""
        facts, options = self.facts, self.options
        return {
            "autoscaled": options.max_replicas is not None,
            "replicas": options.replicas,
            "labels": mapping(self.labels),
            "pod_labels": mapping(self.labels | _ENGINE_LABEL),
            "scrape": self._scrape(options.metrics_port),
            "is_group": self.is_group,
            "nodes": facts.nodes,
            "ranks": facts.num_gpus,
            "ranks_per_node": facts.gpus_per_node,
            "world": "The ranks form one MPI world" if self.uses_ssh else "vLLM's nodes form one group",
            "server_pod": self.pod(serves=True).splitlines(),
            "worker_pod": self.pod(serves=False).splitlines() if self.is_group else [],
        }

    def _scrape(self, port: int) -> str | None:
        """Return the annotations for Prometheus, if they were asked for."""
        values = {"scrape": "true", "port": str(port), "path": "/metrics"}
        annotations = {f"prometheus.io/{key}": value for key, value in values.items()}
        return mapping(annotations) if self.options.scrape else None

    def budget(self) -> dict[str, Any]:
        as_group = " A group serves only as a whole, so all its pods count." if self.is_group else ""
        return {"several": self.options.replicas > 1, "is_group": self.is_group, "as_group": as_group}

    def _autoscaling(self) -> dict[str, Any]:
        running, target = sequences_at_once(self.facts), self.options.target
        kind = ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet") if self.is_group else ("apps/v1", "Deployment")
        within_s = self.start.ready_within_s
        return {
            "scale_why": " It counts groups, by their leaders." if self.is_group else "",
            "target_api": kind[0],
            "target_kind": kind[1],
            "namespace_name": self.options.namespace or "",
            "replicas_min": str(self.options.replicas),
            "replicas_max": str(self.options.max_replicas),
            "target": str(target or max(1, int((running or 0) * _TARGET_SHARE))),
            "target_why": (
                "Sequences in flight, as requested."
                if target
                else f"Sequences in flight: {_TARGET_SHARE} of the {running} that run at once (by model.yaml, over all "
                "ranks); further ones wait."
            ),
            "down_s": str(min(_MAX_WINDOW_S, within_s)),
            "down_why": (
                f"A replica that is removed takes {about(within_s)} to come back (READY_WITHIN). So it goes only when "
                f"it was not needed for as long, or for {_MAX_WINDOW_S} s, which is the largest value."
            ),
        }
