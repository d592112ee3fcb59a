"""`launch kubernetes` and `launch slurm` for a pair of context and generation servers."""

import os
import shlex
import shutil
import subprocess

import pytest

from deepseek_triton_tools.cli.gateway import settings_of
from deepseek_triton_tools.cli.main import program_parser
from deepseek_triton_tools.gateway.settings import ModelSettings
from support import manifests
from support.commands import run_command
from support.manifests import container, templates
from support.recording import recording

WORKER_INDEX = "leaderworkerset.sigs.k8s.io/worker-index"


@pytest.fixture
def tmp_path(plain_path):
    return plain_path


@pytest.fixture
def pair(launchable, tmp_path):
    """Make a pair's folder of two servers."""

    def make(context, generation, name="pair"):
        for side, server in (("context", context), ("generation", generation)):
            if server is not None:
                shutil.copytree(launchable / server, tmp_path / name / side)
        return tmp_path / name

    return make


def launched(*words):
    """The words after `launch` -> exit code, output and errors."""
    done = run_command("launch", *map(str, words))
    return done.returncode, done.stdout, done.stderr


def objects(*words):
    code, out, err = launched("kubernetes", *words)
    assert code == 0, err
    return manifests.objects(out)


def roles_of(found):
    [disaggregated] = [document for (kind, _), document in found.items() if kind == "DisaggregatedSet"]
    return {role["name"]: role["spec"] for role in disaggregated["spec"]["roles"]}


EVERYTHING = [
    *("--name", "r1", "--namespace", "models", "--image", "registry.example.com/r1:2", "--env", "NCCL_DEBUG=INFO"),
    *("--cache-dir", "/var/cache/kernels", "--host-network", "--rdma", "rdma/hca=8", "--scrape"),
    *("--gateway-image", "gateway:1", "--gateway-keys", "keys", "--pull-secret", "registry"),
    *("--context-servers", "2", "--generation-servers", "3", "--http-port", "8100", "--metrics-port", "8102"),
]


@pytest.mark.slow
def test_every_object_of_a_pair_is_valid(pair, subtests):
    simple = ["--image", "here"]
    cases = {("one", "one"): simple, ("two", "two"): EVERYTHING, ("one", "two"): EVERYTHING, ("twin", "twin"): simple}
    for sides, options in cases.items():
        with subtests.test("-".join(sides)):
            found = objects(pair(*sides, name="-".join(sides)), *options)
            manifests.validate(found, *manifests.VERSIONS)
            assert list(roles_of(found)) == ["context", "generation"]


@pytest.mark.slow
def test_each_side_has_its_own_size_number_and_keys(pair):
    _, text, _ = launched("kubernetes", pair("one", "two"), "--generation-servers", "3")
    roles = roles_of(manifests.objects(text))
    context, generation = (roles[side]["leaderWorkerTemplate"] for side in ("context", "generation"))
    assert (roles["context"]["replicas"], roles["generation"]["replicas"]) == (1, 3)
    assert (context["size"], generation["size"]) == (1, 2)
    # A container that ends is restarted by the kubelet, but a rank can't join the others again.
    assert (context["restartPolicy"], generation["restartPolicy"]) == ("None", "RecreateGroupOnPodRestart")
    assert [len(templates(role)) for role in roles.values()] == [1, 2]
    assert ("pair-context-ssh" in text, "pair-generation-ssh" in text) == (False, True)


@pytest.mark.slow
def test_a_built_pair_has_the_numbers_that_it_was_planned_for(tmp_path):
    counts = ("--context-servers", "2", "--generation-servers", "3")
    plan = ("deepseek-r1", "--gpu", "h200", "--model", "/models/R1", "--profile", "disagg", *counts)
    assert run_command("build", *plan, "--output", str(tmp_path / "built")).returncode == 0
    for options, generation in (((), 3), (("--generation-servers", "1"), 1)):
        roles = roles_of(objects(tmp_path / "built", *options))
        assert {name: role["replicas"] for name, role in roles.items()} == {"context": 2, "generation": generation}
    assert "#SBATCH --nodes=5\n" in launched("slurm", tmp_path / "built")[1]


