"""`launch kubernetes --gateway-image`, `--routing` and `--autoscale`: objects are valid, and find the servers."""

import copy
import dataclasses
import re
from pathlib import Path
from urllib.parse import urlsplit

import jsonschema
import kubernetes_validate
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from deepseek_backend.metrics.backend_metrics import FAMILIES
from deepseek_triton_tools.cli.gateway import settings_of
from deepseek_triton_tools.cli.main import main, program_parser
from deepseek_triton_tools.gateway.settings import ModelSettings
from deepseek_triton_tools.launching import kubernetes
from deepseek_triton_tools.launching.launch_settings import LaunchOptions
from deepseek_triton_tools.repository.launch_facts import facts_of
from deepseek_triton_tools.tool_errors import ToolError

CRDS = yaml.safe_load((Path(__file__).parents[1] / "support/routing_schemas.yaml").read_text(encoding="utf-8"))
PICKER = CRDS.pop("EndpointPicker")
PLAIN = LaunchOptions(name="r1", namespace="models", image="tritonserver:here", http_port=8100, metrics_port=8102)
OF_PICKER = {"route_parent": ("edge", "public"), "picker_image": "picker:0.8", "pull_secret": "registry"}
ROUTINGS = {
    "epp": dataclasses.replace(PLAIN, routing="epp", **OF_PICKER),
    "gateway": dataclasses.replace(PLAIN, routing="gateway", gateway_image="gateway:1", route_parent=(None, "public")),
    "envoy": dataclasses.replace(PLAIN, routing="envoy", route_parent=(None, "public")),
}
GATEWAY = dataclasses.replace(
    PLAIN, exit_timeout=600, scrape=True, gateway_image="g:1", gateway_replicas=3, gateway_keys="api-keys"
)
KEDA = dataclasses.replace(PLAIN, autoscale="keda", replicas=2, max_replicas=4, target=64)


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    """A small model, R1 for one node of H200 and for two of H100."""
    top = tmp_path_factory.mktemp("repositories")
    one, two = "deepseek-r1 --gpu h200 --gpus 8", "deepseek-r1 --gpu h100 --gpus 16"
    plans = {"tiny": "tiny --engine simulated", "one": one, "two": two}
    for name, plan in plans.items():
        assert main(["build", *plan.split(), "--output", str(top / name)]) == 0
    return {name: facts_of(str(top / name)) for name in plans}


def render(facts, options):
    documents = yaml.load_all(kubernetes.render(facts, options), Loader=yaml.CSafeLoader)
    return {(document["kind"], document["metadata"]["name"]): document for document in documents}


# --- the objects are valid ---

ROUTES = re.compile("Gateway|ListenerSet|(HTTP|GRPC|UDP|TCP|TLS)Route")
RULES = {
    "self.kind != 'Service' || has(self.port)": lambda it: it["kind"] != "Service" or "port" in it,
    "self.all(p1, self.exists_one(p2, p1.number==p2.number))": lambda it: len({p["number"] for p in it}) == len(it),
    "!has(self.minReplicaCount) || self.minReplicaCount <= (has(self.maxReplicaCount) ? self.maxReplicaCount : 100)": (
        lambda it: it.get("minReplicaCount", 0) <= it.get("maxReplicaCount", 100)
    ),
    "(has(self.targetRef) && !has(self.targetRefs)) || (!has(self.targetRef) && has(self.targetRefs)) || "
    "(has(self.targetSelectors) && self.targetSelectors.size() > 0)": lambda it: "targetRefs" in it,
    "has(self.targetRefs) ? self.targetRefs.all(ref, ref.group == 'gateway.networking.k8s.io') : true": (
        lambda it: {ref["group"] for ref in it["targetRefs"]} <= {"gateway.networking.k8s.io"}
    ),
    "has(self.targetRefs) ? self.targetRefs.all(ref, ref.kind in ['Gateway', 'ListenerSet', 'HTTPRoute', 'GRPCRoute', "
    "'UDPRoute', 'TCPRoute', 'TLSRoute']) : true": (
        lambda it: all(ROUTES.fullmatch(ref["kind"]) for ref in it["targetRefs"])
    ),
    "self.type == 'BackendUtilization' ? has(self.backendUtilization) : !has(self.backendUtilization)": (
        lambda it: (it["type"] == "BackendUtilization") == ("backendUtilization" in it)
    ),
    "self.type in ['Random', 'ConsistentHash', 'DynamicModule'] ? !has(self.slowStart) : true": (
        lambda it: it["type"] not in ("Random", "ConsistentHash", "DynamicModule") or "slowStart" not in it
    ),
    "(size(self.group) == 0 && self.kind == 'Service') ? has(self.port) : true": (
        lambda it: (it["group"], it["kind"]) != ("", "Service") or "port" in it
    ),
    "!(has(self.request) && has(self.backendRequest) && duration(self.request) != duration('0s') && "
    "duration(self.backendRequest) > duration(self.request))": lambda it: "backendRequest" not in it,
}
"""The rules of the recorded CRDs. What is never written is not looked at, so that it fails where it is written."""


