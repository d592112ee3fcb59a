"""`launch kubernetes --gateway-image`: the gateway's objects are valid, and reach the servers."""

from __future__ import annotations

import re

import kubernetes_validate
import pytest
import yaml

from deepseek_triton_tools.cli.gateway import settings_of
from deepseek_triton_tools.cli.main import main, program_parser
from deepseek_triton_tools.gateway.settings import ModelSettings
from deepseek_triton_tools.launching import kubernetes
from deepseek_triton_tools.launching.launch_settings import LaunchOptions
from deepseek_triton_tools.repository.launch_facts import facts_of

EVERYTHING = LaunchOptions(
    name="r1",
    namespace="models",
    image="tritonserver:here",
    http_port=8100,
    metrics_port=8102,
    exit_timeout=600,
    pull_secret="registry",
    scrape=True,
    gateway_image="registry.example.com/gateway:1",
    gateway_replicas=3,
    gateway_keys="api-keys",
)
PLAIN = LaunchOptions(name="r1", image="tritonserver:here", gateway_image="gateway")


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("repositories") / "tiny"
    assert main(["build", "tiny", "--engine", "simulated", "--output", str(folder)]) == 0
    return facts_of(str(folder))


@pytest.fixture
def objects(facts):
    """(kind, name) -> document."""

    def render(options):
        documents = yaml.safe_load_all(kubernetes.render(facts, options))
        return {(document["kind"], document["metadata"]["name"]): document for document in documents}

    return render


def pod_of(deployment):
    return deployment["spec"]["template"]["spec"]


def selects(selector, deployment):
    return selector.items() <= deployment["spec"]["template"]["metadata"]["labels"].items()


@pytest.mark.parametrize("version", ["1.27", "1.37"])
@pytest.mark.parametrize("options", [PLAIN, EVERYTHING], ids=["plain", "everything"])
def test_all_of_it_is_valid(objects, options, version):
    for document in objects(options).values():
        kubernetes_validate.validate(document, version, strict=True)


def test_without_an_image_there_is_no_gateway(facts):
    assert "r1-gateway" not in kubernetes.render(facts, LaunchOptions(image="tritonserver:here"))


def test_every_selector_finds_its_own_pods_only(objects):
    found = objects(EVERYTHING)
    servers, gateway = found["Deployment", "r1"], found["Deployment", "r1-gateway"]

    for key, ours in {
        ("Service", "r1-server"): servers,
        ("Service", "r1-servers"): servers,
        ("Service", "r1-gateway"): gateway,
        ("PodDisruptionBudget", "r1"): servers,
        ("PodDisruptionBudget", "r1-gateway"): gateway,
    }.items():
        selector = found[key]["spec"]["selector"]
        assert [one for one in (servers, gateway) if selects(selector.get("matchLabels", selector), one)] == [ours]


def test_the_command_reaches_the_servers_ports(objects, facts, tmp_path):
    found = objects(EVERYTHING)
    pod = pod_of(found["Deployment", "r1-gateway"])
    [container] = pod["containers"]
    (tmp_path / "keys").write_text("# nobody")
    words = [word.replace("/etc/deepseek-triton", str(tmp_path)) for word in container["command"]]
    words[words.index("--keys") + 1] = str(tmp_path / "keys")

    settings = settings_of(program_parser(["gateway"]).parse_args(words[1:]))

    assert words[0] == "deepseek-triton"
    assert settings.models == (ModelSettings(("dns+http://r1-servers:8100#metrics=8102",), "", facts.model),)
    assert (settings.host, settings.port, settings.drain_s) == ("0.0.0.0", container["ports"][0]["containerPort"], 600)
    assert found["Service", "r1-servers"]["spec"]["clusterIP"] == "None"
    assert found["Service", "r1-servers"]["spec"]["ports"][0]["port"] == 8100
    [mount], [volume] = container["volumeMounts"], pod["volumes"]
    assert f"{mount['mountPath']}/keys" in container["command"]
    assert (mount["name"], volume["secret"]["secretName"]) == (volume["name"], "api-keys")
    assert found["Deployment", "r1-gateway"]["spec"]["replicas"] == 3


def test_a_stop_leaves_time_for_running_requests(objects):
    pod = pod_of(objects(EVERYTHING)["Deployment", "r1-gateway"])
    [container] = pod["containers"]
    pre_stop_s = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > pre_stop_s + 600
    assert (container["readinessProbe"]["httpGet"]["path"], container["livenessProbe"]["httpGet"]["path"]) == (
        "/ready",
        "/health",
    )


def test_every_line_of_a_comment_fits(facts):
    text = kubernetes.render(facts, EVERYTHING)
    text = text[: text.index("\ndata:")] + text[text.index("\n---\n") :] if "\ndata:" in text else text
    assert "@@" not in text
    assert max(len(line) for line in text.splitlines() if re.match(r" *# [^ ]", line)) <= 120


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gateway-keys", "a"], "without --gateway-image there is none"),
        (["--gateway-replicas", "2"], "without --gateway-image there is none"),
        (["--gateway-image", "i", "--gateway-keys", "A_b"], "--gateway-keys: expected a name of small letters"),
        (["--gateway-image=-i"], "expected an image's name"),
    ],
)
def test_options_that_cannot_be(facts, capsys, words, message):
    code = None
    try:
        code = main(["launch", "kubernetes", str(facts.folder), "--image", "i", *words])
    except SystemExit as exit:
        code = exit.code
    assert code == 2
    assert message in capsys.readouterr().err
