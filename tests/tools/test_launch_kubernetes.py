"""`launch kubernetes`: the manifests are valid, their numbers agree with each other, and their scripts run."""

import base64
import dataclasses
import itertools
import json
import math
import os
import re
import shutil
import stat
import subprocess
from pathlib import Path

import jsonschema
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from deepseek_triton_build.arithmetic import ENGINE_START_S
from deepseek_triton_tools.launching import kubernetes
from deepseek_triton_tools.launching.kubernetes_manifest import PLACEHOLDER, object_name
from deepseek_triton_tools.launching.kubernetes_yaml import MAX_BYTES, data_lines, repository_files, write_documents
from deepseek_triton_tools.launching.launch_settings import PRE_STOP_S, LaunchOptions, StopTimes
from deepseek_triton_tools.repository.launch_facts import facts_of
from deepseek_triton_tools.tool_errors import RepositoryError, ToolError
from support import manifests
from support.commands import run_command
from support.hosts import HostsError, two_hosts
from support.manifests import container, environment
from support.recording import recording

GIB = 2**30
R1_BYTES = 688574839360
EVERYTHING = LaunchOptions(
    name="r1",
    namespace="models",
    image="registry.example.com/r1:2",
    pull_secret="registry",
    replicas=2,
    max_replicas=4,
    interface="eth0",
    host_network=True,
    scrape=True,
    checkpoint_on_nodes=True,
    cache_dir=Path("/var/cache/kernels"),
    rdma=("rdma/hca", 8),
    server_args=("--log-verbose", "1", "--id=$(HOME)"),
    environment=(("NCCL_DEBUG", "INFO"), ("PRICE", "$5 (HOME)")),
    node_selector=(("nvidia.com/gpu.product", "NVIDIA-H200"),),
)
OPTIONS = {
    "plain": LaunchOptions(),
    "everything": EVERYTHING,
    "claims": LaunchOptions(repository_claim="repository", cache_claim="kernels"),
}


@pytest.fixture(scope="module")
def facts(launchable):
    """R1 for one node of H200 and for two of H100, and a small model without a GPU."""
    return {name: facts_of(str(launchable / name)) for name in ("r1", "r1x2", "twin")}


@pytest.fixture
def rendered(facts):
    def render(name, options=OPTIONS["claims"]):
        return load(kubernetes.render(facts[name], options))

    return render


def load(text):
    """The objects by their kinds, of which there is one each."""
    return {kind: document for (kind, _), document in manifests.objects(text).items()}


def templates(documents):
    """The pod templates; the one with tritonserver comes first."""
    return manifests.templates((documents.get("Deployment") or documents["LeaderWorkerSet"])["spec"])


def validate(documents, *versions):
    manifests.validate({(kind, ""): document for kind, document in documents.items()}, *versions)


@pytest.mark.slow
def test_all_of_it_is_valid(rendered, subtests):
    """The scripts are bash, and Kubernetes expands nothing in them."""
    for name, options in [*itertools.product(("r1", "r1x2"), OPTIONS), ("twin", "image")]:
        with subtests.test(f"{name} {options}"):
            documents = rendered(name, OPTIONS.get(options, LaunchOptions(image="i")))
            validate(documents, *manifests.VERSIONS)
            assert {"Service", "PodDisruptionBudget"} < documents.keys()
            assert ("ConfigMap" in documents) == (options != "claims")
            assert ("HorizontalPodAutoscaler" in documents) == (options == "everything")
            for script in scripts(documents).values():
                checked = subprocess.run(["bash", "-n", "-c", script], capture_output=True, text=True)
                assert (checked.returncode, checked.stderr) == (0, "")
                assert not re.search(r"\$[($]", script)


def test_a_wrong_field_is_seen(rendered):
    """By each of the schemas."""
    for name, kind, place in (("r1", "Deployment", ["template", "spec"]), ("r1x2", "LeaderWorkerSet", [])):
        documents = rendered(name)
        spec = documents[kind]["spec"]
        for key in place:
            spec = spec[key]
        spec["workers"] = 1
        with pytest.raises(jsonschema.ValidationError):
            validate(documents)