def as_the_cluster_does(schema, value):
    """Return `value` with its defaults; it must keep the schema's rules and have no field that the schema lacks."""
    if schema.get("x-kubernetes-preserve-unknown-fields"):
        return value
    if isinstance(value, dict) and "properties" in schema:
        fields = schema["properties"]
        if unknown := value.keys() - fields.keys():
            raise jsonschema.ValidationError(f"unknown fields: {', '.join(sorted(unknown))}")
        defaults = {name: field["default"] for name, field in fields.items() if "default" in field}
        value = {name: as_the_cluster_does(fields[name], given) for name, given in {**defaults, **value}.items()}
    elif isinstance(value, list) and "items" in schema:
        value = [as_the_cluster_does(schema["items"], given) for given in value]
    jsonschema.Draft202012Validator(schema).validate(value)
    for rule in schema.get("x-kubernetes-validations", ()):
        if not RULES[" ".join(rule["rule"].split())](value):
            raise jsonschema.ValidationError(rule["message"])
    return value


def validate(objects, version="1.37"):
    for (kind, _), document in objects.items():
        if kind in CRDS:
            assert document["apiVersion"] == CRDS[kind]["apiVersion"]
            assert document.keys() == {"apiVersion", "kind", "metadata", "spec"}
            as_the_cluster_does(CRDS[kind]["spec"], document["spec"])
        elif kind != "LeaderWorkerSet":  # another test looks at it
            kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny", "two"])
@pytest.mark.parametrize("options", [*ROUTINGS.values(), KEDA, GATEWAY], ids=[*ROUTINGS, "keda", "plain gateway"])
def test_all_of_it_is_valid(facts, name, options):
    objects = render(facts[name], options)
    for version in ("1.27", "1.37"):
        validate(objects, version)
    text = kubernetes.render(facts[name], options)
    manifest = text[text.index("\n---\n") :]
    assert "@@" not in manifest
    assert ("r1-gateway" in text) == bool(options.gateway_image)
    assert all(len(line) <= 120 for line in manifest.splitlines() if re.match(r" *# [^ ]", line))


