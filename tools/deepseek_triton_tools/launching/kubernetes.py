"""`launch kubernetes`: the limits of its options, and the manifest that they give, for one repository or for a pair.

kubernetes_manifest.py writes the manifest; the texts are in templates/kubernetes. A pair
is a DisaggregatedSet, whose roles are the context and the generation servers.

These facts come from kubernetes-sigs/lws at 060ab4d, api/disaggregatedset/v1 and pkg/: the controller makes a
LeaderWorkerSet NAME-SLICE-REVISION-ROLE of each role, where REVISION has 8 digits. It leaves the labels of the pod
templates as they are, and adds its own. Leaders, and pods alone, have the label worker-index "0".
"""

import re
import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from deepseek_triton_build.text import for_comment, safe_name, yaml_flow
from deepseek_triton_tools._version import __version__
from deepseek_triton_tools.launching import containers, start_script
from deepseek_triton_tools.launching.kubernetes_manifest import (
    MAX_INT32,
    MAX_NAME,
    NAME,
    Manifest,
    object_name,
    sequences_at_once,
    slug_of,
)
from deepseek_triton_tools.launching.kubernetes_yaml import document, filled, mapping
from deepseek_triton_tools.launching.launch_settings import LaunchedPair, LaunchOptions
from deepseek_triton_tools.launching.start_script import FIRST_NODE, needs_master
from deepseek_triton_tools.repository.launch_facts import LaunchFacts
from deepseek_triton_tools.text_templates import wrapped
from deepseek_triton_tools.tool_errors import ToolError

