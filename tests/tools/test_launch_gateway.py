"""`launch kubernetes --gateway-image`: the gateway's objects are valid, and reach the servers."""

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
    pull_secret="registry",
    scrape=True,
    http_port=8100,
    metrics_port=8102,
    exit_timeout=600,
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


@pytest.mark.parametrize("options", [PLAIN, EVERYTHING], ids=["plain", "everything"])
def test_all_of_it_is_valid(objects, facts, options):
    for document in objects(options).values():
        for version in ("1.27", "1.37"):
            kubernetes_validate.validate(document, version, strict=True)
    text = kubernetes.render(facts, options)
    text = text[: text.index("\ndata:")] + text[text.index("\n---\n") :] if "\ndata:" in text else text
    assert "@@" not in text
    assert max(len(line) for line in text.splitlines() if re.match(r" *# [^ ]", line)) <= 120
    assert "r1-gateway" not in kubernetes.render(facts, LaunchOptions(image="tritonserver:here"))


def test_every_selector_finds_its_own_pods_only(objects):
    found = objects(EVERYTHING)
    pods = {name: found["Deployment", name]["spec"]["template"]["metadata"]["labels"] for name in ("r1", "r1-gateway")}
    services = {"r1-server": "r1", "r1-servers": "r1", "r1-gateway": "r1-gateway"}
    expected = {("Service", name): pod for name, pod in services.items()}
    expected |= {("PodDisruptionBudget", name): name for name in pods}
    for key, ours in expected.items():
        selector = found[key]["spec"]["selector"]
        chosen = selector.get("matchLabels", selector).items()
        assert [name for name, labels in pods.items() if chosen <= labels.items()] == [ours]


def test_the_command_reaches_the_servers_ports(objects, facts, tmp_path):
    found = objects(EVERYTHING)
    pod = found["Deployment", "r1-gateway"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    (tmp_path / "keys").write_text("# nobody")
    words = [word.replace("/etc/deepseek-triton", str(tmp_path)) for word in container["command"]]
    words[words.index("--keys") + 1] = str(tmp_path / "keys")
    settings = settings_of(program_parser(["gateway"]).parse_args(words[1:]))
    assert words[0] == "deepseek-triton"
    assert settings.models == (ModelSettings(("dns+http://r1-servers:8100#metrics=8102",), "", facts.model),)
    assert (settings.host, settings.port, settings.drain_s) == ("0.0.0.0", container["ports"][0]["containerPort"], 600)
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


def test_options_that_cannot_be(facts, capsys):
    cases = {
        "--gateway-keys a": "without --gateway-image there is none",
        "--gateway-replicas 2": "without --gateway-image there is none",
        "--gateway-image i --gateway-keys A_b": "--gateway-keys: expected a name of small letters",
        "--gateway-image=-i": "expected an image's name",
    }
    for words, message in cases.items():
        try:
            code = main(["launch", "kubernetes", str(facts.folder), "--image", "i", *words.split()])
        except SystemExit as exit:
            code = exit.code
        assert (code, message in capsys.readouterr().err) == (2, True), words
