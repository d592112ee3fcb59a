"""`launch kubernetes` for a pair: a DisaggregatedSet, whose roles are the context and the generation servers.

These facts come from kubernetes-sigs/lws at 060ab4d, api/disaggregatedset/v1 and pkg/: the controller makes a
LeaderWorkerSet NAME-SLICE-REVISION-ROLE of each role, where REVISION has 8 digits. It leaves the labels of the pod
templates as they are, and adds its own. Leaders, and pods alone, have the label worker-index "0".
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace

from deepseek_triton_build.text import for_comment, safe_name, yaml_flow
from deepseek_triton_tools._version import __version__
from deepseek_triton_tools.launching import kubernetes
from deepseek_triton_tools.launching.kubernetes_manifest import Manifest
from deepseek_triton_tools.launching.kubernetes_pods import NAME, Entries, slug_of
from deepseek_triton_tools.launching.kubernetes_text import block, filled, mapping
from deepseek_triton_tools.launching.launch_settings import LaunchOptions
from deepseek_triton_tools.launching.launched_pair import LaunchedPair, PairSide
from deepseek_triton_tools.text_templates import wrapped
from deepseek_triton_tools.tool_errors import ToolError

_MAX_NAME = 26
"""Characters. A StatefulSet's pods get a label of its name and a hash of at most 63: NAME-0-REVISION-generation
takes 22 more than NAME, the number of a group 4, and the hash 11."""


def render(pair: LaunchedPair, options: LaunchOptions) -> str:
    """Return documents of YAML for `kubectl apply --server-side`.

    :raises ToolError: when it can't be rendered; the message names everything that is wrong.
    """
    if wrong := list(dict.fromkeys(refusals(pair, options))):
        raise ToolError("; ".join(wrong), exit_code=2)
    roles = [_role(side, pair, options) for side in pair.sides]
    for role in roles:
        kubernetes.check(role)
    return "---\n".join(_documents(pair, options, roles))


def unmet_requirements(pair: LaunchedPair, options: LaunchOptions) -> Iterator[str]:
    for side in pair.sides:
        yield from kubernetes.unmet_requirements(side.facts, options)


def refusals(pair: LaunchedPair, options: LaunchOptions) -> Iterator[str]:
    name = _name(pair, options)
    if not NAME.fullmatch(name) or len(name) > _MAX_NAME:
        expected = f"up to {_MAX_NAME} small letters, digits and dashes for a pair, a letter first"
        yield f"--name: expected {expected}, got {safe_name(name)}"
    if options.replicas != 1 or options.max_replicas is not None:
        yield "--replicas and --max-replicas: a pair has --context-servers and --generation-servers instead"
    routing = options.routing if options.routing == "gateway" else None
    usual = replace(options, routing=routing, route_parent=None, picker_image=None, autoscale=None)
    if usual != options:
        yield (
            "--routing, --route-parent, --picker-image and --autoscale are for servers that each answer requests "
            "alone: a pair takes --routing gateway at most, and keeps its number of servers"
        )
    yield from pair.refusals()
    for side in pair.sides:
        yield from kubernetes.refusals(side.facts, replace(usual, name=side.role, replicas=1, max_replicas=None))


def _name(pair: LaunchedPair, options: LaunchOptions) -> str:
    return options.name or slug_of(pair.folder, _MAX_NAME)


def _role(side: PairSide, pair: LaunchedPair, options: LaunchOptions) -> PairRole:
    facts, name = side.facts, _name(pair, options)
    own = replace(options, name=f"{name}-{side.role}", replicas=side.count)
    return PairRole(facts=facts, options=own, files=kubernetes.files_of(facts, options), role=side.role, pair=name)


def _documents(pair: LaunchedPair, options: LaunchOptions, roles: list[PairRole]) -> Iterator[str]:
    name, (_, generation) = _name(pair, options), roles
    common = {
        "name": yaml_flow(name),
        "namespace": f"  namespace: {yaml_flow(options.namespace)}\n" if options.namespace else "",
        "labels": mapping({"app.kubernetes.io/name": "deepseek-triton", "app.kubernetes.io/instance": name}),
    }
    entries = "".join(role.entry() for role in roles)
    workload = wrapped(filled("disaggregated-set.yaml", common | {"roles": block(entries, 4)}))
    configs = [role.config_map_document() for role in roles if role.files]
    first, *others = [*configs, workload]
    yield wrapped(_header(pair, options, roles)) + first
    yield from others
    for role in roles:
        yield from role.own_documents()
    if options.gateway_image is not None:
        yield from generation.gateway(options.gateway_image, name, _gateway_servers(roles))


def _gateway_servers(roles: list[PairRole]) -> list[str]:
    context, generation = (role.address for role in roles)
    return ["--server", generation, "--context-server", context]


def _header(pair: LaunchedPair, options: LaunchOptions, roles: list[PairRole]) -> str:
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
    return filled("header.yaml", values) + filled("before-pair.yaml", values) + ssh


@dataclass(frozen=True, kw_only=True)
class PairRole(Manifest):
    """The servers of one side, and the objects that belong to them."""

    role: str
    pair: str
    """The name of the set."""

    @property
    def labels(self) -> dict[str, str]:
        return {
            "app.kubernetes.io/name": "deepseek-triton",
            "app.kubernetes.io/instance": self.pair,
            "app.kubernetes.io/component": self.role,
        }

    @property
    def address(self) -> str:
        """Where a gateway finds the servers."""
        return self._address(self.name)

    def entry(self) -> str:
        """Return the entry of the set's roles, not indented."""
        return filled("pair-role.yaml", {"role": self.role, "spec": block(self._group_spec(), 4)})

    def config_map_document(self) -> str:
        return self._config_map()

    def own_documents(self) -> Iterator[str]:
        """Yield the Service and the budget."""
        yield self._headless_service(self.name)
        yield wrapped(filled("disruption-budget.yaml", self._values() | self._budget()))

    def gateway(self, image: str, name: str, servers: list[str]) -> Iterator[str]:
        return self._gateway(image, name, servers)

    def _values(self) -> dict[str, str]:
        leaders = self.labels | {"leaderworkerset.sigs.k8s.io/worker-index": "0"}
        return super()._values() | {"server_labels": mapping(leaders)}

    def _mounts(self) -> Entries:
        """Yield the mounts. A claim has the whole pair's folder."""
        for entry in super()._mounts():
            is_claim = not isinstance(entry, str) and entry["name"] == "repository" and not self.config_map
            yield {**entry, "subPath": self.role} if is_claim and not isinstance(entry, str) else entry
