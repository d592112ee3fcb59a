"""`launch kubernetes --routing`: who chooses the server of a request, and the objects for it.

These facts come from llm-d/llm-d-inference-scheduler at 520af47 (v0.8.0): pkg/epp/server/options.go has the picker's
options and refuses some that config/charts passes; the label and the metrics of an engine are in pkg/epp/framework/
plugins/datalayer/extractor/metrics/factories.go. That Envoy drops Triton's ORCA reports is in envoyproxy/envoy,
source/extensions/load_balancing_policies/common/orca_weight_manager.cc (3aab63a), and triton-inference-server/server,
src/orca_http.cc (e1db8a6).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from deepseek_triton_build.text import yaml_flow
from deepseek_triton_tools.launching.kubernetes_pods import Pods
from deepseek_triton_tools.launching.kubernetes_text import filled, mapping
from deepseek_triton_tools.launching.launch_settings import LaunchOptions
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


def routing_documents(pods: Pods, values: Mapping[str, str]) -> Iterator[str]:
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
    yield wrapped(filled("http-route.yaml", {**values, **route}))
    if options.routing == "envoy":
        yield wrapped(filled("traffic-policy.yaml", values))


def _picker(pods: Pods, values: Mapping[str, str]) -> Iterator[str]:
    options = pods.options
    # The servers' Service and budget select by name and instance, so the picker's pod needs another name.
    labels = {"app.kubernetes.io/name": "deepseek-triton-picker", "app.kubernetes.io/instance": pods.name}
    picker = {
        "picker": f"{pods.name}-picker",
        "picker_labels": mapping(labels),
        "picker_image": yaml_flow(options.picker_image or ""),
        "picker_grace_s": str(pods.start.stop.grace_period_s),
        "picker_pull_secret": (
            f"      imagePullSecrets: [{mapping({'name': options.pull_secret})}]\n" if options.pull_secret else ""
        ),
    }
    for template in ("inference-pool", "picker-rights", "picker-service", "picker-deployment"):
        yield wrapped(filled(f"{template}.yaml", {**values, **picker}))
