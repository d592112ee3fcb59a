"""`launch kubernetes`: a Deployment or, over several nodes, a LeaderWorkerSet, with all that belongs to it.

The texts are in templates/kubernetes; @@{name} stands for a value. Facts of the LeaderWorkerSet are of
kubernetes-sigs/lws at 060ab4d, api/leaderworkerset/v1/leaderworkerset_types.go and pkg/: LWS_LEADER_ADDRESS is
NAME-GROUP.SUBDOMAIN.NAMESPACE; workers are named NAME-GROUP-N from 1; the controller makes the headless Service NAME,
with pods that are not ready in it; the scale subresource selects leaders, whose label worker-index is "0".
"""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from deepseek_triton_build.arithmetic.load_time import ASSUMED_RATE, ready_within_s
from deepseek_triton_build.check.documents import read_yaml
from deepseek_triton_build.render.yaml_text import flow, one_line
from deepseek_triton_build.text import plain
from deepseek_triton_tools._version import __version__
from deepseek_triton_tools.host.units import about, sized
from deepseek_triton_tools.launching import script
from deepseek_triton_tools.launching.config_map import RepositoryFile, content_hash, data_lines, repository_files
from deepseek_triton_tools.launching.kubernetes_pods import Pods
from deepseek_triton_tools.launching.kubernetes_text import block, filled, mapping
from deepseek_triton_tools.launching.launch_settings import LaunchOptions
from deepseek_triton_tools.launching.start_times import StartTimes, measured_rate
from deepseek_triton_tools.launching.stop_times import StopTimes
from deepseek_triton_tools.repository.launch_facts import LaunchFacts
from deepseek_triton_tools.text_templates import wrapped
from deepseek_triton_tools.tool_errors import ToolError

