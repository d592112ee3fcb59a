"""`launch kubernetes --gateway-image`, `--routing` and `--autoscale`: objects are valid, and find the servers."""

import dataclasses
from urllib.parse import urlsplit

import jsonschema
import pytest
import yaml

from deepseek_backend.backend_metrics import FAMILIES
from deepseek_triton_tools.cli.gateway import settings_of
from deepseek_triton_tools.cli.main import program_parser
from deepseek_triton_tools.gateway.settings import ModelSettings
from deepseek_triton_tools.launching import kubernetes
from deepseek_triton_tools.launching.launch_settings import LaunchOptions
from deepseek_triton_tools.repository.launch_facts import facts_of
from support import manifests
from support.commands import run_command
from support.manifests import PICKER, container, templates

PLAIN = LaunchOptions(
    name="r1",
    namespace="models",
    image="tritonserver:here",
    http_port=8100,
    metrics_port=8102,
    repository_claim="repository",
)
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
def facts(launchable):
    """A small model, R1 for one node of H200 and for two of H100."""
    return {name: facts_of(str(launchable / name)) for name in ("twin", "r1", "r1x2")}


def render(facts, options):
    return manifests.objects(kubernetes.render(facts, options))


@pytest.mark.slow
def test_all_of_it_is_valid(facts, subtests):
    cases = {**ROUTINGS, "keda": KEDA, "plain gateway": GATEWAY}
    cases["epp and hpa"] = dataclasses.replace(ROUTINGS["epp"], max_replicas=2, target=8)
    for case, options in cases.items():
        for name in ("twin", "r1x2"):
            with subtests.test(f"{case} {name}"):
                objects = render(facts[name], options)
                manifests.validate(objects, *manifests.VERSIONS)
                kinds = {kind for kind, _ in objects}
                assert ("ScaledObject" in kinds, "HTTPRoute" in kinds) == (case == "keda", options.routing is not None)
                assert (("Deployment", "r1-gateway") in objects) == bool(options.gateway_image)


def test_a_wrong_field_is_seen(facts):
    objects = render(facts["twin"], KEDA)
    objects["ScaledObject", "r1"]["spec"]["triggers"][0]["metrictype"] = "Value"
    with pytest.raises(jsonschema.ValidationError):
        manifests.validate(objects)


def server_pod(objects):
    """Return the template of the pod with tritonserver, with the labels that a controller adds."""
    if ("Deployment", "r1") in objects:
        return templates(objects["Deployment", "r1"]["spec"])[0]
    template, _ = templates(objects["LeaderWorkerSet", "r1"]["spec"])
    lws = "leaderworkerset.sigs.k8s.io"
    template["metadata"]["labels"] |= {f"{lws}/name": "r1", f"{lws}/worker-index": "0"}
    return template


def container_ports(template):
    return {port["name"]: port["containerPort"] for port in container(template)["ports"]}


@pytest.mark.parametrize("name", ["r1", "r1x2"])
def test_the_picker_reads_and_picks_the_servers(facts, name):
    objects = render(facts[name], ROUTINGS["epp"])
    pool, picker = objects["InferencePool", "r1"]["spec"], objects["Deployment", "r1-picker"]["spec"]["template"]
    servers, service = server_pod(objects), objects["Service", "r1-picker"]["spec"]
    labels = servers["metadata"]["labels"]
    assert pool["selector"]["matchLabels"].items() <= labels.items()
    assert not pool["selector"]["matchLabels"].items() <= picker["metadata"]["labels"].items()
    if name == "r1x2":
        _, workers = templates(objects["LeaderWorkerSet", "r1"]["spec"])
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
    objects = render(facts["twin"], ROUTINGS["epp"])
    pod = objects["Deployment", "r1-picker"]["spec"]["template"]
    *flags, option, text = container(pod)["args"]
    given = dict(flag.removeprefix("--").split("=") for flag in flags) | {option.removeprefix("--"): text}
    assert list(given) == PICKER["options"]
    assert not given.keys() & set(PICKER["refused_options"])
    assert given["pool-name"] == "r1"
    assert int(given["model-server-metrics-port"]) == container_ports(server_pod(objects))["metrics"]
    config = yaml.safe_load(text)
    manifests.keeps(PICKER["config"], config)
    plugins = {plugin["type"] for plugin in config["plugins"]}
    used = {plugin["pluginRef"] for profile in config["schedulingProfiles"] for plugin in profile["plugins"]}
    # Without it the picker would parse bodies as OpenAI's, and the prefix of a body that isn't parsed is not known.
    assert config["parser"]["pluginRef"] == "passthrough-parser"
    assert used | {"passthrough-parser"} == plugins
    assert "prefix-cache-scorer" not in plugins
    binding = objects["RoleBinding", "r1-picker"]
    assert pod["spec"]["serviceAccountName"] == binding["subjects"][0]["name"] == "r1-picker"
    assert ("ServiceAccount", "r1-picker") in objects
    rules = objects["Role", binding["roleRef"]["name"]]["rules"]
    allowed = {(rule["apiGroups"][0], name) for rule in rules for name in rule["resources"]}
    assert {("", "pods"), ("inference.networking.k8s.io", "inferencepools")} <= allowed


