"""`launch`: what is refused, what is run and what is printed, stop and list."""

import json
import os
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from deepseek_launcher.server_watch import DEFAULT_EXIT_TIMEOUT_S, PATIENCE_S
from deepseek_triton_tools.cli import launch
from deepseek_triton_tools.cli.main import main, program_parser
from deepseek_triton_tools.cli.parsing import forms_of
from deepseek_triton_tools.launching.containers import KERNELS_MOUNT
from deepseek_triton_tools.launching.launch_forms import LAUNCH_FORMS
from deepseek_triton_tools.launching.launch_settings import LaunchOptions
from deepseek_triton_tools.repository.launch_facts import facts_of
from support import manifests
from support.checked import edit
from support.commands import run_command
from support.recording import become_by, recording
from support.rights import without_rights


@pytest.fixture(autouse=True)
def _here(launchable, monkeypatch):
    monkeypatch.chdir(launchable)


def printed(*argv):
    done = run_command("launch", *argv)
    assert done.returncode == 0, done.stderr
    return done.stdout


def refusal(*argv, code=2):
    """The one line with which `launch` refuses them."""
    done = run_command("launch", *argv)
    [line] = done.stderr.splitlines()
    assert (done.returncode, done.stdout, line[:24]) == (code, "", "deepseek-triton launch: "), line
    return line


@pytest.mark.slow
def test_a_launch_that_can_not_work_is_refused(monkeypatch):
    cases = {
        "recipe wheel tiny": "a recipe is for TensorRT-LLM",
        "docker r1 --grpc-port 8000": "need a port each, got 8000, 8000, 8002",
        "local two": "takes 2 nodes: use launch mpirun, slurm or kubernetes",
        "docker two": "takes 2 nodes, and docker starts one container: use launch ssh-setup",
        "mpirun r1 --hosts a": "takes one node: use launch local or docker",
        "mpirun two": "name the 2 nodes, this one first: --hosts node1,node2",
        "docker r1 -- --http-port=1": "expected HTTP_PORT to be set",
        "stop": "launch stop takes what to stop",
        "stop --all 1a2b3c4d": "launch stop takes what to stop",
        "docker r1 --env X=\udcff --dry-run": "expected paths and values in UTF-8, got",
        "docker r1 --env DEEPSEEK_TRITON_LAUNCH=x --dry-run": "expected eight hexadecimal",
        "kubernetes r1 -- --http-port=9": "start.sh: expected HTTP_PORT to be set",
    }
    for argv, expected in cases.items():
        assert expected in refusal(*argv.split(" ")), argv
    assert "start.sh: expected a value without spaces" in refusal("kubernetes", "two", "--", "a b")
    line = refusal("docker", "two", "--grpc-port", "8000", "--gpus", "many")
    assert line.count("; ") >= 2  # all that is wrong
    for value in ("http", "9" * 5000):
        monkeypatch.setenv("HTTP_PORT", value)
        assert "HTTP_PORT: expected a number from 1 to 65535, got " in refusal("docker", "r1")
    monkeypatch.delenv("HTTP_PORT")
    monkeypatch.setenv("PATH", "/nowhere")
    assert "bash can't be run" in refusal("docker", "r1", "--dry-run", code=126)


