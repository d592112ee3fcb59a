"""`launch kubernetes` for a pair of context and generation servers."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml

from deepseek_triton_tools.cli.gateway import settings_of
from deepseek_triton_tools.cli.main import main, program_parser
from deepseek_triton_tools.gateway.settings import ModelSettings

SCHEMA = yaml.safe_load((Path(__file__).parent / "samples/disaggregated_set.yaml").read_text("utf-8"))
WORKER_INDEX = "leaderworkerset.sigs.k8s.io/worker-index"
SERVERS = {
    "one": ["deepseek-r1", "--gpu", "h200", "--model", "/models/R1"],
    "two": ["deepseek-r1", "--gpu", "h100", "--gpus", "16", "--model", "/models/R1"],
    "twin": ["tiny", "--engine", "simulated"],
    "older": ["deepseek-r1", "--gpu", "h200", "--model", "/models/R1", "--trtllm", "1.1.0"],
    "other": ["deepseek-v3", "--gpu", "h200", "--model", "/models/V3"],
}


@pytest.fixture
def tmp_path(plain_path):
    return plain_path


@pytest.fixture(scope="module")
def servers(plain_folder):
    folder = plain_folder / "sides"
    for name, words in SERVERS.items():
        assert main(["build", *words, "--output", str(folder / name)]) == 0
    return folder


@pytest.fixture
def pair(servers, tmp_path):
    """Make a pair's folder of two servers."""

    def make(context, generation, name="pair"):
        for side, server in (("context", context), ("generation", generation)):
            if server is not None:
                shutil.copytree(servers / server, tmp_path / name / side)
        return tmp_path / name

    return make


@pytest.fixture
def launched(capsys):
    """The words after `launch` -> exit code, output and errors."""

    def launch(*words):
        capsys.readouterr()
        try:
            code = main(["launch", *map(str, words)])
        except SystemExit as end:
            code = end.code
        out, err = capsys.readouterr()
        return code, out, err

    return launch


@pytest.fixture
def objects(launched):
    """(kind, name) -> document of `launch kubernetes`."""

    def render(*words):
        code, out, err = launched("kubernetes", *words)
        assert code == 0, err
        assert "@@" not in out
        found = {(one["kind"], one["metadata"]["name"]): one for one in yaml.load_all(out, Loader=yaml.CSafeLoader)}
        assert len(found) == out.count("\n---\n") + 1
        return found

    return render


def roles_of(found):
    [disaggregated] = [document for (kind, _), document in found.items() if kind == "DisaggregatedSet"]
    return {role["name"]: role["spec"] for role in disaggregated["spec"]["roles"]}


def templates(role):
    group = role["leaderWorkerTemplate"]
    return [group[name] for name in ("leaderTemplate", "workerTemplate") if name in group]


def validate(document, version):
    if document["kind"] != "DisaggregatedSet":
        kubernetes_validate.validate(document, version, strict=True)
        return
    jsonschema.validate(document, SCHEMA, cls=jsonschema.Draft202012Validator)
    for role in document["spec"]["roles"]:
        for template in templates(role["spec"]):
            spec = {"selector": {"matchLabels": template["metadata"]["labels"]}, "template": template}
            wrapped = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "wrapped"}, "spec": spec}
            kubernetes_validate.validate(wrapped, version, strict=True)


EVERYTHING = [
    *("--name", "r1", "--namespace", "models", "--image", "registry.example.com/r1:2", "--env", "NCCL_DEBUG=INFO"),
    *("--cache-dir", "/var/cache/kernels", "--host-network", "--rdma", "rdma/hca=8", "--scrape"),
    *("--gateway-image", "gateway:1", "--gateway-keys", "keys", "--pull-secret", "registry"),
    *("--context-servers", "2", "--generation-servers", "3", "--http-port", "8100", "--metrics-port", "8102"),
]