@pytest.mark.slow
def test_each_service_and_budget_finds_its_own_side_only(pair):
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


@pytest.mark.slow
def test_the_gateway_asks_both_sides(pair, tmp_path):
    found = objects(pair("one", "one"), *EVERYTHING)
    command = container(found["Deployment", "r1-gateway"]["spec"]["template"])["command"]
    (tmp_path / "keys").write_text("# nobody")
    words = [word.replace("/etc/deepseek-triton/keys", str(tmp_path)) for word in command]
    [model] = settings_of(program_parser(["gateway"]).parse_args(words[1:])).models
    generation, context = ("dns+http://r1-generation:8100#metrics=8102",), ("dns+http://r1-context:8100#metrics=8102",)
    assert model == ModelSettings(generation, "", "tensorrt_llm", context)
    for side in ("context", "generation"):
        service = found["Service", f"r1-{side}"]["spec"]
        assert (service["clusterIP"], service["ports"][0]["port"]) == ("None", 8100)


@pytest.mark.slow
def test_a_claim_has_the_whole_folder(pair):
    found = objects(pair("one", "one"), "--repository-claim", "pairs")
    assert not [name for kind, name in found if kind == "ConfigMap"]
    for side, role in roles_of(found).items():
        mounts = container(templates(role)[0])["volumeMounts"]
        [mount] = [mount for mount in mounts if mount["name"] == "repository"]
        assert mount == {"name": "repository", "mountPath": "/model_repository", "readOnly": True, "subPath": side}


@pytest.fixture
def run(tmp_path):
    """Runs a script as the first of some nodes would; returns how it ended, and the calls of srun."""
    programs = tmp_path / "bin"
    srun = recording(programs, "srun")

    def run(text, hosts):
        if hosts:
            recording(programs, "scontrol", after=f"print({chr(10).join(hosts)!r})")
        environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "nodes"}
        environment |= {f"SLURM_JOB_NODELIST_HET_GROUP_{n}": f"nodes{n}" for n in range(2)}
        done = subprocess.run(["bash", "-c", text], env=environment, capture_output=True, text=True)
        return done, srun.calls

    return run


@pytest.mark.slow
def test_every_server_gets_nodes_of_its_own(pair, run):
    folder = pair("one", "two")
    counts = ("--context-servers", "2", "--generation-servers", "2", "--http-port", "8100")
    _, text, _ = launched("slurm", folder, "--no-container", *counts, "--", "--log-verbose", "1")
    done, calls = run(text, [f"node{n}" for n in range(1, 7)])
    assert "#SBATCH --nodes=6\n" in text
    assert (done.returncode, done.stderr) == (0, "")
    started = {}
    for words in (call["args"] for call in calls if "run" in call["args"]):
        given = dict(word.split("=", 1) for word in words if "=" in word)
        [side] = [word.split("/")[-4] for word in words if word.endswith("supervise.py")]
        at = words.index("--hosts")
        nodes = words[at + 1]
        assert words[at + 2] == "--"
        assert f"--nodelist={nodes}" in words[at:]
        assert words[-3:] == [str(folder / side / "start.sh"), "--log-verbose", "1"]
        assert {f"--ntasks={8 * len(nodes.split(','))}", "--ntasks-per-node=8"} < set(words[at:])
        assert words[:2] == ["--overlap", f"--nodelist={nodes.split(',')[0]}"]
        assert len(given["DEEPSEEK_TRITON_LAUNCH"]) == 8
        started[given["DEEPSEEK_TRITON_LAUNCH"]] = side, nodes
    each = {"context": ["node1", "node2"], "generation": ["node3,node4", "node5,node6"]}
    assert sorted(started.values()) == [(side, nodes) for side, lists in each.items() for nodes in lists]
    stopped = {words[-1]: words[1] for words in (call["args"] for call in calls) if words[-2] == "stop"}
    assert stopped == {tag: f"--nodelist={nodes.split(',')[0]}" for tag, (_, nodes) in started.items()}
    sources = [("--context-server", 1), ("--context-server", 2), ("--server", 3), ("--server", 5)]
    gateway = " ".join(f"{option} http://node{number}:8100" for option, number in sources)
    assert f"launch: for clients start deepseek-triton gateway --triton-model tensorrt_llm {gateway}\n" in done.stdout