def seconds(documents):
    """Return all times, read from the rendered documents."""
    server, *workers = templates(documents)
    probe, variables = container(server)["startupProbe"], environment(server)
    script = container(server)["args"][0]
    gather = re.search(r"SECONDS >= (\d+)", script)
    return {
        "window": probe["failureThreshold"] * probe["periodSeconds"],
        "gather": int(gather[1]) if gather else 0,
        "ready_within": int(variables["READY_WITHIN"]),
        "exit_timeout": int(variables["EXIT_TIMEOUT"]),
        "pre_stop": int(container(server)["lifecycle"]["preStop"]["exec"]["command"][-1]),
        "grace": server["spec"]["terminationGracePeriodSeconds"],
        "worker_grace": [worker["spec"]["terminationGracePeriodSeconds"] for worker in workers],
        "progress": documents.get("Deployment", {}).get("spec", {}).get("progressDeadlineSeconds"),
    }


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(
    size=st.integers(1, 4 * 10**12),
    rate=st.none() | st.integers(10**6, 10**11),
    exit_timeout=st.integers(0, 7200),
    name=st.sampled_from(["r1", "r1x2"]),
)
def test_the_deadlines_come_in_order(facts, size, rate, exit_timeout, name):
    serving = dataclasses.replace(facts[name].serving, size=size)
    options = LaunchOptions(rate=rate, exit_timeout=exit_timeout, repository_claim="repository")
    at = seconds(load(kubernetes.render(dataclasses.replace(facts[name], serving=serving), options)))
    # Start: first a cold load and the engine, then the supervisor gives up and ends all, then the probe gives up.
    assert at["ready_within"] >= size / (rate or 200e6) + ENGINE_START_S
    supervisor_ends = at["gather"] + at["ready_within"] + exit_timeout + 15
    assert supervisor_ends < at["window"]
    assert (at["gather"] > 0) == (name == "r1x2")
    # Stop: first tritonserver, then the supervisor, then mpirun, then the kubelet, and workers last.
    assert at["exit_timeout"] == exit_timeout
    assert at["pre_stop"] + exit_timeout < at["pre_stop"] + exit_timeout + 15 < at["grace"]
    assert at["pre_stop"] + exit_timeout + 20 < at["grace"]
    assert all(at["grace"] < worker for worker in at["worker_grace"])
    assert at["progress"] is None or at["progress"] > at["window"]


@pytest.mark.slow
def test_where_the_deadline_comes_from(facts, rendered):
    for name in ("r1", "r1x2", "twin"):
        at = seconds(rendered(name, LaunchOptions(image="i")))
        assert at["ready_within"] == facts[name].ready_within_s < at["window"]
    at = seconds(rendered("r1", LaunchOptions(repository_claim="r", ready_within=9000)))
    assert at["ready_within"] == 9000 < at["window"]
    at = seconds(rendered("r1", LaunchOptions(repository_claim="r", ready_within=0)))  # the probe's is left
    assert at["ready_within"] == 0
    assert at["window"] >= R1_BYTES / 200e6 + ENGINE_START_S
    stop = StopTimes()
    assert stop.worker_grace_period_s > stop.grace_period_s == PRE_STOP_S + stop.docker_stop_timeout_s


WARM = {"read_bytes": 10**12, "done_bytes": 10**12, "read_bytes_per_s": 10**9}


def warm_document(result):
    return json.dumps({"schema": "deepseek-triton/warm/1", "result": result})


@pytest.mark.slow
def test_a_measured_rate_counts(tmp_path, facts):
    path = tmp_path / "warm.json"
    path.write_text(warm_document(WARM))
    at = seconds(load(kubernetes.render(facts["r1"], LaunchOptions(measured=path))))
    assert at["ready_within"] == math.ceil((R1_BYTES / 10**9 + ENGINE_START_S) / 60) * 60
    path.unlink()
    cases = [
        (None, "No such file"),
        ("no JSON", "Expecting value"),
        ("[]", "something else"),
        ('{"result": {}}', "something else"),
        (warm_document(None), "something else"),
        (warm_document(WARM | {"read_bytes_per_s": None}), "nothing was read"),
        (warm_document(WARM | {"read_bytes": 10**9}), "warm evict"),
    ]
    for content, expected in cases:
        if content is not None:
            path.write_text(content)
        assert expected in refusal(facts["r1"], LaunchOptions(measured=path))


def refusal(facts, options):
    if not (refused := "; ".join(kubernetes.refusals(facts, options))):
        with pytest.raises(ToolError) as error:
            kubernetes.render(facts, options)
        assert error.value.exit_code == 2
        refused = str(error.value)
    assert "\n" not in refused
    return refused