ports = st.integers(1, 65535)


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(
    routing=st.sampled_from([None, *ROUTINGS]),
    autoscale=st.sampled_from([None, "hpa", "keda"]),
    http_metrics=st.lists(ports.filter(lambda port: port != 8001), min_size=2, max_size=2, unique=True),
    replicas=st.integers(1, 50),
    parent=st.tuples(st.none() | st.just("edge"), st.from_regex(r"[a-z]([-a-z0-9]{0,20}[a-z0-9])?", fullmatch=True)),
)
def test_any_options_give_valid_objects(facts, routing, autoscale, http_metrics, replicas, parent):
    http, metrics = http_metrics
    changes = {"route_parent": parent if routing else None, "http_port": http, "metrics_port": metrics}
    changes |= {"replicas": replicas}
    if autoscale:
        changes |= {"autoscale": autoscale, "max_replicas": replicas + 1, "target": 8}
    objects = render(facts["tiny"], dataclasses.replace(ROUTINGS.get(routing, PLAIN), **changes))
    validate(objects)
    kinds = {kind for kind, _ in objects}
    assert ("ScaledObject" in kinds) == (autoscale == "keda")
    assert ("HorizontalPodAutoscaler" in kinds) == (autoscale == "hpa")
    assert ("HTTPRoute" in kinds) == (routing is not None)


def test_the_validator_sees_a_wrong_field(facts):
    twice, service = [{"number": 1}, {"number": 1}], [{"name": "r1-server"}]
    cases = [
        ("epp", "InferencePool", ["targetPorts"], []),
        ("epp", "InferencePool", ["targetPorts"], twice),
        ("epp", "InferencePool", ["endpointPickerRef"], {"name": "picker"}),
        ("epp", "InferencePool", ["extensionRef"], {"name": "picker"}),
        ("envoy", "BackendTrafficPolicy", ["loadBalancer", "type"], "BackendUtilization"),
        ("envoy", "BackendTrafficPolicy", ["targetRefs", 0, "kind"], "InferencePool"),
        ("envoy", "HTTPRoute", ["rules", 0, "backendRefs"], service),
        ("keda", "ScaledObject", ["minReplicaCount"], 5),
        ("keda", "ScaledObject", ["triggers", 0, "metadata", "targetValue"], 64),
        ("keda", "ScaledObject", ["triggers", 0, "metrictype"], "Value"),
    ]
    rendered = {name: render(facts["tiny"], ROUTINGS.get(name, KEDA)) for name in ("epp", "envoy", "keda")}
    for options, kind, (*path, last), value in cases:
        document = copy.deepcopy(rendered[options][kind, "r1"])
        place = document["spec"]
        for key in path:
            place = place[key]
        place[last] = value
        with pytest.raises(jsonschema.ValidationError):
            validate({(kind, "r1"): document})


def test_every_recorded_rule_is_checked():
    def rules(schema):
        if isinstance(schema, dict):
            yield from (" ".join(rule["rule"].split()) for rule in schema.get("x-kubernetes-validations", ()))
        for inner in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
            yield from rules(inner)

    assert set(rules(CRDS)) == RULES.keys()


def server_pod(objects):
    """Return the template of the pod with tritonserver, with the labels that a controller adds."""
    if ("Deployment", "r1") in objects:
        return objects["Deployment", "r1"]["spec"]["template"]
    template = objects["LeaderWorkerSet", "r1"]["spec"]["leaderWorkerTemplate"]["leaderTemplate"]
    lws = "leaderworkerset.sigs.k8s.io"
    template["metadata"]["labels"] |= {f"{lws}/name": "r1", f"{lws}/worker-index": "0"}
    return template


def container_ports(template):
    [container] = template["spec"]["containers"]
    return {port["name"]: port["containerPort"] for port in container["ports"]}