WRONG_WORDS = {
    "slurm r1 --time 7days": "--time: expected a time limit",
    "docker": "the following arguments are required: DIR",
    "docker r1 tiny": "unrecognized arguments: tiny",
    "kubernetes r1 --output o --submit": "argument --submit: not allowed with argument --output",
    "docker r1 --submit": "--submit is an option of launch mpirun, launch slurm, launch kubernetes",
    "mpirun two --hosts a,b --host-file f": "--host-file: not allowed with argument --hosts",
    "slurm r1 --now": "--now is an option of launch stop",
    "recipe image r1 -- --x": "unrecognized arguments: --x",
    "recipe binary r1": "invalid choice: 'binary'",
    "docker r1 --env HTTP_PORT=1": "argument --env: HTTP_PORT: say it with --http-port",
    "kubernetes r1 --env HF_TOKEN=x": "argument --env: HF_TOKEN: everybody can read a command line",
    "docker r1 --env HF_HUB_CACHE=x": "argument --env: HF_HUB_CACHE: export it",
    "mpirun r1 --hosts a,b --interface=eth\u00a00": "argument --interface: expected a network interface's name",
    "kubernetes r1 --address ::1": "--address is an option of launch local, launch docker",
    "docker r1 --exit-timeout 1000000": "--exit-timeout: expected a number from 0 to 999999",
    f"kubernetes r1 --ready-within {'9' * 20}": "--ready-within: expected a number from 0 to",
    "docker r1 --image=--privileged": "argument --image: expected an image's name",
    "docker r1 --image=a\u00a0b": "argument --image: expected an image's name",
    "docker r1 --dry-run --image=26.07": "argument --image: expected an image's name",
    "docker r1 --dry-run --image=26.07-trtllm-python-py3": "argument --image: expected an image's name",
}
TAKE_A_VALUE = (
    "docker --ready-file --interface --image --name --gpus --cache-dir --network --restart",
    "mpirun --host-file",
    "slurm --partition --python",
    "kubernetes --namespace --claim --measured",
)


@pytest.mark.slow
def test_what_a_form_does_not_take_is_refused():
    cases = [(words.split(" "), expected) for words, expected in WRONG_WORDS.items()]
    cases.append((["stop", ""], "argument ID|DIR: expected a value, got nothing"))
    for form, *options in map(str.split, TAKE_A_VALUE):  # the value of a variable that is not set
        cases += [([form, "r1", "--dry-run", option, ""], f"argument {option}: expected ") for option in options]
    for words, expected in cases:
        done = run_command("launch", *words)
        assert (done.returncode, expected in done.stderr) == (2, True), words


EVERY_OPTION = {
    "docker --http-port 1 --grpc-port 2 --metrics-port 3 --exit-timeout 4 --ready-within 5 --max-restarts 6 "
    "--ready-file /f --interface i --env A=b --address ::1 --image m --name n --cache-dir /c --gpus 2 --shm-size 1KiB "
    "--ipc-host --network w --restart p --detach": LaunchOptions(
        http_port=1, grpc_port=2, metrics_port=3, exit_timeout=4, ready_within=5, max_restarts=6,
        ready_file=Path("/f"), interface="i", environment=(("A", "b"),), address="::1", image="m", name="n",
        cache_dir=Path("/c"), gpus="2", shm_size=1024, ipc_host=True, network="w", restart="p", detach=True,
    ),
    "mpirun --hosts a,b --ssh-port 7 --ssh-args=-v": LaunchOptions(hosts=("a", "b"), ssh_port=7, ssh_args="-v"),
    "slurm --partition p --account a --time 1 --job-name n --log l --slurm-mpi m --no-container --no-requeue "
    "--python y --sbatch=--q --sbatch=--r --gpus 1 --context-servers 2 --generation-servers 3": LaunchOptions(
        partition="p", account="a", time="1", name="n", log="l", slurm_mpi="m", container=False, requeue=False,
        python="y", sbatch=("--q", "--r"), gpus="1", context_servers=2, generation_servers=3,
    ),
    "kubernetes --claim c --checkpoint-on-nodes --rate 2KiB --measured /m --repository-claim r --cache-claim h "
    "--namespace n --replicas 2 --max-replicas 3 --target 4 --host-network --rdma a/b=8 --ssh-port 5 --scrape "
    "--node-selector d=e --node-selector f=g --pull-secret s --gateway-image i --gateway-replicas 6 --gateway-keys k "
    "--routing epp --route-parent o/p --picker-image q --autoscale keda --shm-size 1KiB -- --x": LaunchOptions(
        claim="c", checkpoint_on_nodes=True, rate=2048, measured=Path("/m"), repository_claim="r", cache_claim="h",
        namespace="n", replicas=2, max_replicas=3, target=4, host_network=True, rdma=("a/b", 8), ssh_port=5,
        scrape=True, node_selector=(("d", "e"), ("f", "g")), pull_secret="s", gateway_image="i", gateway_replicas=6,
        gateway_keys="k", routing="epp", route_parent=("o", "p"), picker_image="q", autoscale="keda", shm_size=1024,
        server_args=("--x",),
    ),
}  # fmt: skip