def test_memory_holds_weights_ranks_and_shm(rendered):
    for template in templates(rendered("r1x2")):
        [shm] = [volume["emptyDir"] for volume in template["spec"]["volumes"] if volume["name"] == "shm"]
        resources = container(template)["resources"]
        memory = int(resources["limits"]["memory"].removesuffix("Gi")) * GIB
        assert memory >= R1_BYTES / 0.9 + 8 * 8 * GIB + int(shm["sizeLimit"].removesuffix("Gi")) * GIB
        assert resources["requests"]["memory"] == resources["limits"]["memory"]
        assert (resources["limits"]["nvidia.com/gpu"], shm["medium"]) == (8, "Memory")
        assert {"name": "shm", "mountPath": "/dev/shm"} in container(template)["volumeMounts"]


def test_only_the_pod_with_tritonserver_is_asked_for_it(rendered):
    server, worker = templates(rendered("r1x2"))
    probes = {"startup": "health/ready", "liveness": "health/live", "readiness": "models/tensorrt_llm/ready"}
    asked = {name: container(server)[f"{name}Probe"]["httpGet"] for name in probes}
    assert asked == {name: {"path": f"/v2/{path}", "port": "http"} for name, path in probes.items()}
    probes = {name: probe for name, probe in container(worker).items() if name.endswith("Probe")}
    assert probes == {"readinessProbe": {"tcpSocket": {"port": "ssh"}, "periodSeconds": 10}}
    assert container(worker)["ports"] == [{"name": "ssh", "containerPort": 2222}]
    assert environment(worker)["SSH_PORT"] == environment(server)["SSH_PORT"] == "2222"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["r1", "r1x2"])
def test_the_service_reaches_servers_only(rendered, name):
    documents = rendered(name, dataclasses.replace(EVERYTHING, http_port=9000))
    server, *_ = templates(documents)
    service, budget = documents["Service"], documents["PodDisruptionBudget"]
    labels = server["metadata"]["labels"]
    if name == "r1x2":  # what the controller adds to a leader's
        labels = labels | {"leaderworkerset.sigs.k8s.io/name": "r1", "leaderworkerset.sigs.k8s.io/worker-index": "0"}
    assert service["spec"]["selector"].items() <= labels.items()
    if name == "r1x2":
        assert "leaderworkerset.sigs.k8s.io/worker-index" in service["spec"]["selector"]
    assert service["metadata"]["name"] != "r1", "it is the name of the controller's headless Service"
    ports = {port["name"]: port["containerPort"] for port in container(server)["ports"]}
    assert [port["targetPort"] for port in service["spec"]["ports"]] == ["http", "grpc", "metrics"]
    assert ports == {"http": 9000, "grpc": 8001, "metrics": 8002}
    assert environment(server)["HTTP_PORT"] == "9000"
    for template in templates(documents):
        assert budget["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    assert budget["spec"]["maxUnavailable"] == 1


def test_one_replica_is_not_evicted_by_itself(rendered):
    """A Deployment's pod may go once the autoscaler has made another. Two groups could each lose a pod that way."""
    for name, allowed in {"r1": {"minAvailable": 1}, "r1x2": {"maxUnavailable": 0}}.items():
        spec = rendered(name, LaunchOptions(repository_claim="r", max_replicas=3))["PodDisruptionBudget"]["spec"]
        assert {key: spec[key] for key in ("minAvailable", "maxUnavailable") if key in spec} == allowed


@pytest.mark.parametrize(("name", "kind"), [("r1", "Deployment"), ("r1x2", "LeaderWorkerSet")])
def test_the_autoscaler_scales_what_there_is(rendered, name, kind):
    documents = rendered(name, EVERYTHING)
    spec, scaled = documents["HorizontalPodAutoscaler"]["spec"], documents[kind]
    target = {"apiVersion": scaled["apiVersion"], "kind": kind, "name": scaled["metadata"]["name"]}
    assert spec["scaleTargetRef"] == target
    assert (spec["minReplicas"], spec["maxReplicas"]) == (2, 4)
    assert "replicas" not in scaled["spec"], "an apply would set it back"
    [metric] = spec["metrics"]
    assert metric["pods"]["metric"]["name"] == "deepseek_triton_inflight_sequences"
    assert int(metric["pods"]["target"]["averageValue"]) == int(0.8 * 128)
    assert spec["behavior"]["scaleDown"]["stabilizationWindowSeconds"] <= 3600


def test_what_was_asked_for_is_there(rendered):
    server, worker = templates(rendered("r1x2", EVERYTHING))
    asked = {
        "hostNetwork": True,
        "dnsPolicy": "ClusterFirstWithHostNet",
        "nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-H200"},
        "imagePullSecrets": [{"name": "registry"}],
    }
    for template in (server, worker):
        assert asked.items() <= template["spec"].items()
        assert container(template)["image"] == "registry.example.com/r1:2"
        assert container(template)["resources"]["limits"]["rdma/hca"] == 8
        assert expanded(environment(template)["PRICE"]) == "$5 (HOME)"
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        assert volumes["kernels"]["hostPath"]["path"] == "/var/cache/kernels/registry.example.com_r1_2-h100"
        assert volumes["hub"]["hostPath"]["path"].endswith("/hub")
        assert "TRITON_CACHE_DIR" in environment(template)
    assert server["metadata"]["annotations"]["prometheus.io/port"] == "8002"
    assert environment(server)["INTERFACE"] == "eth0"
    assert [expanded(word) for word in container(server)["args"][1:]] == ["launch", *EVERYTHING.server_args]