@pytest.mark.slow
def test_sides_with_different_gpus_are_components_of_a_heterogeneous_job(pair, run, tmp_path):
    counts = ("--context-servers", "2", "--partition", "gpu", "--cache-dir", tmp_path / "kept")
    _, text, _ = launched("slurm", pair("half", "whole"), *counts)
    recording(tmp_path / "bin", "scontrol", after="print({'nodes0': 'a\\nb', 'nodes1': 'c'}[sys.argv[3]])")
    components = text.split("#SBATCH hetjob\n")
    done, calls = run(text, None)
    assert (done.returncode, done.stderr) == (0, "")
    for component, nodes, gpus in zip(components, (2, 1), (4, 8), strict=True):
        lines = component.splitlines()
        assert {f"#SBATCH --nodes={nodes}", f"#SBATCH --gpus-per-node={gpus}", "#SBATCH --partition=gpu"} < set(lines)
        assert f"#SBATCH --ntasks-per-node={gpus}" in lines
    asked = [["--het-group=0", "--gpus-per-node=4"], ["--het-group=1", "--gpus-per-node=8"]]
    for words in (call["args"] for call in calls):
        where = [word for word in words if word.startswith(("--het-group", "--gpus-per-node"))]
        nodes = [word for word in words if word.startswith("--nodelist=")]
        if nodes:
            assert where == asked["--nodelist=c" in nodes] * len(nodes)
        else:
            assert where in asked
    assert "--context-server http://a:8000 --context-server http://b:8000 --server http://c:8000\n" in done.stdout


@pytest.mark.slow
def test_too_few_nodes_are_named_before_anything_starts(pair, run):
    _, text, _ = launched("slurm", pair("one", "two"), "--no-container")
    done, calls = run(text, ["node1", "node2"])
    assert (done.returncode, calls) == (2, [])
    assert done.stderr == "launch: expected 3 nodes, got 2: let sbatch take --nodes from this script\n"


@pytest.mark.slow
def test_containers_of_both_sides_mount_their_own_repository(pair, run, tmp_path):
    folder = pair("one", "one")
    _, text, _ = launched("slurm", folder, "--cache-dir", tmp_path / "kept")
    done, [prepared, *calls] = run(text, ["node1", "node2"])
    assert done.returncode == 0, done.stderr
    assert prepared["args"][:6] == ["--nodes=2", "--ntasks-per-node=1", "--ntasks=2", "mkdir", "-p", "--"]
    mounts = [word for call in calls for word in call["args"] if word.startswith("--container-mounts=")]
    expected = [f"--container-mounts={folder}/{side}" for side in ("context", "generation")]
    assert sorted(word.split(":")[0] for word in mounts) == expected


@pytest.mark.slow
def test_a_server_of_one_rank_runs_its_own_supervisor(pair, run):
    folder = pair("twin", "twin")
    _, text, _ = launched("slurm", folder, "--no-container")
    done, calls = run(text, ["node1", "node2"])
    assert done.returncode == 0, done.stderr
    started = {call["args"][-1]: call["args"][0] for call in calls if call["args"][-2] != "stop"}
    nodes = {"context": "node1", "generation": "node2"}
    assert started == {f"{folder}/{side}/start.sh": f"--nodelist={node}" for side, node in nodes.items()}
    assert "gpus" not in "".join(line for line in text.splitlines() if line.startswith("#SBATCH"))