@pytest.mark.parametrize("version", ["1.27", "1.37"])
@pytest.mark.parametrize("options", [["--image", "here"], EVERYTHING], ids=["plain", "everything"])
@pytest.mark.parametrize("sides", [("one", "one"), ("two", "two"), ("one", "two"), ("twin", "twin")])
def test_every_object_of_a_pair_is_valid(pair, objects, sides, options, version):
    found = objects(pair(*sides), *options)

    for document in found.values():
        validate(document, version)
    assert list(roles_of(found)) == ["context", "generation"]


def test_the_schema_sees_a_wrong_field(pair, objects):
    found = objects(pair("two", "two"))
    document = found["DisaggregatedSet", "pair"]
    for change in (
        lambda spec: spec["roles"].pop(),
        lambda spec: spec["roles"][0]["spec"].update(replica=1),
        lambda spec: spec["roles"][0]["spec"]["rolloutStrategy"].update(type="Recreate"),
        lambda spec: spec["roles"][1]["spec"]["leaderWorkerTemplate"].pop("workerTemplate"),
    ):
        wrong = copy.deepcopy(document)
        change(wrong["spec"])
        with pytest.raises(jsonschema.ValidationError):
            validate(wrong, "1.37")


def test_each_side_has_its_own_size_and_number(pair, objects):
    roles = roles_of(objects(pair("one", "two"), "--generation-servers", "3"))
    context, generation = roles["context"], roles["generation"]

    assert (context["replicas"], generation["replicas"]) == (1, 3)
    assert (context["leaderWorkerTemplate"]["size"], generation["leaderWorkerTemplate"]["size"]) == (1, 2)
    # A container that ends is restarted by the kubelet, but a rank can't join the others again.
    assert context["leaderWorkerTemplate"]["restartPolicy"] == "None"
    assert generation["leaderWorkerTemplate"]["restartPolicy"] == "RecreateGroupOnPodRestart"
    assert [len(templates(role)) for role in (context, generation)] == [1, 2]


def test_each_service_and_budget_finds_its_own_side_only(pair, objects):
    found = objects(pair("two", "two"), *EVERYTHING)
    pods = {
        (side, "leader" if first else "worker"): template["metadata"]["labels"] | {WORKER_INDEX: "0" if first else "1"}
        for side, role in roles_of(found).items()
        for first, template in zip((True, False), templates(role), strict=True)
    }
    pods["gateway", "leader"] = found["Deployment", "r1-gateway"]["spec"]["template"]["metadata"]["labels"]

    for side in ("context", "generation"):
        service, budget = found["Service", f"r1-{side}"]["spec"], found["PodDisruptionBudget", f"r1-{side}"]["spec"]
        assert [key for key, pod in pods.items() if service["selector"].items() <= pod.items()] == [(side, "leader")]
        chosen = budget["selector"]["matchLabels"].items()
        assert [key for key, pod in pods.items() if chosen <= pod.items()] == [(side, "leader"), (side, "worker")]


def test_the_gateway_asks_both_sides(pair, objects, tmp_path):
    found = objects(pair("one", "one"), *EVERYTHING)
    [container] = found["Deployment", "r1-gateway"]["spec"]["template"]["spec"]["containers"]
    (tmp_path / "keys").write_text("# nobody")
    words = [word.replace("/etc/deepseek-triton/keys", str(tmp_path)) for word in container["command"]]

    [model] = settings_of(program_parser(["gateway"]).parse_args(words[1:])).models

    generation, context = ("dns+http://r1-generation:8100#metrics=8102",), ("dns+http://r1-context:8100#metrics=8102",)
    assert model == ModelSettings(generation, "", "tensorrt_llm", context)
    for side in ("context", "generation"):
        service = found["Service", f"r1-{side}"]["spec"]
        assert (service["clusterIP"], service["ports"][0]["port"]) == ("None", 8100)