def test_a_claim_holds_the_repository_instead(rendered):
    [template] = templates(rendered("r1", OPTIONS["claims"]))
    volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
    assert volumes["repository"]["persistentVolumeClaim"] == {"claimName": "repository", "readOnly": True}
    mounts = {mount["name"]: mount for mount in container(template)["volumeMounts"]}
    assert mounts["kernels"]["subPath"].endswith("-h200")
    assert "cp " not in container(template)["args"][0]


INVALID = [
    ({"name": "1r"}, "--name: expected"),
    ({"name": "r" * 41}, "--name: expected"),
    ({"namespace": "a.b"}, "--namespace: expected"),
    ({"namespace": "n" * 64}, "--namespace: expected"),
    ({"name": "R1", "namespace": "-"}, "--name: .*--namespace: "),  # all that is wrong is said at once
    ({"claim": "a..b"}, "--claim: expected a name"),
    ({"claim": "c." * 127 + "c"}, "--claim: expected a name"),
    ({"node_selector": (("a b", "c"),)}, "--node-selector: expected"),
    ({"node_selector": (("a", "c" * 64),)}, "--node-selector: expe"),
    ({"node_selector": (("a", "1"), ("a", "2"))}, "--node-selector: a is given twice"),
    ({"max_restarts": 2}, "--max-restarts: expected 0"),
    ({"environment": (("A", "1"), ("A", "2"))}, "--env: A: given twice"),
    ({"environment": (("HF_HUB_OFFLINE", "0"),)}, "--env: HF_HUB_OFFLINE: given twice, or set"),
    ({"repository_claim": ""}, "--repository-claim: expected a name"),
    ({"ready_file": Path("/run/ready")}, "--ready-file: expected a file in"),
    ({"ssh_port": 22}, "--ssh-port is for ranks"),
    ({"rate": 200}, "got 200 bytes/s, at which 641 GiB take 3,442,874,197 s"),
    ({"replicas": 2**31}, "--replicas: expected 1 to 2147483647"),
    ({"max_replicas": 2**31}, "--max-replicas: expected at most 2147483647"),
    ({"target": 4}, "without --max-replicas there is none"),
    ({"claim": "c", "checkpoint_on_nodes": True}, "either on a claim or on the nodes"),
    ({"replicas": 3, "max_replicas": 2}, r"--max-replicas: expected --replicas \(3\) or more, got 2"),
    ({"rdma": ("hca", 1)}, "--rdma: expected"),
    ({"cache_dir": Path("/k"), "cache_claim": "k"}, "on a claim or in a folder of the nodes"),
    ({"rate": 1, "measured": Path("m")}, "either given or measured"),
]


def test_invalid_options_are_refused_in_one_line(facts):
    for options, expected in INVALID:
        assert re.search(expected, refusal(facts["r1"], LaunchOptions(**options))), options
    for file, expected in (("/run/ready", []), ("ready", ["--ready-file: expected an absolute path"])):
        told = kubernetes.refusals(facts["r1x2"], dataclasses.replace(EVERYTHING, ready_file=Path(file)))
        assert [text.partition(" in the pod")[0] for text in told] == expected
    assert "name with --image one that has tritonserver" in refusal(facts["twin"], LaunchOptions())
    no_target = refusal(facts["twin"], LaunchOptions(image="i", max_replicas=2))
    assert "no max_batch_size for the autoscaler to aim at" in no_target


def test_a_start_script_that_was_broken_by_hand_is_refused_by_its_own_name(launchable, tmp_path):
    folder = tmp_path / "with blank"  # is another one in the pod
    shutil.copytree(launchable / "r1", folder)
    assert load(kubernetes.render(facts_of(str(folder)), LaunchOptions()))["Deployment"]
    script = folder / "start.sh"
    script.write_text("if fi\n" + script.read_text())
    with pytest.raises(ToolError, match=f"{re.escape(str(script))}: line 1: syntax error"):
        kubernetes.render(facts_of(str(folder)), LaunchOptions())