@pytest.mark.slow
def test_sides_that_do_not_fit_are_refused(pair):
    half = "is half of a pair: expected context/ and generation/ in it, and generation/start.sh is missing"
    cases = [
        (("one", None), half),
        ((None, "one"), "context/start.sh is missing"),
        (("one", "older"), "context/ and generation/ are for different releases, "),
        (("one", "other"), "for different variants, deepseek-r1 and deepseek-v3; "),
        (("one", "other"), "for different checkpoints, /models/R1 and /models/V3: write both sides anew"),
        (("twin", "one"), "for different engines, simulated and tensorrt_llm"),
    ]
    for number, (sides, expected) in enumerate(cases):
        folder = pair(*sides, name=f"pair{number}")
        for form in ("kubernetes", "slurm"):
            code, out, err = launched(form, folder)
            [line] = err.splitlines()
            assert (code, out, expected in line) == (1, "", True), line


@pytest.mark.slow
def test_swapped_sides_are_refused(pair):
    folder = pair("one", "one")
    for side, profile in (("context", "gen"), ("generation", "ctx")):
        stamp = folder / side / "tensorrt_llm/deepseek-triton.json"
        stamp.write_text(stamp.read_text().replace('"profile": "balanced"', f'"profile": "{profile}"'))
    code, _, err = launched("kubernetes", folder)
    assert (code, "context/ holds a generation server" in err, "generation/ holds a context" in err) == (1, True, True)


INSTEAD = "a pair has --context-servers and --generation-servers instead"
AT_MOST = "a pair takes --routing gateway at most"
WRONG_OPTIONS = [
    ("slurm", "--ready-file /r", "--ready-file: a pair has several servers"),
    ("slurm", "--address 127.0.0.1", "--address: the servers are on several nodes"),
    ("slurm", "--gpus 4", "takes 8 GPUs of each node, got 4"),
    ("slurm", "--context-servers 1000", "--context-servers: expected at most 999"),
    ("slurm", "-- --http-port=1", "expected HTTP_PORT to be set"),
    ("kubernetes", "--replicas 2", INSTEAD),
    ("kubernetes", "--max-replicas 2", INSTEAD),
    ("kubernetes", "--target 4", INSTEAD),
    ("kubernetes", f"--name {'a' * 27}", "--name: expected up to 26 small letters"),
    ("kubernetes", "--generation-servers 0", "--generation-servers"),
    ("kubernetes", "--context-servers 1000", "--context-servers: expected at most 999"),
    ("kubernetes", "--routing epp --route-parent a --picker-image p", AT_MOST),
    ("kubernetes", "--picker-image p", AT_MOST),
    ("kubernetes", "--autoscale keda", AT_MOST),
    ("kubernetes", "--routing gateway", "--routing gateway: name with --gateway-image"),
    ("kubernetes", "-- --http-port=1", "expected HTTP_PORT to be set"),
]


@pytest.mark.slow
def test_options_that_a_pair_does_not_take(pair, launchable):
    folder = pair("one", "one")
    for form, options, expected in WRONG_OPTIONS:
        code, out, err = launched(form, folder, *options.split())
        assert (code, out, expected in err, err.count("expected") <= 1) == (2, "", True, True), options
    code, _, err = launched("kubernetes", launchable / "one", "--context-servers", "2")
    assert (code, "--context-servers and --generation-servers" in err) == (2, True)
    for form in ("local", "docker", "mpirun"):
        code, _, err = launched(form, folder)
        assert (code, "is a pair, which launch slurm and launch kubernetes start" in err) == (1, True)


@pytest.mark.slow
def test_folders_of_other_formats_say_how_they_are_started(tmp_path):
    cases = {
        "dynamo": "kubectl apply -f {}/dynamo.yaml",
        "trtllm-serve --profile disagg": "run context/serve.sh and generation/serve.sh on their machines",
        "trtllm-serve": "deepseek-triton launch docker {}",
    }
    for number, (words, expected) in enumerate(cases.items()):
        folder = tmp_path / f"a {number}"
        build = ["build", "deepseek-r1", "--gpu", "h200", "--format", *words.split(), "--output", str(folder)]
        assert run_command(*build).returncode == 0
        for form in ("local", "slurm", "kubernetes"):
            code, out, err = launched(form, folder)
            said = expected.format(shlex.quote(str(folder))) in err
            assert (code, out, len(err.splitlines()), said) == (1, "", 1, True)