# RFC 1123.
_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_SUBDOMAIN = rf"{_LABEL}(\.{_LABEL})*"
_MAX_SUBDOMAIN = 253
# The name of a node's label behind its slash, and its value (kubernetes.io, Labels and Selectors).
_NODE_LABEL_PART = r"[A-Za-z0-9]([-._A-Za-z0-9]{0,61}[A-Za-z0-9])?"
_NODE_LABEL = re.compile(rf"({_SUBDOMAIN}/)?{_NODE_LABEL_PART}")
_NODE_VALUE = re.compile(rf"({_NODE_LABEL_PART})?")
_RESOURCE = re.compile(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?/[A-Za-z0-9]([-._A-Za-z0-9]*[A-Za-z0-9])?")


def render(facts: LaunchFacts, options: LaunchOptions) -> str:
    """Return documents of YAML for `kubectl apply --server-side`.

    :raises ToolError: when start.sh refuses, a variable is set twice, or the rate of the storage can't be right.
    """
    manifest = Manifest(facts=facts, options=options)
    check(manifest)
    return "---\n".join(manifest.documents())


def check(pods: Manifest) -> None:
    """:raises ToolError: when start.sh refuses, or a variable is set twice."""
    facts, options = pods.facts, pods.options
    hosts = {"HOSTS": ",".join(f"node{n}" for n in range(facts.nodes))} if facts.nodes > 1 else {}
    if needs_master(facts):
        hosts = FIRST_NODE
    start_script.dry_run(facts.start_script, start_script.server_environment(options) | hosts, options.server_args)
    # `kubectl apply --server-side` refuses a list that has a variable twice.
    if repeated := [name for name, count in Counter(pods.variables()).items() if count > 1]:
        raise ToolError(f"--env: {', '.join(repeated)}: given twice, or set by the manifest itself", exit_code=2)


def unmet_requirements(facts: LaunchFacts, options: LaunchOptions) -> Iterator[str]:
    if facts.nodes > 1 and facts.uses_mpi and not options.image:
        yield (
            "ranks reach the other nodes by ssh, and the stock image has no ssh server: name an image that has one "
            "with --image; the first comments of the manifest say how to build it"
        )


def refusals(facts: LaunchFacts, options: LaunchOptions) -> Iterator[str]:
    name = object_name(facts, options)
    if not NAME.fullmatch(name) or len(name) > MAX_NAME:
        expected = f"up to {MAX_NAME} small letters, digits and dashes, a letter first"
        yield f"--name: expected {expected}, got {safe_name(name)}"
    parent_namespace, parent = options.route_parent or (None, None)
    for option, namespace in (("--namespace", options.namespace), ("--route-parent", parent_namespace)):
        if namespace is not None and not re.fullmatch(_LABEL, namespace):
            yield f"{option}: expected up to 63 small letters, digits and dashes, got {safe_name(namespace)}"
    for option, value in (
        ("--claim", options.claim),
        ("--repository-claim", options.repository_claim),
        ("--cache-claim", options.cache_claim),
        ("--pull-secret", options.pull_secret),
        ("--gateway-keys", options.gateway_keys),
        ("--route-parent", parent),
    ):
        if value is not None and (not re.fullmatch(_SUBDOMAIN, value) or len(value) > _MAX_SUBDOMAIN):
            yield f"{option}: expected a name of small letters, digits, dashes and dots, got {safe_name(value)}"
    if not containers.image_of(facts, options):
        yield containers.no_image(facts)
    if not 1 <= options.replicas <= MAX_INT32:
        yield f"--replicas: expected 1 to {MAX_INT32}, got {safe_name(str(options.replicas))}"
    if (options.max_replicas or 1) > MAX_INT32:
        yield f"--max-replicas: expected at most {MAX_INT32}, got {safe_name(str(options.max_replicas))}"
    if options.max_replicas is not None and options.max_replicas < options.replicas:
        yield f"--max-replicas: expected --replicas ({options.replicas}) or more, got {options.max_replicas}"
    if options.max_replicas is not None and options.target is None and sequences_at_once(facts) is None:
        yield (
            "--max-replicas: model.yaml has no max_batch_size for the autoscaler to aim at: say with --target how many "
            "sequences a replica should have in flight"
        )
    if options.rdma and not _RESOURCE.fullmatch(options.rdma[0]):
        yield f"--rdma: expected a device plugin's resource, such as rdma/hca=8, got {safe_name(options.rdma[0])}"
    for label, value in options.node_selector:
        if [other for other, _ in options.node_selector].count(label) > 1:
            yield f"--node-selector: {safe_name(label)} is given twice, and a node has only one value of it"
        if not (_NODE_LABEL.fullmatch(label) and _NODE_VALUE.fullmatch(value)):
            yield f"--node-selector: expected a node's label, as kubectl shows it, got {safe_name(f'{label}={value}')}"
    if options.max_restarts:
        yield (
            "--max-restarts: expected 0, because the kubelet restarts the server: the livenessProbe would end a load "
            f"within the container, got {options.max_restarts}"
        )
    if options.cache_claim and options.cache_dir:
        yield "--cache-claim and --cache-dir: kernels are kept either on a claim or in a folder of the nodes, not both"
    if options.claim and options.checkpoint_on_nodes:
        yield "--claim and --checkpoint-on-nodes: the checkpoint is either on a claim or on the nodes, not both"
    if options.gateway_image is None and (options.gateway_keys or options.gateway_replicas):
        yield "--gateway-keys and --gateway-replicas are for the gateway, and without --gateway-image there is none"
    if (options.gateway_replicas or 1) > MAX_INT32:
        yield f"--gateway-replicas: expected at most {MAX_INT32}, got {safe_name(str(options.gateway_replicas))}"
    yield from _routing_refusals(options)
    if options.target is not None and options.max_replicas is None:
        yield "--target is for the autoscaler, and without --max-replicas there is none"
    file, has_sshd = options.ready_file, facts.uses_mpi and facts.nodes > 1  # without sshd the image is read-only
    if file and not (file.is_absolute() if has_sshd else str(file.parent) in ("/tmp", "/dev/shm")):
        expected = "an absolute path in the pod" if has_sshd else "a file in the pod's /tmp or /dev/shm"
        yield f"--ready-file: expected {expected}, got {safe_name(str(file))}"
    if options.ssh_port and not has_sshd:
        yield "--ssh-port is for ranks on several nodes, and without them no sshd runs: leave it out"
    if options.measured and options.rate:
        yield "--rate and --measured: the rate of the storage is either given or measured, not both"


def _routing_refusals(options: LaunchOptions) -> Iterator[str]:
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
    if options.autoscale and options.max_replicas in (None, options.replicas):
        got = options.max_replicas or "none"
        yield f"--autoscale: expected --max-replicas above --replicas ({options.replicas}), got {got}"
    if options.autoscale == "keda" and options.namespace is None:
        yield "--autoscale keda: name the namespace with --namespace, because KEDA looks for the servers there"


# Characters. A StatefulSet's pods get a label of its name and a hash of at most 63: NAME-0-REVISION-generation takes 22
# more than NAME, the number of a group 4, and the hash 11.
_MAX_PAIR_NAME = 26


def render_pair(pair: LaunchedPair, options: LaunchOptions) -> str:
    """See `render`."""
    name = _name(pair, options)
    roles = [
        Manifest(
            facts=side.facts,
            options=replace(options, name=f"{name}-{side.role}", replicas=side.count),
            role=side.role,
            pair=name,
        )
        for side in pair.sides
    ]
    for role in roles:
        check(role)
    return "---\n".join(_documents(pair, options, roles))


def pair_refusals(pair: LaunchedPair, options: LaunchOptions) -> Iterator[str]:
    name = _name(pair, options)
    if not NAME.fullmatch(name) or len(name) > _MAX_PAIR_NAME:
        expected = f"up to {_MAX_PAIR_NAME} small letters, digits and dashes for a pair, a letter first"
        yield f"--name: expected {expected}, got {safe_name(name)}"
    if options.replicas != 1 or options.max_replicas is not None or options.target is not None:
        yield "--replicas, --max-replicas and --target: a pair has --context-servers and --generation-servers instead"
    routing = options.routing if options.routing == "gateway" else None
    usual = replace(options, routing=routing, route_parent=None, picker_image=None, autoscale=None)
    if usual != options:
        yield (
            "--routing, --route-parent, --picker-image and --autoscale are for servers that each answer requests "
            "alone: a pair takes --routing gateway at most, and keeps its number of servers"
        )
    yield from pair.refusals()
    alone = replace(usual, replicas=1, max_replicas=None, target=None, ssh_port=None)
    for side in pair.sides:
        yield from refusals(side.facts, replace(alone, name=side.role))


def _name(pair: LaunchedPair, options: LaunchOptions) -> str:
    return options.name or slug_of(pair.folder, _MAX_PAIR_NAME)


def _documents(pair: LaunchedPair, options: LaunchOptions, roles: list[Manifest]) -> Iterator[str]:
    name, (_, generation) = _name(pair, options), roles
    common = {
        "name": yaml_flow(name),
        "namespace": options.namespace and yaml_flow(options.namespace),
        "labels": mapping({"app.kubernetes.io/name": "deepseek-triton", "app.kubernetes.io/instance": name}),
    }
    entries = [line for role in roles for line in filled("pair-role.yaml", role.group_values()).splitlines()]
    yield wrapped(_header(pair, options, roles)) + document("disaggregated-set.yaml", common | {"roles": entries})
    for role in roles:
        yield from role.side_documents()
    if options.gateway_image is not None:
        yield from generation.gateway(options.gateway_image, name, _gateway_servers(roles))
    yield from (role.config_map_document() for role in roles if role.files)


def _gateway_servers(roles: list[Manifest]) -> list[str]:
    context, generation = (role.server_address(role.name) for role in roles)
    return ["--server", generation, "--context-server", context]


def _header(pair: LaunchedPair, options: LaunchOptions, roles: list[Manifest]) -> str:
    namespace = f" --namespace {options.namespace}" if options.namespace else ""
    values = {
        "version": __version__,
        "source": for_comment(pair.source),
        "what": for_comment(f"{pair.what} They are a DisaggregatedSet."),
        "namespace_option": namespace,
        "gateway": (
            "The gateway joins them."
            if options.gateway_image
            else "Clients need a gateway, which joins them (--gateway-image). In a pod of its own: deepseek-triton "
            f"gateway {shlex.join(_gateway_servers(roles))}"
        ),
    }
    ssh = "".join(
        filled("before-ssh.yaml", values | {"name": role.name, "base": for_comment(role.facts.image or "YOUR-IMAGE")})
        for role in roles
        if role.uses_ssh
    )
    return filled("header.yaml", values | {"is_group": False, "is_pair": True}) + ssh