def test_the_name_and_the_image_that_is_needed(facts):
    names = {"R1_H200": "r1-h200", "--": "deepseek-triton", "8xh200": "deepseek-triton", "a" * 39 + "-b": "a" * 39}
    for folder, name in names.items():
        assert object_name(dataclasses.replace(facts["r1"], folder=Path("/srv") / folder), LaunchOptions()) == name
    assert list(kubernetes.unmet_requirements(facts["r1x2"], LaunchOptions()))
    assert not list(kubernetes.unmet_requirements(facts["r1x2"], EVERYTHING))
    assert not list(kubernetes.unmet_requirements(facts["r1"], LaunchOptions()))
    assert PLACEHOLDER in kubernetes.render(facts["r1x2"], LaunchOptions())


def as_volume(documents, template, folder):
    """Write the ConfigMap as the kubelet mounts it: files in a folder with a time in its name, and links to them."""
    [volume] = [volume for volume in template["spec"]["volumes"] if "configMap" in volume]
    assert volume["configMap"]["name"] == documents["ConfigMap"]["metadata"]["name"]
    data = {key: text.encode() for key, text in documents["ConfigMap"]["data"].items()}
    data |= {key: base64.b64decode(text) for key, text in documents["ConfigMap"].get("binaryData", {}).items()}
    stamped = folder / "..2026_11_21_10_00_00.123456789"
    for item in volume["configMap"]["items"]:
        path = stamped / item["path"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data[item["key"]])
        path.chmod(item.get("mode", 0o644))
    (folder / "..data").symlink_to(stamped.name)
    for entry in stamped.iterdir():
        (folder / entry.name).symlink_to(f"..data/{entry.name}")