def test_every_option_reaches_the_form():
    parser = program_parser(["launch"])
    for words, options in EVERY_OPTION.items():
        form, *rest = words.split()
        assert launch._options(parser.parse_args(["launch", form, "r1", *rest])) == options


@pytest.mark.slow
def test_a_folder_of_another_kind_is_refused(launchable, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare/start.sh").write_text("")
    kinds = dict.fromkeys(("old", "cut", "unstamped", "damaged", "gone", "unreadable", "locked", "lost"), "tiny")
    for name, repository in (kinds | {"r1": "r1", "newer": "r1", "edited": "two"}).items():
        shutil.copytree(launchable / repository, name)
    Path("old/start.sh").write_text("exec tritonserver\n")
    Path("cut/start.sh").write_text(Path("cut/start.sh").read_text().partition("\nexec ")[0] + "\n")
    Path("gone/tensorrt_llm/1/model.py").unlink()
    weights = shutil.copytree(launchable / "tiny/tensorrt_llm/1/tiny", tmp_path / "weights")
    assert run_command("build", "tiny", "--model", str(weights), "--output", "weightless").returncode == 0
    (weights / "model.safetensors").unlink()
    [stamp] = Path("unstamped").glob("*/deepseek-triton.json")
    stamp.unlink()
    ("damaged" / stamp.relative_to("unstamped")).write_text("{")
    Path("unreadable/start.sh").chmod(0)
    Path("locked/tensorrt_llm").chmod(0)
    [stamp] = Path("newer").glob("*/deepseek-triton.json")
    stamp.write_text(stamp.read_text().replace('"h200"', '"h900"'))
    edit(Path("edited/tensorrt_llm/1/model.yaml"), "tensor_parallel_size: 16", "tensor_parallel_size: 8")
    edit(Path("lost/tensorrt_llm/1/model.yaml"), "  engine: reference\n", "")
    cases = {
        "nowhere": "nowhere is no folder; launch runs what deepseek-triton build writes",
        "": "the repository's name is empty",
        ".": "has no start.sh",
        **dict.fromkeys(("r1/tensorrt_llm", "r1/tensorrt_llm/1"), f"name {tmp_path}/r1"),
        "bare": "has no model's folder beside its start.sh",
        "old": "old/start.sh has no DRY_RUN",
        "cut": "cut/start.sh has no DRY_RUN or runs nothing",
        "gone": f"upgrade {tmp_path}/gone --apply",
        "unstamped": "has no whole deepseek-triton.json",
        "damaged": "has no whole deepseek-triton.json",
        "weightless": "*.safetensors",
        "unreadable": "unreadable/start.sh: can't be read: ",
        "locked": "locked/tensorrt_llm: can't be read: ",
        "lost": "write engine: reference",
        "newer": "newer: its deepseek-triton.json names no GPU",
        "n" * 5000: "is no folder",
        "edited": "model.yaml asks for 8 ranks, start.sh starts 16",
    }
    with without_rights():
        for folder, expected in cases.items():
            assert expected in refusal("slurm" if folder == "edited" else "docker", folder, code=1), folder


@pytest.mark.slow
def test_what_the_server_gets(launchable, tmp_path, monkeypatch):
    shutil.copytree(launchable / "r1", tmp_path / "edited")
    with (tmp_path / "edited/start.sh").open("ab") as script:
        script.write("# für uns\n".encode("latin-1"))
    assert "/edited/start.sh\n" in printed("docker", str(tmp_path / "edited"), "--dry-run")
    assert "--env PATH=/opt/mine" in printed("docker", "r1", "--dry-run", "--env", "PATH=/opt/mine")
    words = ["--log-verbose", "1", "--", "--with"]
    assert "/r1/start.sh --log-verbose 1 -- --with\n" in printed("docker", "r1", "--dry-run", "--", *words)
    monkeypatch.setenv("HTTP_PORT", "9000")  # a variable of start.sh is the default
    monkeypatch.setenv("EXIT_TIMEOUT", "60")
    out = printed("docker", "r1", "--dry-run", "--exit-timeout", "90")
    assert ("--env HTTP_PORT=9000" in out, "--env EXIT_TIMEOUT=90" in out) == (True, True)


@pytest.mark.slow
def test_a_program_that_is_not_here_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    cases = {
        "docker r1": "docker",
        "mpirun two --hosts a,b --submit": "mpirun",
        "slurm r1 --submit": "sbatch",
        "kubernetes r1 --submit": "kubectl",
    }
    for argv, program in cases.items():
        assert f"{program} is not on PATH: run it where it is" in refusal(*argv.split(), code=1)
    line = refusal("local", "r1", code=1)  # what the engine needs is named together
    assert "not on PATH: mpirun, trtllm-llmapi-launch, tritonserver; run it in nvcr.io/nvidia/tritonserver:" in line


def test_shared_memory_holds_the_copy_of_all_experts_that_the_load_balancer_keeps(tmp_path):
    for release in ("1.2.1", "1.0.0"):
        wide = ["deepseek-r1", "--gpu", "gb200-nvl72", "--profile", "wide-ep", "--trtllm", release]
        assert run_command("build", *wide, "--output", str(tmp_path / release)).returncode == 0
        facts = facts_of(str(tmp_path / release))
        assert round(facts.shared_memory / 2**30) == 343
        assert facts.shm_bytes == facts.shared_memory + 5 * 2**30  # four ranks of a tray, and tritonserver


def test_engrams_tables_are_shared_under_data_parallelism_and_else_pinned(tmp_path):
    for way, where in (("dp", (202758032400, 0)), ("tp", (0, 202758032400))):
        asked = ["deepseek-v4.1-flash", "--gpu", "h200", "--gpus", "8", "--vllm", "0.33.0", "--parallel", way]
        assert run_command("build", *asked, "--output", str(tmp_path / way)).returncode == 0
        facts = facts_of(str(tmp_path / way))
        assert (facts.shared_memory, facts.pinned_tables) == where
        assert facts.shm_bytes == facts.shared_memory + 9 * 2**30
        plan = json.loads(run_command("plan", *asked, "--json").stdout)
        assert plan["host_memory_bytes"] > 510_286_023_000 + 202_758_032_400


def test_facts_of_what_was_built_and_times_of_every_form():
    one, two, tiny = (facts_of(name) for name in ("r1", "two", "tiny"))
    assert (one.nodes, one.ranks_per_node, one.gpus_per_node, one.gpu, one.sm) == (1, 8, 8, "h200", 90)
    assert (two.nodes, two.ranks_per_node, two.mounts) == (2, 8, {"/models/R1": "/models/R1"})
    assert (tiny.world_size, tiny.gpus_per_node, tiny.image, tiny.mounts) == (1, 0, None, {})
    assert one.ready_within_s == two.ready_within_s == 5280
    assert one.shm_bytes == 9 * 2**30
    # The supervisor runs in a stock container and can't import these modules, so the numbers are written twice.
    times = LaunchOptions().stop_times
    assert times.supervisor_kill_s == DEFAULT_EXIT_TIMEOUT_S + PATIENCE_S
    assert f'exit_timeout="${{EXIT_TIMEOUT:-{times.exit_timeout_s}}}"' in Path("r1/start.sh").read_text()
    assert f"exit_timeout + {times.mpirun_kill_s - times.exit_timeout_s}))" in Path("r1/start.sh").read_text()
    assert times.exit_timeout_s < times.supervisor_kill_s < times.mpirun_kill_s < times.docker_stop_timeout_s
    forms = forms_of(forms_of(program_parser(["launch"]))["launch"])
    assert [*LAUNCH_FORMS, "ssh-setup", "recipe", "stop", "list"] == list(forms)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["image", "wheel"])