def test_a_route_leads_to_a_port_of_its_service(facts):
    for routing, service in {"gateway": "r1-gateway", "envoy": "r1-server"}.items():
        objects = render(facts["twin"], ROUTINGS[routing])
        [rule] = objects["HTTPRoute", "r1"]["spec"]["rules"]
        [backend] = rule["backendRefs"]
        assert backend["name"] == service
        assert backend["port"] in [port["port"] for port in objects["Service", service]["spec"]["ports"]]
        assert rule["timeouts"] == {"request": "0s"}, "a stream is longer than a proxy's default"
    [target] = objects["BackendTrafficPolicy", "r1"]["spec"]["targetRefs"]
    assert ("HTTPRoute", target["name"]) in objects
    objects = render(facts["twin"], dataclasses.replace(ROUTINGS["gateway"], route_parent=None))
    assert ("Service", "r1-gateway") in objects  # needs no route
    assert not [kind for kind, _ in objects if kind == "HTTPRoute"]


@pytest.mark.parametrize(("name", "kind"), [("r1", "Deployment"), ("r1x2", "LeaderWorkerSet")])
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
    keda = render(facts["r1"], KEDA)["ScaledObject", "r1"]["spec"]
    hpa = render(facts["r1"], dataclasses.replace(KEDA, autoscale="hpa"))["HorizontalPodAutoscaler", "r1"]["spec"]
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
        refused = "; ".join(kubernetes.refusals(facts["twin"], dataclasses.replace(PLAIN, **options)))
        assert expected in refused
        assert "\n" not in refused


WRONG_WORDS = {
    **dict.fromkeys(["--route-parent a/b/c", "--route-parent /a", "--route-parent a/"], "--route-parent"),
    "--gateway-keys a": "without --gateway-image there is none",
    "--gateway-replicas 2": "without --gateway-image there is none",
    "--gateway-image i --gateway-keys A_b": "--gateway-keys: expected a name",
    "--gateway-image=-i": "expected an image's name",
}


def test_the_command_line_is_refused_where_it_is_wrong(facts):
    for words, expected in WRONG_WORDS.items():
        refused = run_command("launch", "kubernetes", str(facts["twin"].folder), "--image", "i", *words.split())
        assert (refused.returncode, expected in refused.stderr) == (2, True), words


def test_the_selectors_of_a_gateway_find_their_own_pods_only(facts):
    found = render(facts["twin"], GATEWAY)
    pods = {name: found["Deployment", name]["spec"]["template"]["metadata"]["labels"] for name in ("r1", "r1-gateway")}
    services = {"r1-server": "r1", "r1-servers": "r1", "r1-gateway": "r1-gateway"}
    expected = {("Service", name): pod for name, pod in services.items()}
    expected |= {("PodDisruptionBudget", name): name for name in pods}
    for key, ours in expected.items():
        selector = found[key]["spec"]["selector"]
        chosen = selector.get("matchLabels", selector).items()
        assert [name for name, labels in pods.items() if chosen <= labels.items()] == [ours]


def test_the_command_of_a_gateway_reaches_the_servers_ports(facts, tmp_path):
    found = render(facts["twin"], GATEWAY)
    pod = found["Deployment", "r1-gateway"]["spec"]["template"]
    gateway = container(pod)
    (tmp_path / "keys").write_text("# nobody")
    words = [word.replace("/etc/deepseek-triton/keys", str(tmp_path)) for word in gateway["command"]]
    settings = settings_of(program_parser(["gateway"]).parse_args(words[1:]))
    assert words[0] == "deepseek-triton"
    assert settings.models == (ModelSettings(("dns+http://r1-servers:8100#metrics=8102",), "", facts["twin"].model),)
    assert (settings.host, settings.drain_s) == ("0.0.0.0", 600)
    assert settings.port == gateway["ports"][0]["containerPort"]
    service = found["Service", "r1-servers"]["spec"]
    assert (service["clusterIP"], service["ports"][0]["port"]) == ("None", 8100)
    [mount], [volume] = gateway["volumeMounts"], pod["spec"]["volumes"]
    assert f"{mount['mountPath']}/keys" in gateway["command"]
    assert (mount["name"], volume["secret"]["secretName"]) == (volume["name"], "api-keys")
    assert found["Deployment", "r1-gateway"]["spec"]["replicas"] == 3
    pre_stop_s = int(gateway["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["spec"]["terminationGracePeriodSeconds"] > pre_stop_s + 600  # a stop leaves time for running requests
    paths = [gateway[f"{probe}Probe"]["httpGet"]["path"] for probe in ("readiness", "liveness")]
    assert paths == ["/ready", "/health"]