PLACEHOLDER = "YOUR-REGISTRY/"
"""In an image's name: it has to be replaced before the text can be applied."""
_MAX_NAME = 40
"""Characters: a StatefulSet's pods get a label of its name and a hash, at most 63 characters, and a pod's name has two
numbers more."""
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
"""RFC 1035, for the LeaderWorkerSet's name is a Service's too (pkg/webhooks/leaderworkerset_webhook.go)."""
_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
"""RFC 1123."""
_SUBDOMAIN = rf"{_LABEL}(\.{_LABEL})*"
_MAX_SUBDOMAIN = 253
_OF_NODES = r"[A-Za-z0-9]([-._A-Za-z0-9]{0,61}[A-Za-z0-9])?"
"""The name of a node's label behind its slash, and its value (kubernetes.io, Labels and Selectors)."""
_NODE_LABEL = re.compile(rf"({_SUBDOMAIN}/)?{_OF_NODES}")
_NODE_VALUE = re.compile(rf"({_OF_NODES})?")
_RESOURCE = re.compile(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?/[A-Za-z0-9]([-._A-Za-z0-9]*[A-Za-z0-9])?")
_TARGET_SHARE = 0.8
"""Of what runs at once, for the autoscaler to aim at: a replica more takes a whole load to come. An assumption."""
_MAX_INT32 = 2**31 - 1
"""Of every number of seconds or pods."""
_MAX_WINDOW_S = 3600
"""Of stabilizationWindowSeconds (autoscaling/v2)."""


def render(facts: LaunchFacts, options: LaunchOptions) -> str:
    """Documents of YAML, ready for `kubectl apply --server-side`.

    :raises ToolError: when that can't be; all that is wrong.
    """
    if wrong := list(problems(facts, options)):
        raise ToolError("; ".join(wrong), exit_code=2)
    _ask_start_script(facts, options)
    files = [] if options.kubernetes.repository_claim else repository_files(facts.folder)
    manifest = _Manifest(facts=facts, options=options, files=tuple(files))
    if repeated := manifest.repeated_variables:
        raise ToolError(f"--env: {', '.join(repeated)}: given twice, or set by the manifest itself", exit_code=2)
    return "---\n".join(manifest.documents())


def _ask_start_script(facts: LaunchFacts, options: LaunchOptions) -> None:
    """From a folder like the pods': theirs has no blank in its path, whatever this one's has.

    :raises ToolError: when start.sh refuses.
    """
    hosts = {"HOSTS": ",".join(f"node{n}" for n in range(facts.nodes))} if facts.nodes > 1 else {}
    with tempfile.TemporaryDirectory(prefix="deepseek-triton-") as place:
        copy = Path(place, facts.start_script.name)
        copy.write_bytes(facts.start_script.read_bytes())
        try:
            script.dry_run(copy, script.server_environment(options) | hosts, options.server_args)
        except ToolError as error:
            said = str(error).replace(str(copy), plain(str(facts.start_script)))
            raise ToolError(said, exit_code=error.exit_code) from error


def object_name(facts: LaunchFacts, options: LaunchOptions) -> str:
    """Of everything: as asked for, or by the repository's folder."""
    slug = re.sub(r"[^a-z0-9]+", "-", facts.folder.name.lower())[:_MAX_NAME].strip("-")
    return options.name or (slug if _NAME.fullmatch(slug) else "deepseek-triton")


def lacking(facts: LaunchFacts, options: LaunchOptions) -> Iterator[str]:
    """Why what is rendered can't be applied yet."""
    if facts.nodes > 1 and not options.image:
        yield "ranks reach the other nodes by ssh: name an image with an ssh server with --image; the comments tell how"


def problems(facts: LaunchFacts, options: LaunchOptions) -> Iterator[str]:
    """Why it can't be rendered."""
    kubernetes, name = options.kubernetes, object_name(facts, options)
    if not _NAME.fullmatch(name) or len(name) > _MAX_NAME:
        yield f"--name: expected up to {_MAX_NAME} small letters, digits and dashes, a letter first, got {plain(name)}"
    if options.namespace is not None and not re.fullmatch(_LABEL, options.namespace):
        yield f"--namespace: expected up to 63 small letters, digits and dashes, got {plain(options.namespace)}"
    for option, value in (
        ("--claim", options.claim),
        ("--repository-claim", kubernetes.repository_claim),
        ("--cache-claim", kubernetes.cache_claim),
        ("--pull-secret", options.pull_secret),
    ):
        if value is not None and (not re.fullmatch(_SUBDOMAIN, value) or len(value) > _MAX_SUBDOMAIN):
            yield f"{option}: expected a name of small letters, digits, dashes and dots, got {plain(value)}"
    if not (options.image or facts.image):
        yield f"the {facts.engine} engine was planned for no container: name with --image one that has tritonserver"
    if not 1 <= options.replicas <= _MAX_INT32:
        yield f"--replicas: expected 1 to {_MAX_INT32}, got {plain(str(options.replicas))}"
    if (options.max_replicas or 1) > _MAX_INT32:
        yield f"--max-replicas: expected at most {_MAX_INT32}, got {plain(str(options.max_replicas))}"
    if options.max_replicas is not None and options.max_replicas < options.replicas:
        yield f"the autoscaler's most, {options.max_replicas}, is less than its least, {options.replicas}"
    if options.max_replicas is not None and kubernetes.target is None and _running_at_once(facts) is None:
        yield "model.yaml gives no max_batch_size to aim at: say how many sequences a replica should have in flight"
    if kubernetes.rdma and not _RESOURCE.fullmatch(kubernetes.rdma[0]):
        yield f"--rdma: expected a device plugin's resource, such as rdma/hca=8, got {plain(kubernetes.rdma[0])}"
    for label, value in kubernetes.node_selector:
        if [other for other, _ in kubernetes.node_selector].count(label) > 1:
            yield f"--node-selector: {plain(label)} is given twice, and a node has one value of it"
        if not (_NODE_LABEL.fullmatch(label) and _NODE_VALUE.fullmatch(value)):
            yield f"--node-selector: expected a node's label, as kubectl shows it, got {plain(f'{label}={value}')}"
    if options.max_restarts:
        yield "--max-restarts: expected 0, for the kubelet starts it again: a load within the container would be ended"
    if kubernetes.cache_claim and options.cache_dir:
        yield "compiled kernels are kept either on a claim or in a folder of the nodes, not both"
    if options.claim and kubernetes.checkpoint_on_nodes:
        yield "the checkpoint is either on a claim or on the nodes, not both: --claim or --checkpoint-on-nodes"
    if kubernetes.target is not None and options.max_replicas is None:
        yield "--target is what the autoscaler aims at, and without --max-replicas there is none"
    if options.ready_file and not options.ready_file.is_absolute():
        yield f"--ready-file: expected an absolute path, within the container, got {plain(str(options.ready_file))}"
    if kubernetes.measured and options.rate:
        yield "the rate of the storage is either given or measured, not both"


def _running_at_once(facts: LaunchFacts) -> int | None:
    """Sequences in one batch over all ranks."""
    document, _ = read_yaml(facts.version_dir / "model.yaml", "model.yaml")
    values = document.values if document else {}
    batch, ranks = values.get("max_batch_size"), values.get("tensor_parallel_size")
    if not isinstance(batch, int):
        return None
    return batch * ranks if values.get("enable_attention_dp") is True and isinstance(ranks, int) else batch


@dataclass(frozen=True, kw_only=True)
class _Manifest:
    facts: LaunchFacts
    options: LaunchOptions
    files: tuple[RepositoryFile, ...]
    """None where the repository is on a claim."""

    def documents(self) -> Iterator[str]:
        head = wrapped(self._header())
        if self.files:
            yield head + self._config_map()
            head = ""
        yield head + wrapped(self._workload())
        yield wrapped(filled("service.yaml", self._values()))
        yield wrapped(filled("disruption-budget.yaml", self._values() | self._budget()))
        if self.options.max_replicas is not None:
            yield wrapped(filled("autoscaler.yaml", self._values() | self._autoscaling()))

    # --- names ---

    @property
    def name(self) -> str:
        return object_name(self.facts, self.options)

    @property
    def is_group(self) -> bool:
        return self.facts.nodes > 1

    @property
    def labels(self) -> dict[str, str]:
        return {"app.kubernetes.io/name": "deepseek-triton", "app.kubernetes.io/instance": self.name}

    @property
    def config_map(self) -> str | None:
        return f"{self.name}-repository-{content_hash(self.files)}" if self.files else None

    @property
    def image(self) -> str:
        if self.options.image or not self.is_group:
            return self.options.image or self.facts.image or ""
        return f"{PLACEHOLDER}NAME"

    def _values(self) -> dict[str, str]:
        """What every template may use."""
        namespace = self.options.namespace
        service = f"{self.name}-server"
        why = f"What users reach: http://{service}:8000."
        if self.is_group:
            why += " Only leaders: nothing else listens."
        server_labels = self.labels
        if self.is_group:
            # Of the set's controller.
            server_labels = {
                "leaderworkerset.sigs.k8s.io/name": self.name,
                "leaderworkerset.sigs.k8s.io/worker-index": "0",
            }
        return {
            "name": flow(self.name),
            "namespace": f"  namespace: {flow(namespace)}\n" if namespace else "",
            "labels": mapping(self.labels),
            "server_labels": mapping(server_labels),
            "service": service,
            "service_why": why,
        }

    @property
    def repeated_variables(self) -> list[str]:
        """`kubectl apply --server-side` refuses a list of variables with two of one name."""
        counts = Counter(self._pods().variables())
        return [name for name, count in counts.items() if count > 1]

    # --- documents ---

    def _header(self) -> str:
        facts, namespace = self.facts, self.options.namespace
        where = f"{facts.nodes} nodes: a LeaderWorkerSet" if self.is_group else "one node: a Deployment"
        values = {
            "version": __version__,
            "source": one_line(facts.source),
            "what": f"{one_line(facts.model)}, {facts.world_size} ranks on {where}.",
            "namespace_option": f" --namespace {namespace}" if namespace else "",
            "name": self.name,
            "base": one_line(facts.image or "YOUR-IMAGE"),
        }
        return filled("header.yaml", values) + (filled("before-group.yaml", values) if self.is_group else "")

    def _config_map(self) -> str:
        size = sum(len(file.content) for file in self.files)
        head = filled(
            "config-map.yaml",
            self._values()
            | {"num_files": str(len(self.files)), "size": sized(size), "config_map": self.config_map or ""},
        )
        return wrapped(head) + "\n".join(data_lines(self.files)) + "\n"

    def _workload(self) -> str:
        pods, values = self._pods(), self._values() | {"replicas": self._replicas()}
        annotations = self._annotations()
        if self.is_group:
            facts = self.facts
            return filled(
                "leader-worker-set.yaml",
                values
                | {
                    "nodes": str(facts.nodes),
                    "nodes_why": f"{facts.world_size} ranks over nodes of {facts.ranks_per_node}; the leader is one.",
                    "leader_annotations": block(annotations, 8) + "\n" if annotations else "",
                    "leader": block(pods.server(), 8),
                    "worker": block(pods.worker(), 8),
                },
            )
        start = pods.start
        return filled(
            "deployment.yaml",
            values
            | {
                "progress_why": (
                    f"{start.window_s} s of the startupProbe, and {start.progress_deadline_s - start.window_s} s for a "
                    "node and the image before it. With the default of 600 s every start would be called failed."
                ),
                "progress_s": str(start.progress_deadline_s),
                "annotations": block(annotations, 6) + "\n" if annotations else "",
                "pod": block(pods.server(), 6),
            },
        )

    def _replicas(self) -> str:
        if self.options.max_replicas is not None:
            return "  # replicas: the autoscaler's\n"
        return f"  # As asked for.\n  replicas: {self.options.replicas}\n"

    def _annotations(self) -> str:
        if not self.options.kubernetes.scrape:
            return ""
        values = {"scrape": "true", "port": str(self.options.metrics_port), "path": "/metrics"}
        return f"annotations: {mapping({f'prometheus.io/{key}': value for key, value in values.items()})}"

    def _pods(self) -> Pods:
        start, rate_from = self._start()
        return Pods(
            facts=self.facts,
            options=self.options,
            start=start,
            rate_from=rate_from,
            image=self.image,
            name=self.name,
            config_map=self.config_map,
            repository_items=tuple(file.item for file in self.files),
        )

    def _start(self) -> tuple[StartTimes, str]:
        """And where the rate is from."""
        options, measured = self.options, self.options.kubernetes.measured
        rate, rate_from = ASSUMED_RATE, "assumed, for nothing was measured: give --rate"
        if measured:
            rate, rate_from = measured_rate(measured), one_line(f"measured, by {measured}")
        elif options.rate:
            rate, rate_from = options.rate, "as given by --rate"
        size = self.facts.serving.size if self.facts.serving else 0
        deadline = ready_within_s(size, rate) if size else self.facts.ready_within_s
        times = StartTimes(
            size=size,
            rate=rate,
            ready_within_s=options.ready_within or deadline,
            num_nodes=self.facts.nodes,
            stop=StopTimes(exit_timeout_s=options.exit_timeout),
        )
        if times.progress_deadline_s > _MAX_INT32:
            raise ToolError(
                f"--rate: {sized(rate)}/s would take {times.load_s:,} s for {sized(size)}; a size such as 2GB is meant",
                exit_code=2,
            )
        return times, rate_from

    def _budget(self) -> dict[str, str]:
        if self.options.replicas > 1:
            pods = " A group is whole or not at all: all its pods count." if self.is_group else ""
            return {"allowed": "maxUnavailable: 1", "budget_why": f"One at a time; the others serve.{pods}"}
        why = "Of one replica none may go by itself, for a load is behind it: kubectl drain waits until you delete "
        if self.is_group:
            # minAvailable counts pods, so that of two groups each could lose one.
            return {"allowed": "maxUnavailable: 0", "budget_why": f"{why}its pods."}
        return {"allowed": "minAvailable: 1", "budget_why": f"{why}the pod, or one more is ready."}

    def _autoscaling(self) -> dict[str, str]:
        start, _ = self._start()
        running, target = _running_at_once(self.facts), self.options.kubernetes.target
        aim = target or max(1, int((running or 0) * _TARGET_SHARE))
        kind = ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet") if self.is_group else ("apps/v1", "Deployment")
        down_s = min(_MAX_WINDOW_S, start.ready_within_s)
        return {
            "scale_why": " It counts groups, by their leaders." if self.is_group else "",
            "target_api": kind[0],
            "target_kind": kind[1],
            "replicas_min": str(self.options.replicas),
            "replicas_max": str(self.options.max_replicas),
            "target": str(aim),
            "target_why": (
                "Sequences in flight, as asked for."
                if target
                else f"Sequences in flight: {_TARGET_SHARE} of the {running} that run at once (max_batch_size over all "
                "ranks); more wait."
            ),
            "down_s": str(down_s),
            "down_why": (
                f"A replica that goes is {about(start.ready_within_s)} away, by READY_WITHIN: its work has to be gone "
                f"for as long, or the {_MAX_WINDOW_S} s that are the most."
            ),
        }