def contents(folder):
    return {
        path.relative_to(folder).as_posix(): (path.read_bytes(), bool(path.stat().st_mode & stat.S_IXUSR))
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.mark.slow
def test_the_manifest_is_the_same_each_time_and_the_config_map_named_by_its_content(launchable, facts, tmp_path):
    text = kubernetes.render(facts["r1"], LaunchOptions(name="r1"))
    shutil.copytree(launchable / "r1", tmp_path / "one")
    (tmp_path / "one/tensorrt_llm/1/__pycache__").mkdir(exist_ok=True)
    (tmp_path / "one/tensorrt_llm/1/__pycache__/model.pyc").write_bytes(b"\0")
    (tmp_path / "one/.git").mkdir()
    (tmp_path / "one/.git/config").write_text("secret")
    elsewhere = dataclasses.replace(facts["r1"], folder=tmp_path / "one")
    assert kubernetes.render(elsewhere, LaunchOptions(name="r1")) == text
    name = load(text)["ConfigMap"]["metadata"]["name"]
    files = write_documents(text, tmp_path / "out")
    assert load("---\n".join((tmp_path / "out" / file).read_text() for file in files)) == load(text)
    assert files[-1] == f"configmap-{name}.yaml"
    first = (tmp_path / "out" / files[0]).stat()
    assert write_documents(text, tmp_path / "out") == files
    assert not os.path.samestat(first, (tmp_path / "out" / files[0]).stat())  # written whole, and put in its place
    (tmp_path / "out/notes").touch()
    with pytest.raises(ToolError, match="got notes"):
        write_documents(text, tmp_path / "out")
    with (tmp_path / "one/start.sh").open("a") as script:
        script.write("# changed\n")
    text = kubernetes.render(elsewhere, LaunchOptions(name="r1"))
    assert load(text)["ConfigMap"]["metadata"]["name"] != name
    (tmp_path / "out/notes").unlink()
    assert {*write_documents(text, tmp_path / "out")} == {*os.listdir(tmp_path / "out")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("content")


CONTENTS = st.one_of(
    st.binary(max_size=40),
    st.text(max_size=40).map(lambda text: text.encode("utf-8", "surrogatepass")),
    st.text(" \ta\n#:-'\"|>%@&*!{}[]｜▁é😀", max_size=40).map(str.encode),
    st.text("ab\n ", max_size=10).map(lambda text: f"{text}\n".encode()),
)


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(content=CONTENTS)
def test_every_content_arrives_as_it_was(folder, content):
    (folder / "file").write_bytes(content)
    document = yaml.safe_load("\n".join(data_lines(repository_files(folder))) + "\n")
    [(section, entries)] = document.items()
    if section == "data":
        assert entries["file"].encode() == content
    else:
        assert base64.b64decode(entries["file"]) == content


def test_keys_are_allowed_and_differ(tmp_path):
    paths = ["a/b.py", "a.b.py", "a_b/ü.py", "a_b/ö.py", "x" * 200 + "/" + "y" * 200]
    for path in paths:
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(path)
    files = repository_files(tmp_path)
    assert {file.path for file in files} == set(paths)
    assert len({file.key for file in files if re.fullmatch(r"[-._a-zA-Z0-9]{1,253}", file.key)}) == len(paths)


def test_what_no_config_map_takes_is_refused(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * (MAX_BYTES - 1))
    (tmp_path / "b").write_bytes(b"x")
    assert len(repository_files(tmp_path)) == 2
    (tmp_path / "c").write_bytes(b"x")
    with pytest.raises(RepositoryError, match="--repository-claim"):
        repository_files(tmp_path)
    (tmp_path / "c").unlink()
    (tmp_path / "gone.py").symlink_to("nowhere")  # left out, it would be missing in the pods
    with pytest.raises(RepositoryError, match=r"gone\.py: can't be read: No such file"):
        repository_files(tmp_path)


def expanded(text):
    """Return an argument or value as Kubernetes expands it when no such variable exists."""
    return text.replace("$$", "$")


def scripts(documents):
    found = {}
    for name, template in zip(("server", "worker"), templates(documents), strict=False):
        found[name] = container(template)["args"][0]
        stop = container(template)["lifecycle"]["preStop"]["exec"]["command"]
        if stop[0] == "bash":
            found[f"{name} stop"] = stop[-1]
    return found


@pytest.fixture
def pod(tmp_path, rendered):
    """Runs a script of a pod, with the pod's paths moved below tmp_path."""
    documents = rendered("r1x2", EVERYTHING)
    mounted = tmp_path / "etc/deepseek-triton"
    for folder in ("repository", "ssh", "../../model_repository", "../../home", "../../bin"):
        (mounted / folder).mkdir(parents=True)
    (mounted / "ssh/id_ed25519").write_text("PRIVATE\n")
    (mounted / "ssh/id_ed25519.pub").write_text("ssh-ed25519 AAAA r1\n")
    as_volume(documents, templates(documents)[0], mounted / "repository")

    def run(script, *args, **variables):
        script = script.replace("/etc/deepseek-triton", str(mounted))
        script = script.replace("/model_repository", str(tmp_path / "model_repository"))
        path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
        environ = {"PATH": path, "HOME": str(tmp_path / "home"), "SSH_PORT": "2222", **variables}
        return subprocess.run(["bash", "-c", script, *args], env=environ, capture_output=True, text=True, timeout=60)

    def program(name, text):
        path = tmp_path / "bin" / name
        path.write_text(f"#!/usr/bin/env bash\n{text}\n")
        path.chmod(0o755)

    run.program, run.scripts, run.folder = program, scripts(documents), tmp_path
    program("sleep", "")
    return run


START = 'printf "%s|" "$HOSTS" "$SSH_PORT" "$@" > "$(dirname "$0")/started"'
"""It stands in for start.sh."""


def with_start(script, folder):
    """Let the script copy only the recording start.sh. Another test checks the copy itself."""
    start = folder / "start.sh"
    start.write_text(START)
    return re.sub(r"^cp -rL (\S+) (\S+)/$", rf"cp {start} \2/start.sh", script, flags=re.MULTILINE)


@pytest.mark.slow
def test_the_repository_arrives_as_plain_files(pod, launchable):
    copying = [line for line in pod.scripts["server"].splitlines() if line.startswith("cp -rL ")]
    assert len(copying) == 1
    for _ in range(2):  # a restarted container finds the first copy
        copied = pod(copying[0])
        assert (copied.returncode, copied.stderr) == (0, "")
        found = pod.folder / "model_repository"
        assert contents(found) == contents(launchable / "r1x2")
        assert not any(path.is_symlink() for path in found.rglob("*"))
        assert sorted(path.name for path in found.iterdir()) == ["start.sh", "tensorrt_llm"]


@pytest.mark.slow
def test_the_leader_waits_for_all_and_tells_start_sh_where_they_are(pod):
    asked = pod.folder / "asked"
    pod.program("getent", 'echo "getent $2" >> ' + str(asked))
    # The first worker accepts ssh at once, the second worker at the second try.
    again = f'(($(grep -c "^r1-1-2" {asked}) > 1))'
    pod.program("ssh", f'echo "$*" >> {asked}; [[ $1 != r1-1-2* ]] || {again} || {{ echo refused >&2; exit 255; }}')
    script = with_start(pod.scripts["server"], pod.folder)
    ran = pod(script, "launch", "--log-verbose", LWS_LEADER_ADDRESS="r1-1.r1.models", LWS_GROUP_SIZE="3")
    assert ran.returncode == 0, ran.stderr
    hosts = ["r1-1.r1.models", "r1-1-1.r1.models", "r1-1-2.r1.models"]
    assert (pod.folder / "model_repository/started").read_text() == f"{','.join(hosts)}|2222|--log-verbose|"
    tries = [f"{hosts[1]} true", f"{hosts[2]} true", f"{hosts[2]} true"]
    assert asked.read_text().splitlines() == [f"getent {hosts[0]}", *tries]
    assert "waiting for r1-1-2.r1.models" in ran.stderr
    ssh = pod.folder / "home/.ssh"
    assert stat.S_IMODE(ssh.stat().st_mode) == 0o700
    assert stat.S_IMODE((ssh / "id_ed25519").stat().st_mode) == 0o600
    assert (ssh / "known_hosts").read_text() == "* ssh-ed25519 AAAA\n"
    assert "Port 2222" in (ssh / "config").read_text().splitlines()


@pytest.mark.slow
def test_the_leader_names_who_is_missing(pod):
    pod.program("getent", "")
    pod.program("ssh", 'case $1 in *-2.*) printf "@@@\\r\\nssh: no route to $1\\r\\n" >&2; exit 255 ;; esac')
    script = with_start(pod.scripts["server"], pod.folder)
    assert script.count("SECONDS >= 1800") == 1
    script = script.replace("SECONDS >= 1800", "1")
    ran = pod(script, LWS_LEADER_ADDRESS="r1-0.r1.models", LWS_GROUP_SIZE="4")
    assert ran.returncode == 4
    [line] = ran.stderr.splitlines()
    assert "not there after 1800 s: r1-0-2.r1.models (ssh: no route to r1-0-2.r1.models)" in line
    assert not (pod.folder / "model_repository/started").exists()
    pod.program("getent", "exit 2")
    pod.program("ssh", "")
    ran = pod(script, LWS_LEADER_ADDRESS="r1-0.r1.models", LWS_GROUP_SIZE="2")
    assert (ran.returncode, "r1-0.r1.models (no such name)" in ran.stderr) == (4, True)


@pytest.mark.slow
def test_a_worker_that_ends_waits_for_mpirun_s_daemon(pod):
    script = pod.scripts["worker stop"]
    proc = pod.folder / "proc/17"
    proc.mkdir(parents=True)
    # The daemon is gone at the third wait. Another process is there all the time.
    pod.program("sleep", f"echo . >> {pod.folder}/waits; (( $(wc -l < {pod.folder}/waits) < 3 )) || rm -r {proc}")
    (pod.folder / "proc/1").mkdir()
    (pod.folder / "proc/1/comm").write_text("sshd\n")
    for daemon in ("orted", "prted"):
        proc.mkdir(exist_ok=True)
        (proc / "comm").write_text(f"{daemon}\n")
        ran = pod(script.replace("/proc/", f"{pod.folder}/proc/"))
        assert (ran.returncode, ran.stderr) == (0, "")
        assert len((pod.folder / "waits").read_text().splitlines()) == 3
        (pod.folder / "waits").unlink()
    pod.program("sleep", "exit 1")  # without ranks it ends at once
    assert pod(script.replace("/proc/", f"{pod.folder}/none/")).returncode == 0


POD = """\
set -euo pipefail
for folder in /root "$1/model_repository"; do mount -t tmpfs tmpfs "$folder"; done
exec bash "$1/$2.sh" --log-verbose
"""
"""The pod gets its own copies of the folders that it writes to."""
MPIRUN = """\
IFS=, read -ra hosts <<< "$HOSTS"
echo "start.sh $*"
mpirun --allow-run-as-root --bind-to none -H "${hosts[0]}:1,${hosts[1]}:1" -mca plm_rsh_args "-p $SSH_PORT" -n 2 \\
  bash -c 'echo "rank $OMPI_COMM_WORLD_RANK on $HOSTNAME: ${ONLY_HERE:-nothing}"'
"""


@pytest.fixture
def nodes(tmp_path):
    """Two hosts, which are named like the pods of a group."""
    needed = ("unshare", "nsenter", "ip", "ss", "ssh", "ssh-keygen", "mpirun")
    if missing := [name for name in needed if not shutil.which(name)] or not os.path.exists("/usr/sbin/sshd"):
        pytest.skip(f"needs {missing}: tests/live/install_launchers.sh installs it")
    try:
        with two_hosts(tmp_path / "hosts") as hosts:
            names = [f"{host.address} {name}.r1.models\n" for host, name in zip(hosts, ("r1-0", "r1-0-1"), strict=True)]
            with (tmp_path / "hosts/etc/hosts").open("a") as known:
                known.writelines(names)
            yield hosts
    except HostsError as error:
        pytest.skip(str(error))


@pytest.mark.nightly
def test_mpirun_of_the_leader_reaches_a_worker_and_finds_its_environment(pod, nodes, rendered, tmp_path):
    """Its sample are the tests above, in which ssh is recorded."""
    keys = pod.folder / "etc/deepseek-triton/ssh"
    for key in keys.iterdir():
        key.unlink()
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", keys / "id_ed25519"], check=True)
    for name in ("server", "worker"):
        script = with_start(pod.scripts[name], pod.folder).replace("SECONDS >= 1800", "SECONDS >= 30")
        for path in ("/model_repository", "/etc/deepseek-triton"):
            script = script.replace(path, f"{pod.folder}{path}")
        (pod.folder / f"{name}.sh").write_text(script)
    (pod.folder / "start.sh").write_text(MPIRUN)
    given = {"PATH": os.environ["PATH"], "HOME": "/root", "LWS_LEADER_ADDRESS": "r1-0.r1.models", "LWS_GROUP_SIZE": "2"}
    server, worker = (environment(template) for template in templates(rendered("r1x2", LaunchOptions(ssh_port=2345))))
    in_pod = ("unshare", "--mount", "bash", "-c", POD, "pod", str(pod.folder))
    running = nodes[1].start(*in_pod, "worker", log=tmp_path / "log", env=given | worker | {"ONLY_HERE": 'a "pod"'})
    try:
        ran = nodes[0].run(*in_pod, "server", env=given | server)
    finally:
        running.end()
    assert ran.returncode == 0, ran.stderr + running.output()
    assert ran.stdout.splitlines()[0] == "start.sh --log-verbose"
    assert sorted(ran.stdout.splitlines()[1:]) == ["rank 0 on node1: nothing", 'rank 1 on node2: a "pod"']


@pytest.mark.slow
def test_the_command_does_not_submit_what_has_no_ssh_server(launchable, tmp_path, monkeypatch):
    kubectl = recording(tmp_path / "bin", "kubectl", reads=True)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    command = ["launch", "kubernetes", str(launchable / "r1x2"), "--name", "r1", "--rate", "2GB", "--submit"]
    refused = run_command(*command)
    assert (refused.returncode, "--image" in refused.stderr, kubectl.calls) == (1, True, [])
    assert run_command(*command, "--image", "registry.example.com/r1:2").returncode == 0
    [call] = kubectl.calls
    assert call["args"][:2] == ["apply", "--server-side"]
    documents = load(call["stdin"])
    assert documents["LeaderWorkerSet"]["metadata"]["name"] == "r1"
    assert seconds(documents)["ready_within"] < 3600


@pytest.mark.slow
def test_the_rights_of_a_server(rendered):
    """Pods with an ssh server have more of them."""
    [small], [large] = templates(rendered("twin", LaunchOptions(image="i"))), templates(rendered("r1"))
    [asked] = templates(rendered("r1", LaunchOptions(repository_claim="r", environment=(("HOME", "/kernels"),))))
    assert environment(asked)["HOME"] == "/kernels"
    assert "TRITON_CACHE_DIR" not in environment(asked)
    kept = ["IPC_LOCK", "DAC_OVERRIDE"]
    common = {"allowPrivilegeEscalation": False, "seccompProfile": {"type": "RuntimeDefault"}}
    closed = {**common, "readOnlyRootFilesystem": True}
    nobody = {"runAsNonRoot": True, "runAsUser": 65534, "capabilities": {"drop": ["ALL"]}}
    assert container(small)["securityContext"] == {**closed, **nobody}
    assert container(large)["securityContext"] == {**closed, "capabilities": {"drop": ["ALL"], "add": kept}}
    for template in (small, large):
        assert {"name": "tmp", "mountPath": "/tmp"} in container(template)["volumeMounts"]
        assert {"name": "tmp", "emptyDir": {}} in template["spec"]["volumes"]
        assert environment(template)["HOME"] == "/tmp"
        assert template["spec"]["automountServiceAccountToken"] is False
    assert "nvidia.com/gpu" not in container(small)["resources"]["limits"]
    assert "tolerations" not in small["spec"]
    more = {"drop": ["ALL"], "add": [*kept, "SETUID", "SETGID", "SYS_CHROOT"]}
    for template in templates(rendered("r1x2")):
        assert {**common, "capabilities": more}.items() <= container(template)["securityContext"].items()
