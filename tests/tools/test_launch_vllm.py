"""`launch` of repositories for vLLM: every form, on one node and on two."""

import os
import re
import shlex
import socket
import subprocess

import pytest

from deepseek_triton_build import format_files, write_repository
from support import manifests
from support.commands import run_command
from support.documents import snippets
from support.supervising import free_ports
from support.vllm_plans import planned, two_nodes
from support.waiting import PATIENCE_S

IMAGE = "registry.example.com/tritonserver:vllm"
WITH_IMAGE = ("--image", IMAGE)
ADDRESS = "10.0.0.1"


@pytest.fixture(scope="module")
def built(plain_folder):
    plans = {"one": planned(), "two": two_nodes(), "newest": planned("0.33.0")}
    for name, plan in plans.items():
        write_repository(format_files("triton", plan, version="1"), plain_folder / name)
    return plain_folder


@pytest.fixture
def launch(built):
    """Returns a function that prints a form of a repository, or the refusal, without the path of the repository."""

    def run(form, name, *options, code=0):
        dry = ["--dry-run"] if form in ("docker", "local") else []
        done = run_command("launch", *form.split(), str(built / name), *dry, *options)
        assert done.returncode == code, done.stderr
        assert "@@" not in done.stdout
        return (done.stderr if code else done.stdout).replace(str(built / name), name)

    return run


def one_line(script):
    return " ".join(script.replace("\\\n", " ").split())


@pytest.mark.slow
def test_every_form_on_one_node(launch):
    script = launch("docker", "one", *WITH_IMAGE)
    lines = {line.strip() for line in script.splitlines()}
    assert {"--gpus all", f"--shm-size {9 * 2**30}", "--network host", IMAGE} <= lines
    assert "mpirun" not in script
    assert "VLLM_CACHE_ROOT=" in script
    script = launch("local", "one")
    assert "#     tritonserver \\" in script
    assert "mpirun" not in script
    script = launch("slurm", "one", "--no-container")
    parts = ("#SBATCH --ntasks-per-node=1", "#SBATCH --gpus-per-node=8", "exec one/start.sh")
    assert [part for part in parts if part not in script] == []
    assert "MASTER_ADDR" not in script
    [container] = pods(launch("kubernetes", "one", *WITH_IMAGE))["server"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 8


@pytest.mark.slow
def test_without_a_container_they_say_how_to_make_one(launch):
    [lines] = [each.text.splitlines() for each in snippets("text", page="docs/launch.md") if "FROM" in each.text]
    for form in ("docker", "slurm", "kubernetes"):
        assert [line for line in lines if line not in launch(form, "newest", code=2)] == []
    assert "a recipe is for TensorRT-LLM" in launch("recipe image", "one", code=2)


@pytest.mark.slow
def test_a_form_for_one_node_says_what_to_run_on_each(launch):
    for form, options in (("docker", WITH_IMAGE), ("local", ()), ("mpirun", ())):
        said = launch(form, "two", *options, code=2)
        each = "local" if form == "local" else "docker"
        for number in (0, 1):
            assert f"deepseek-triton launch {each} two --env NODE_RANK={number} --env MASTER_ADDR=ADDRESS" in said
    for number in (0, 1):
        node = ["--env", f"NODE_RANK={number}", "--env", f"MASTER_ADDR={ADDRESS}"]
        text = one_line(launch("docker", "two", *WITH_IMAGE, *node))
        assert f"--env NODE_RANK={number} --env MASTER_ADDR={ADDRESS}" in text
        text = launch("local", "two", *node)
        assert ("vllm serve" if number else "tritonserver") in text
        assert ("--headless" in text) == bool(number)


def test_slurm_starts_one_process_a_node_below_one_supervisor(launch):
    script = launch("slurm", "two", "--no-container", "--http-port", "9000")
    command = shlex.split(one_line(script[script.index("exec python3") :]))
    assert {"#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=1", "#SBATCH --gpus-per-node=8"} <= set(script.splitlines())
    assert command[command.index("--ranks") + 1 : command.index("--ranks") + 4] == ["2", "--ranks-per-node", "1"]
    assert {"--ntasks=2", "--wait=10", "--kill-on-bad-exit=1"} <= set(command)
    assert (
        script.index("hosts=") < script.index('MASTER_ADDR="${hosts%%,*}"\nexport MASTER_ADDR') < script.index("exec ")
    )


def pods(text):
    """Return the specs of the pods: of the server, or of leader and worker."""
    found = {kind: document.get("spec") for (kind, _), document in manifests.objects(text).items()}
    if "Deployment" in found:
        return {"server": found["Deployment"]["template"]["spec"]}
    specs = (template["spec"] for template in manifests.templates(found["LeaderWorkerSet"]))
    return dict(zip(("leader", "worker"), specs, strict=True))


@pytest.mark.slow
def test_the_pods_of_a_group_start_alike_and_need_no_ssh(launch):
    text = launch("kubernetes", "two", *WITH_IMAGE, "--interface", "eth0")
    specs = pods(text)
    assert "secret:" not in text
    manifests.validate(manifests.objects(text))
    for spec in specs.values():
        [container] = spec["containers"]
        assert "ssh" not in str(spec)
        assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
        assert {"name": "INTERFACE", "value": "eth0"} in container["env"]
    scripts = {name: spec["containers"][0]["args"][0] for name, spec in specs.items()}
    assert scripts["leader"] == scripts["worker"]
    assert "startupProbe" in specs["leader"]["containers"][0]
    assert "startupProbe" not in specs["worker"]["containers"][0]


def test_the_script_of_a_pod_starts_its_node(launch, built):
    spec = pods(launch("kubernetes", "two", *WITH_IMAGE, "--repository-claim", "claim"))["leader"]
    script = spec["containers"][0]["args"][0].replace("/model_repository", str(built / "two"))
    for index, said in {"0": "tritonserver", "1": "--headless"}.items():
        environ = {"PATH": os.environ["PATH"], "DRY_RUN": "1", "LWS_WORKER_INDEX": index, "LWS_LEADER_ADDRESS": ADDRESS}
        done = subprocess.run(["bash", "-c", script], env=environ, capture_output=True, text=True, check=True)
        assert said in done.stdout
        assert f"MASTER_ADDR={ADDRESS}" in done.stdout


@pytest.mark.slow
def test_a_worker_pod_stays_while_the_leader_listens(launch):
    """The preStop script ends at once where nothing listens on the leader's port."""
    [port] = free_ports(1)
    spec = pods(launch("kubernetes", "two", *WITH_IMAGE, "--http-port", str(port)))["worker"]
    command = spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    environment = {"PATH": os.environ["PATH"], "LWS_LEADER_ADDRESS": "127.0.0.1"}
    assert re.search(rf"/dev/tcp/\$LWS_LEADER_ADDRESS/{port}\b", command[2])
    subprocess.run(command, env=environment, check=True, timeout=30)
    with socket.create_server(("127.0.0.1", port)) as server:
        waiting = subprocess.Popen(command, env=environment)
        for _ in range(2):  # it asks again
            server.accept()[0].close()
    assert waiting.wait(PATIENCE_S) == 0