def test_a_claim_has_the_whole_folder(pair, objects):
    found = objects(pair("one", "one"), "--repository-claim", "pairs")

    assert not [name for kind, name in found if kind == "ConfigMap"]
    for side, role in roles_of(found).items():
        [container] = templates(role)[0]["spec"]["containers"]
        [mount] = [mount for mount in container["volumeMounts"] if mount["name"] == "repository"]
        assert mount == {"name": "repository", "mountPath": "/model_repository", "readOnly": True, "subPath": side}


def test_the_header_says_what_is_needed_first(pair, launched):
    _, text, _ = launched("kubernetes", pair("one", "two"), "--image", "here")
    head = text[: text.index("\napiVersion")]

    assert "0.9 or newer, which brings DisaggregatedSet" in head
    assert "secret generic pair-generation-ssh" in head
    assert "pair-context-ssh" not in head
    said = head.replace("\n# ", " ")
    assert "--server 'dns+http://pair-generation:8000#metrics=8002'" in said
    assert "--context-server 'dns+http://pair-context:8000#metrics=8002'" in said


# --- what is refused ---


@pytest.mark.parametrize(
    ("sides", "expected"),
    [
        (
            ("one", None),
            "is half of a pair: expected context/ and generation/ in it, and generation/start.sh is missing",
        ),
        ((None, "one"), "context/start.sh is missing"),
        (("one", "older"), "context/ and generation/ are for different releases, 1.2.1 and 1.1.0"),
        (("one", "other"), "for different variants, deepseek-r1 and deepseek-v3; "),
        (("one", "other"), "for different checkpoints, /models/R1 and /models/V3: write both sides anew"),
        (("twin", "one"), "for different engines, simulated and tensorrt_llm"),
    ],
)
@pytest.mark.parametrize("form", ["kubernetes"])
def test_sides_that_do_not_fit_are_refused(pair, launched, form, sides, expected):
    code, out, err = launched(form, pair(*sides))
    [line] = err.splitlines()
    assert (code, out) == (1, "")
    assert expected in line


def test_swapped_sides_are_refused(pair, launched):
    folder = pair("one", "one")
    for side, profile in (("context", "gen"), ("generation", "ctx")):
        stamp = folder / side / "tensorrt_llm/deepseek-triton.json"
        stamp.write_text(stamp.read_text().replace('"profile": "balanced"', f'"profile": "{profile}"'))

    code, _, err = launched("kubernetes", folder)

    assert code == 1
    assert "context/ holds a generation server, by its deepseek-triton.json; generation/ holds a context server" in err


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--replicas", "2"], "a pair has --context-servers and --generation-servers instead"),
        (["--max-replicas", "2"], "a pair has --context-servers and --generation-servers instead"),
        (["--name", "a" * 27], "--name: expected up to 26 small letters"),
        (["--generation-servers", "0"], "--generation-servers"),
        (["--context-servers", "1000"], "--context-servers: expected at most 999"),
        (["--namespace", "A"], "--namespace: expected"),
        (["--env", "A=1", "--env", "A=2"], "--env: A: given twice"),
        (["--", "--http-port=1"], "expected HTTP_PORT to be set"),
    ],
)
def test_options_that_a_pair_does_not_take(pair, launched, options, expected):
    code, out, err = launched("kubernetes", pair("one", "one"), *options)
    assert (code, out) == (2, "")
    assert expected in err
    assert err.count("expected") <= 1


@pytest.mark.parametrize("form", ["local", "docker", "mpirun"])
def test_forms_of_one_server_name_those_of_a_pair(pair, launched, form):
    code, _, err = launched(form, pair("one", "one"))
    assert code == 1
    assert "is a pair, which launch slurm and launch kubernetes start: name one of its repositories" in err


def test_one_repository_has_no_sides(servers, launched):
    code, _, err = launched("kubernetes", servers / "one", "--context-servers", "2")
    assert code == 2
    assert "--context-servers and --generation-servers are for a pair, and" in err