@pytest.mark.parametrize("name", ["one", "two"])
def test_the_picker_reads_and_picks_the_servers(facts, name):
    objects = render(facts[name], ROUTINGS["epp"])
    pool, picker = objects["InferencePool", "r1"]["spec"], objects["Deployment", "r1-picker"]["spec"]["template"]
    servers, service = server_pod(objects), objects["Service", "r1-picker"]["spec"]
    labels = servers["metadata"]["labels"]
    assert pool["selector"]["matchLabels"].items() <= labels.items()
    assert not pool["selector"]["matchLabels"].items() <= picker["metadata"]["labels"].items()
    if name == "two":
        workers = objects["LeaderWorkerSet", "r1"]["spec"]["leaderWorkerTemplate"]["workerTemplate"]
        assert "leaderworkerset.sigs.k8s.io/worker-index" in pool["selector"]["matchLabels"]
        assert "llm-d.ai/engine-type" not in workers["metadata"]["labels"]
    assert labels["llm-d.ai/engine-type"] == "triton-tensorrt-llm"
    assert [port["number"] for port in pool["targetPorts"]] == [container_ports(servers)["http"]] == [8100]
    assert pool["endpointPickerRef"]["name"] == "r1-picker"
    assert service["selector"].items() <= picker["metadata"]["labels"].items()
    assert pool["endpointPickerRef"]["port"]["number"] in [port["port"] for port in service["ports"]]
    assert container_ports(picker) == PICKER["default_ports"]
    assert picker["spec"]["imagePullSecrets"] == [{"name": "registry"}]
    route = objects["HTTPRoute", "r1"]["spec"]
    assert route["parentRefs"] == [{"name": "public", "namespace": "edge"}]
    [backend] = route["rules"][0]["backendRefs"]
    assert backend == {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": "r1"}


def test_the_picker_gets_options_that_it_takes_and_may_read_what_it_watches(facts):
    objects = render(facts["tiny"], ROUTINGS["epp"])
    pod = objects["Deployment", "r1-picker"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    *flags, option, text = container["args"]
    given = dict(flag.removeprefix("--").split("=") for flag in flags) | {option.removeprefix("--"): text}
    assert list(given) == PICKER["options"]
    assert not given.keys() & set(PICKER["refused_options"])
    assert given["pool-name"] == "r1"
    assert int(given["model-server-metrics-port"]) == container_ports(server_pod(objects))["metrics"]
    config = as_the_cluster_does(PICKER["config"], yaml.safe_load(text))
    plugins = {plugin["type"] for plugin in config["plugins"]}
    used = {plugin["pluginRef"] for profile in config["schedulingProfiles"] for plugin in profile["plugins"]}
    # Without it the picker would parse bodies as OpenAI's, and the prefix of a body that isn't parsed is not known.
    assert config["parser"]["pluginRef"] == "passthrough-parser"
    assert used | {"passthrough-parser"} == plugins
    assert "prefix-cache-scorer" not in plugins
    binding = objects["RoleBinding", "r1-picker"]
    assert pod["serviceAccountName"] == binding["subjects"][0]["name"] == "r1-picker"
    assert ("ServiceAccount", "r1-picker") in objects
    rules = objects["Role", binding["roleRef"]["name"]]["rules"]
    allowed = {(rule["apiGroups"][0], name) for rule in rules for name in rule["resources"]}
    assert {("", "pods"), ("inference.networking.k8s.io", "inferencepools")} <= allowed


def test_a_route_leads_to_a_port_of_its_service(facts):
    for routing, service in {"gateway": "r1-gateway", "envoy": "r1-server"}.items():
        objects = render(facts["tiny"], ROUTINGS[routing])
        [rule] = objects["HTTPRoute", "r1"]["spec"]["rules"]
        [backend] = rule["backendRefs"]
        assert backend["name"] == service
        assert backend["port"] in [port["port"] for port in objects["Service", service]["spec"]["ports"]]
        assert rule["timeouts"] == {"request": "0s"}, "a stream is longer than a proxy's default"
    [target] = objects["BackendTrafficPolicy", "r1"]["spec"]["targetRefs"]
    assert ("HTTPRoute", target["name"]) in objects
    objects = render(facts["tiny"], dataclasses.replace(ROUTINGS["gateway"], route_parent=None))
    assert ("Service", "r1-gateway") in objects  # needs no route
    assert not [kind for kind, _ in objects if kind == "HTTPRoute"]


@pytest.mark.parametrize(("name", "kind"), [("one", "Deployment"), ("two", "LeaderWorkerSet")])
def test_keda_reads_every_server_and_scales_them(facts, name, kind):
    """As kedacore/keda at 8b4f083c does: the host is SERVICE.NAMESPACE, and the port one of the pods behind it."""
    objects = render(facts[name], KEDA)
    spec = objects["ScaledObject", "r1"]["spec"]
    target = objects[kind, "r1"]
    [trigger] = spec["triggers"]
    metadata, url = trigger["metadata"], urlsplit(trigger["metadata"]["url"])
    assert spec["scaleTargetRef"] == {"apiVersion": target["apiVersion"], "kind": kind, "name": "r1"}
    assert "replicas" not in target["spec"], "an apply would set it back"
    assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (2, 4)
    # As KEDA reads it (metrics_api_scaler.go at 8b4f083c): the host with its port, cut at dots.
    assert url.netloc.split(".")[:2] == ["r1-server", "models"]
    pod, service = server_pod(objects), objects["Service", "r1-server"]["spec"]
    assert service["selector"].items() <= pod["metadata"]["labels"].items()
    assert url.port == container_ports(pod)["metrics"]
    assert (metadata["format"], metadata["aggregateFromKubeServiceEndpoints"]) == ("prometheus", "true")
    # Kubernetes divides by the target for one replica, so the value must be that of all.
    assert (metadata["aggregationType"], trigger["metricType"]) == ("sum", "AverageValue")
    assert metadata["targetValue"] == "64"
    [family] = [family for family in FAMILIES if family.name == metadata["valueLocation"]]
    assert not family.labels, "KEDA takes the first series"


def test_keda_scales_as_the_autoscaler_does(facts):
    keda = render(facts["one"], KEDA)["ScaledObject", "r1"]["spec"]
    hpa = render(facts["one"], dataclasses.replace(KEDA, autoscale="hpa"))["HorizontalPodAutoscaler", "r1"]["spec"]
    assert keda["advanced"]["horizontalPodAutoscalerConfig"]["behavior"] == hpa["behavior"]
    [metric] = hpa["metrics"]
    assert metric["pods"]["metric"]["name"] == keda["triggers"][0]["metadata"]["valueLocation"]
    assert metric["pods"]["target"]["averageValue"] == keda["triggers"][0]["metadata"]["targetValue"]


REFUSED = [
    ({"routing": "gateway"}, "--routing gateway: name with --gateway-image an image"),
    ({"routing": "epp", "route_parent": (None, "a")}, "--routing epp: name with --picker-image"),
    ({"routing": "epp", "picker_image": "p"}, "--routing epp: name with --route-parent the Gateway"),
    ({"routing": "envoy"}, "--routing envoy: name with --route-parent the Gateway"),
    ({"routing": "envoy", "route_parent": (None, "a"), "gateway_image": "g"}, "--routing envoy and --gateway-image: "),
    ({"picker_image": "p"}, "without --routing epp there is none"),
    ({"route_parent": (None, "a")}, "without --routing there is none"),
    ({"routing": "envoy", "route_parent": ("a.b", "c")}, "--route-parent: expected up to 63 small letters"),
    ({"routing": "envoy", "route_parent": (None, "A")}, "--route-parent: expected a name"),
    ({"autoscale": "keda"}, "--autoscale: expected --max-replicas above --replicas (1), got none"),
    ({"autoscale": "hpa", "max_replicas": 1, "target": 1}, "--autoscale: expected --max-replicas above --replicas"),
    ({"autoscale": "keda", "max_replicas": 2, "target": 1, "namespace": None}, "name the namespace with --namespace"),
]


def test_what_can_t_work_is_refused_in_one_line(facts):
    for options, expected in REFUSED:
        with pytest.raises(ToolError, match=re.escape(expected)) as error:
            kubernetes.render(facts["tiny"], dataclasses.replace(PLAIN, **options))
        assert error.value.exit_code == 2
        assert "\n" not in str(error.value)


@pytest.mark.slow
def test_the_command_line(facts, capsys):
    command = ["launch", "kubernetes", str(facts["tiny"].folder), "--name", "r1", "--image", "tritonserver:here"]
    capsys.readouterr()
    options = "--namespace models --autoscale keda --max-replicas 3 --target 8 --routing epp --route-parent edge/public"
    assert main([*command, *options.split(), "--picker-image", "picker:0.8"]) == 0
    documents = list(yaml.safe_load_all(capsys.readouterr().out))
    assert {"InferencePool", "ScaledObject", "HTTPRoute"} <= {document["kind"] for document in documents}
    for parent in ("a/b/c", "/a", "a/", ""):
        with pytest.raises(SystemExit, match="2"):
            main([*command, "--route-parent", parent])
        assert "expected NAME or NAMESPACE/NAME of a Gateway, got" in capsys.readouterr().err


def test_the_selectors_of_a_gateway_find_their_own_pods_only(facts):
    found = render(facts["tiny"], GATEWAY)
    pods = {name: found["Deployment", name]["spec"]["template"]["metadata"]["labels"] for name in ("r1", "r1-gateway")}
    services = {"r1-server": "r1", "r1-servers": "r1", "r1-gateway": "r1-gateway"}
    expected = {("Service", name): pod for name, pod in services.items()}
    expected |= {("PodDisruptionBudget", name): name for name in pods}
    for key, ours in expected.items():
        selector = found[key]["spec"]["selector"]
        chosen = selector.get("matchLabels", selector).items()
        assert [name for name, labels in pods.items() if chosen <= labels.items()] == [ours]


def test_the_command_of_a_gateway_reaches_the_servers_ports(facts, tmp_path):
    found = render(facts["tiny"], GATEWAY)
    pod = found["Deployment", "r1-gateway"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    (tmp_path / "keys").write_text("# nobody")
    words = [word.replace("/etc/deepseek-triton", str(tmp_path)) for word in container["command"]]
    words[words.index("--keys") + 1] = str(tmp_path / "keys")
    found_settings = settings_of(program_parser(["gateway"]).parse_args(words[1:]))
    assert words[0] == "deepseek-triton"
    assert found_settings.models == (
        ModelSettings(("dns+http://r1-servers:8100#metrics=8102",), "", facts["tiny"].model),
    )
    assert (found_settings.host, found_settings.port, found_settings.drain_s) == (
        "0.0.0.0",
        container["ports"][0]["containerPort"],
        600,
    )
    service = found["Service", "r1-servers"]["spec"]
    assert (service["clusterIP"], service["ports"][0]["port"]) == ("None", 8100)
    [mount], [volume] = container["volumeMounts"], pod["volumes"]
    assert f"{mount['mountPath']}/keys" in container["command"]
    assert (mount["name"], volume["secret"]["secretName"]) == (volume["name"], "api-keys")
    assert found["Deployment", "r1-gateway"]["spec"]["replicas"] == 3
    pre_stop_s = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > pre_stop_s + 600  # a stop leaves time for running requests
    paths = [container[f"{probe}Probe"]["httpGet"]["path"] for probe in ("readiness", "liveness")]
    assert paths == ["/ready", "/health"]


def test_options_of_no_gateway_are_refused(facts, capsys):
    cases = {
        "--gateway-keys a": "without --gateway-image there is none",
        "--gateway-replicas 2": "without --gateway-image there is none",
        "--gateway-image i --gateway-keys A_b": "--gateway-keys: expected a name of small letters",
        "--gateway-image=-i": "expected an image's name",
    }
    for words, message in cases.items():
        try:
            code = main(["launch", "kubernetes", str(facts["tiny"].folder), "--image", "i", *words.split()])
        except SystemExit as exit:
            code = exit.code
        assert (code, message in capsys.readouterr().err) == (2, True), words