def test_a_recipe_runs_with_the_release_and_the_gpu_of_the_plan(tmp_path, kind):
    text = printed("recipe", kind, "r1")
    assert "@@" not in text
    programs = {name: recording(tmp_path / "bin", name) for name in ("docker", "git-lfs", "make")}
    git = recording(tmp_path / "bin", "git", after="if 'clone' in sys.argv: os.makedirs(sys.argv[-1])")
    environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "JOBS": "3"}
    done = subprocess.run(["bash", "-c", text], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    clone, *others = [call["args"] for call in git.calls]
    assert clone[:3] == ["clone", "--branch", "v1.2.1"]
    assert ["lfs", "pull"] in others
    assert ["submodule", "update", "--init", "--recursive"] in others
    if kind == "image":
        assert programs["make"].args[:3] == ["-C", "docker", "tritonrelease_build"]
        assert {"CUDA_ARCHS=90-real", "BUILD_WHEEL_OPTS=-j 3"} < set(programs["make"].args)
    else:
        run, build = [call["args"] for call in programs["docker"].calls]
        assert run[-4:] == ["--cuda_architectures", "90-real", "-j", "3"]
        assert "nvcr.io/nvidia/tensorrt-llm/devel:1.2.1" in run
        assert build[0] == "build"


def test_stop_and_list_are_the_supervisors(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    cases = {
        "list": "list",
        "stop 1a2b3c4d --now": "stop 1a2b3c4d --now",
        "stop --now 1a2b3c4d 5e6f7a8b": "stop 1a2b3c4d 5e6f7a8b --now",
        "stop --all": "stop --all",
        "stop ./r1 1a2b3c4d": f"stop --repository {tmp_path}/r1 1a2b3c4d",
        "stop gone 1a2b3c4d": f"stop --repository {tmp_path}/gone 1a2b3c4d",
    }
    for argv, expected in cases.items():
        python, supervisor, *words = become_by(monkeypatch, "launch", *argv.split())
        assert (python, Path(supervisor).name, words) == (sys.executable, "supervise.py", expected.split())


def test_list_asks_the_containers_too_and_stop_names_them(monkeypatch, tmp_path, capsys):
    (tmp_path / "docker").write_text("""#!/bin/sh
case "$1 $*" in
  ps*) printf 'server\\t/r1/tensorrt_llm/1/supervise.py\\nwithout\\t\\n' ;;
  *"server python3 /r1/tensorrt_llm/1/supervise.py list --json") echo '[{"id": "1a2b3c4d", "state": "loading"}]' ;;
  *) echo '1a2b3c4d  loading' ;;
esac
""")
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert main(["launch", "list", "--json"]) == 0
    [row] = [row for row in json.loads(capsys.readouterr().out) if row["container"]]
    assert row == {"id": "1a2b3c4d", "state": "loading", "container": "server"}
    assert main(["launch", "list"]) == 0
    assert "1a2b3c4d  loading  server\n" in capsys.readouterr().out
    for target in ("/r1", "1a2b3c4d"):
        assert "docker stop server" in refusal("stop", target, code=1)


def test_a_checkpoint_inside_the_repository(launchable):
    line = refusal("kubernetes", "tiny", "--image", "tritonserver:here", code=1)
    assert "--repository-claim, or build it without the checkpoint that it holds: --model" in line
    out = printed("docker", "tiny", "--image", "tritonserver:here", "--dry-run")
    assert out.count(f"--mount type=bind,source={launchable / 'tiny'}") == 1


SET = {
    "TRTLLM_DG_ENABLED": "0",
    "PYTORCH_ALLOC_CONF": "max_split_size_mb:8192",
    "NCCL_DEBUG_SUBSYS": """it's "a,b"  $HOME `id` $(id) \\ """,
}
PATHS = {"CUDA_HOME": "/opt/cuda 12", "NCCL_TOPO_FILE": "/etc/topo.xml"}
OTHERS = {"CUDA_VISIBLE_DEVICES": "0", "HF_TOKEN": "hf_not_to_be_seen", "MINE": "1"}
OTHERS["TRITON_CACHE_DIR"] = "/home/me/.triton"
HOSTS = ["--hosts", "localhost,node2"]
FORMS = {
    "local": ("r1", [], False),
    "mpirun": ("two", HOSTS, False),
    "slurm": ("two", [], True),
    "slurm without a container": ("two", ["--no-container"], False),
    "docker": ("r1", [], True),
    "ssh-setup": ("two", HOSTS, True),
    "kubernetes": ("two", ["--image", "mine"], True),
}
"""Form -> repository, options, and whether the server runs in a container."""


@pytest.fixture
def launched(tmp_path, monkeypatch):
    """Gives what a form prints, and what is complained of."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    for name, value in (SET | PATHS | OTHERS).items():
        monkeypatch.setenv(name, value)

    def run(form, *options):
        repository, more, _ = FORMS[form]
        verb = form.split()[0]
        done = run_command("launch", verb, repository, *([] if verb == "ssh-setup" else ["--dry-run"]), *more, *options)
        assert done.returncode == 0, done.stderr
        return done.stdout, done.stderr

    return run


def in_shell(script):
    """Run `script` in an almost empty environment, and return what it prints between zero bytes."""
    environment = {"PATH": "/usr/bin:/bin"}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.split("\0")[:-1]


def server_variables(form, text):
    """Return the variables that the text sets for the server."""
    if form == "kubernetes":
        [group] = [found for (kind, _), found in manifests.objects(text).items() if kind == "LeaderWorkerSet"]
        pods = map(manifests.environment, manifests.templates(group["spec"]))
        leader, worker = ({name: value.replace("$$", "$") for name, value in pod.items()} for pod in pods)
        assert {name: worker.get(name) for name in SET} == {name: leader.get(name) for name in SET}
        return leader
    if form == "docker":
        words = in_shell(f"{text.rpartition('exec ')[0]} printf '%s\\0' \"${{command[@]}}\"")
        settings = [word for option, word in pairwise(words) if option == "--env"]
    elif form == "ssh-setup":
        [line] = [line for line in text.splitlines() if line.startswith("  local variables=(")]
        settings = in_shell(f"port=1 ssh_args=; {line.removeprefix('  local ')}; printf '%s\\0' \"${{variables[@]}}\"")
    else:
        exports = [line for line in text.splitlines() if line.startswith("export ") and "=" in line]
        settings = in_shell("\n".join([*exports, "env -0"]))
    return dict(setting.split("=", 1) for setting in settings if "=" in setting)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_every_form_hands_them_on(launched, form):
    text, said = launched(form)
    variables = server_variables(form, text)
    assert SET.items() <= variables.items()
    assert not {"CUDA_VISIBLE_DEVICES", "HF_TOKEN", "MINE"} & variables.keys()
    assert OTHERS["HF_TOKEN"] not in text
    if FORMS[form][2]:  # in a container
        assert not PATHS.keys() & variables.keys()
        assert variables.get("TRITON_CACHE_DIR", KERNELS_MOUNT).startswith(KERNELS_MOUNT)
        notes = [line for line in said.splitlines() if " is left out, because " in line]
        assert [line.split()[1] for line in notes] == list(PATHS)
    else:
        assert PATHS.items() <= variables.items()
    if form == "slurm":  # they win over the image's
        [names] = [word.partition("=")[2] for word in text.split() if word.startswith("--container-env=")]
        assert set(names.split(",")) == set(SET)
    text, said = launched(form, "--env", "TRTLLM_DG_ENABLED=1", "--env", "CUDA_HOME=/usr/local/cuda")
    variables = server_variables(form, text)  # an option wins over them
    assert (variables["TRTLLM_DG_ENABLED"], variables["CUDA_HOME"]) == ("1", "/usr/local/cuda")
    assert "CUDA_HOME is left out" not in said
