"""`launch docker` and `launch local`: the printed text runs, and it is exactly what the command runs."""

import csv
import os
import re
import shutil
import subprocess

import pytest

from deepseek_triton_build.data.vllm import DEFAULT_VLLM
from deepseek_triton_tools.launching import containers
from deepseek_triton_tools.launching.launch_settings import StopTimes
from support.check_faults import SHARDS, write_weights
from support.commands import run_command
from support.recording import become_by, recording
from support.servers import build
from support.supervising import free_ports, port_options

IMAGE = "nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3"
AWKWARD = "a, \"b\" $HOME 'c' %n:d"


@pytest.fixture(autouse=True)
def _surroundings(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    for name in ("HTTP_PORT", "GRPC_PORT", "METRICS_PORT", "EXIT_TIMEOUT", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """Beside its checkpoint."""
    folder = tmp_path_factory.mktemp("built")
    write_weights(folder / "R1")
    return build(folder / "repository", "deepseek-r1", "--gpu", "h200", "--model", str(folder / "R1"))


def dry_run(form, folder, *options):
    return run_command("launch", form, str(folder), "--dry-run", *map(str, options))


@pytest.fixture
def launched(tmp_path, monkeypatch):
    """Run the printed text, check that the command becomes the same text, and return docker's arguments."""
    docker = recording(tmp_path / "bin", "docker", after="if sys.argv[1] == 'ps': print('ended')")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")

    def run(folder, *options):
        text = dry_run("docker", folder, *options).stdout
        command = become_by(monkeypatch, "launch", "docker", *map(str, (folder, *options)))
        assert command == ["bash", "-c", text, "launch"]
        subprocess.run(command, check=True)
        ps, rm, args = (call["args"] for call in docker.calls[-3:])
        assert (f"label={containers.LABEL}" in ps, rm) == (True, ["rm", "ended"])
        return args

    return run


def values(args, option):
    return [args[n + 1] for n, word in enumerate(args) if word == option]


def mounts(args):
    """Return target -> (source, whether it is read-only)."""
    rows = [next(csv.reader([value])) for value in values(args, "--mount")]
    parsed = [dict(field.partition("=")[::2] for field in row) for row in rows]
    assert {row["type"] for row in parsed} == {"bind"}
    return {row["target"]: (row["source"], "readonly" in row) for row in parsed}


def environment(args):
    return dict(value.partition("=")[::2] for value in values(args, "--env"))


@pytest.mark.slow
def test_the_container_has_all_that_the_server_needs(launched, repository, tmp_path):
    checkpoint = repository.parent / "R1"
    args = launched(repository, "--exit-timeout", "60", "--", "--log-verbose", "1")
    assert args[-4:] == [IMAGE, f"{repository}/start.sh", "--log-verbose", "1"]
    cache = tmp_path / "cache/deepseek-triton/kernels/nvcr.io_nvidia_tritonserver_26.07-trtllm-python-py3-h200"
    assert mounts(args) == {
        str(repository): (str(repository), True),
        str(checkpoint): (str(checkpoint), True),
        containers.KERNELS_MOUNT: (str(cache), False),
    }
    assert cache.is_dir()
    assert {option: values(args, f"--{option}") for option in OPTIONS} == OPTIONS
    assert values(args, "--stop-timeout") == [str(StopTimes(exit_timeout_s=60).docker_stop_timeout_s)]
    assert {"--rm", "--publish", "--read-only", "--privileged"} & set(args) == {"--rm", "--read-only"}
    variables = environment(args)
    assert (variables["HTTP_PORT"], variables["EXIT_TIMEOUT"], variables["HOME"]) == ("8000", "60", "/tmp")
    assert set(containers.KERNEL_CACHES) < set(variables)


OPTIONS = {
    "gpus": ["all"],
    "shm-size": [str(9 * 2**30)],
    "ulimit": ["memlock=-1", "stack=67108864", "nofile=1048576:1048576"],
    "network": ["host"],
    "cap-drop": ["ALL"],
    "cap-add": ["DAC_OVERRIDE"],
    "security-opt": ["no-new-privileges"],
    "tmpfs": ["/tmp:exec,mode=1777"],
}


@pytest.mark.slow
def test_options(launched, repository):
    cases = [
        ("--gpus 8", ["--gpus 8"], []),
        ("--gpus 8,9,0,1,2,3,4,5", ['--gpus "device=8,9,0,1,2,3,4,5"'], []),
        ("--gpus none", [], ["--gpus"]),
        ("--shm-size 16GiB", [f"--shm-size {16 * 2**30}"], ["--ipc"]),
        ("--ipc-host", ["--ipc host"], ["--shm-size"]),
        ("--network bridge", ["--network bridge", "--publish 8000:8000", "--publish 8002:8002"], []),
        ("--address 127.0.0.1", ["HTTP_ADDRESS=127.0.0.1 --env GRPC_ADDRESS=127.0.0.1"], ["--publish"]),
        ("--network b --address 127.0.0.1", ["--publish 127.0.0.1:8001:8001"], ["_ADDRESS"]),
        ("--network b --address ::1", ["--publish [::1]:8000:8000"], ["_ADDRESS"]),
        ("--restart unless-stopped", ["--restart unless-stopped"], ["--rm"]),
        ("--detach --name r1", ["--detach", "--name r1"], ["--rm"]),
        ("--image mine:1", ["mine:1 "], [IMAGE]),
        ("--interface eth1", ["--env INTERFACE=eth1"], []),
        ("--ready-within 0 --max-restarts 0", ["READY_WITHIN=0", "MAX_RESTARTS=0"], []),
    ]
    for options, present, absent in cases:
        line = " ".join(launched(repository, *options.split()))
        assert ([text for text in present if text not in line], options) == ([], options)
        assert ([text for text in absent if text in line], options) == ([], options)


SERVED = {
    "trtllm-serve": ("--engine tensorrt_llm", "nvcr.io/nvidia/tensorrt-llm/release:1.2.1"),
    "vllm-serve": ("--engine vllm", f"vllm/vllm-openai:v{DEFAULT_VLLM}"),
}


@pytest.fixture(scope="module")
def served(repository, tmp_path_factory):
    """Folders without Triton of the same checkpoint, by their format."""
    words = ("deepseek-r1", "--gpu", "h200", "--model", str(repository.parent / "R1"))
    folder = tmp_path_factory.mktemp("served")
    return {
        form: build(folder / form, *words, *engine.split(), "--format", form) for form, (engine, _) in SERVED.items()
    }


@pytest.mark.slow
def test_a_folder_without_triton_runs_in_its_own_container(launched, served, repository, monkeypatch):
    for variable in ("GRPC_PORT", "METRICS_ADDRESS", "READY_WITHIN"):  # of start.sh, so that nothing comes of them here
        monkeypatch.setenv(variable, "127")
    checkpoint = str(repository.parent / "R1")
    cases = [
        ("", ["--network host", "--env HOST=0.0.0.0 --env PORT=8000", "--rm --init"], ["--publish"]),
        ("--http-port 8001 --network b", ["--publish 8001:8001", "HOST=0.0.0.0 --env PORT=8001"], ["8000", "8002"]),
        ("--address 127.0.0.1", ["--env HOST=127.0.0.1 --env PORT=8000"], []),
        ("--network b --address 127.0.0.1", ["--publish 127.0.0.1:8000:8000", "HOST=0.0.0.0"], ["127.0.0.1:8001"]),
        (
            "--env A=b --restart always --detach --name nn",
            ["--env A=b", "--restart always --detach", "--name nn"],
            ["--rm"],
        ),
        ("-- --max_batch_size 4", ["serve.sh --max_batch_size 4"], []),
    ]
    for form, (_, image) in SERVED.items():
        args = launched(served[form])
        assert args[-2:] == [image, f"{served[form]}/serve.sh"]
        assert {option: values(args, f"--{option}") for option in OPTIONS} == OPTIONS
        assert values(args, "--entrypoint") == ([""] if form == "vllm-serve" else [])
        sources = {target: (source, is_kept) for target, (source, is_kept) in mounts(args).items()}
        assert sources[checkpoint] == (checkpoint, True)
        assert sources[str(served[form])] == (str(served[form]), True)
        assert not sources[containers.KERNELS_MOUNT][1]
        assert {"GRPC_PORT", "METRICS_ADDRESS", "READY_WITHIN", "EXIT_TIMEOUT"} & set(environment(args)) == set()
        for options, present, absent in cases:
            line = " ".join(launched(served[form], *options.split()))
            assert ([text for text in present if text not in line], options) == ([], options)
            assert ([text for text in absent if text in line], options) == ([], options)


@pytest.mark.slow
def test_a_folder_without_triton_that_can_not_run_so_is_refused(served, tmp_path):
    serve = served["trtllm-serve"]
    words = ("deepseek-r1", "--gpu", "h200", "--format", "trtllm-serve")
    two = build(tmp_path / "two", *words[:2], "h100", "--gpus", "16", *words[3:])
    pair = build(tmp_path / "pair", *words, "--profile", "disagg")
    copies = {name: shutil.copytree(serve, tmp_path / name) for name in ("relative", "port", "unstamped")}
    edits = {"relative": (r"trtllm-serve \S+", "trtllm-serve ./R1"), "port": (r"\$\{PORT:-8000\}", "9")}
    for name, (pattern, new) in edits.items():
        script = copies[name] / "serve.sh"
        script.write_text(re.sub(pattern, new, script.read_text()))
    (copies["unstamped"] / "deepseek-triton.json").unlink()
    given = ["--grpc-port", "1", "--metrics-port", "2", "--exit-timeout", "3", "--ready-within", "4"]
    given += ["--max-restarts", "5", "--ready-file", "f", "--interface", "i"]
    cases = [
        (serve, given, 2, f"{', '.join(given[::2])}: only for Triton"),
        (serve, ["--env", "PORT=9", "--", "--host=x"], 2, "PORT, --host=x: say it with --address and --http-port"),
        (serve, ["--gpus", "4"], 2, "takes 8 GPUs of each node, got 4"),
        (two, [], 2, "takes 2 nodes"),
        (pair, [], 1, "is a pair of trtllm-serve servers"),
        (copies["relative"], [], 1, "found ./R1"),
        (copies["port"], [], 1, "HOST and PORT"),
        (copies["unstamped"], [], 1, "or write it anew\n"),
    ]
    for folder, options, code, expected in cases:
        refused = dry_run("docker", folder, *options)
        [line] = refused.stderr.splitlines(keepends=True)
        assert (refused.returncode, expected in line) == (code, True), line
    assert "--env PORT=8002" in dry_run("docker", pair / "generation").stdout


@pytest.mark.slow
def test_a_name_of_the_hub_is_looked_for_in_the_cache(launched, launchable, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    args = launched(launchable / "r1")
    assert mounts(args)[str(tmp_path / "hub")] == (str(tmp_path / "hub"), False)
    assert environment(args)["HF_HUB_CACHE"] == str(tmp_path / "hub")
    assert "HF_TOKEN" in values(args, "--env")
    assert "secret" not in " ".join(args)


@pytest.fixture
def awkward(tmp_path, launchable):
    """A repository, the path of which has every special character."""
    shutil.copytree(launchable / "tiny", tmp_path / AWKWARD / "tiny")
    return tmp_path / AWKWARD / "tiny"


@pytest.mark.slow
def test_paths_with_special_characters_work(launched, awkward):
    kept, ready = awkward.parent / "kept", awkward.parent / "ready"
    more = ["--image", "mine", "--cache-dir", kept, "--ready-file", ready, "--env", f"ODD={AWKWARD}"]
    args = launched(awkward, *more, "--", "--log-info=a b")
    assert args[-2:] == [f"{awkward}/start.sh", "--log-info=a b"]
    assert mounts(args)[str(awkward)] == (str(awkward), True)
    assert mounts(args)[containers.KERNELS_MOUNT] == (f"{kept}/mine-cpu", False)
    assert mounts(args)[str(ready.parent)] == (str(ready.parent), False)
    assert environment(args)["ODD"] == AWKWARD
    assert "--gpus" not in args
    args = launched(awkward, "--image", "mine", "--gpus", "GPU-1a2b-3c")
    assert values(args, "--gpus") == ['"device=GPU-1a2b-3c"']  # one of several by its UUID


@pytest.mark.slow
def test_what_docker_or_the_engine_would_refuse_is_refused(launched, repository, launchable, tmp_path):
    blank = tmp_path / "with blank"
    shutil.copytree(repository, blank)
    assert launched(blank)[-1] == f"{blank}/start.sh"
    cases = [
        (repository, ["--gpus", "some"], "--gpus: expected all, none, a number or devices"),
        (repository, ["--gpus", "4"], "takes 8 GPUs of each node, got 4"),
        (repository, ["--gpus", "0,1,2,3,4,5,6,6"], "takes 8 GPUs of each node, got 7"),
        (repository, ["--name", "a b"], "--name: docker takes letters"),
        (repository, ["--name", "a"], "two of them at least, got a"),
        (repository, ["--ipc-host", "--shm-size", "1G"], "--ipc-host uses the machine's /dev/shm"),
        (blank, ["--", "--log-file", "a b"], "trtllm-llmapi-launch splits words"),
        (launchable / "tiny", [], "was planned for no container: name with --image one"),
    ]
    for folder, options, expected in cases:
        refused = dry_run("docker", folder, *options)
        [line] = refused.stderr.splitlines()
        assert (refused.returncode, expected in line) == (2, True), line


def test_a_small_shm_and_a_misspelled_variable_are_noted(launchable):
    shown = dry_run("docker", launchable / "one", "--shm-size", "64m", "--env", "NCCL_SOCKET_IFNAM=eth0")
    notes = shown.stderr.splitlines()
    for expected in ("--shm-size 64 MiB: 9.0 GiB are planned", "did you mean NCCL_SOCKET_IFNAME?"):
        assert sum(expected in line for line in notes) == 1, notes
    assert shown.returncode == 0


def test_a_checkpoint_that_is_not_here_is_printed_but_not_run(launchable, tmp_path, monkeypatch):
    recorded = recording(tmp_path / "bin", "docker")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    write_weights(tmp_path / "R1")
    half = build(tmp_path / "half", "deepseek-r1", "--gpu", "h200", "--model", str(tmp_path / "R1"))
    first, second = (tmp_path / "R1" / name for name in SHARDS)
    second.unlink()
    assert become_by(monkeypatch, "launch", "docker", str(half)), "load_format: dummy needs no weights"
    first.write_bytes(first.read_bytes()[:-1])
    monkeypatch.setattr(os, "execvp", pytest.fail)
    for folder, noted in (launchable / "one", "the checkpoint /models/R1"), (half, f"deepseek-triton check {half}"):
        refused = run_command("launch", "docker", str(folder))
        assert (refused.returncode, noted in refused.stderr, recorded.calls) == (1, True, [])
        shown = dry_run("docker", folder)
        assert (shown.returncode, noted in shown.stderr, "exec" in shown.stdout) == (0, True, True)


@pytest.mark.skipif(shutil.which("docker") is None, reason="docker is not installed")
def test_docker_itself_takes_the_command(awkward, tmp_path):
    """There is no daemon. docker parses the whole command before it looks for one."""
    text = dry_run("docker", awkward, "--image", "mine:1", "--gpus", "0,3", "--restart", "on-failure:3").stdout
    nowhere = {**os.environ, "DOCKER_HOST": f"unix://{tmp_path}/nobody", "DOCKER_CONFIG": str(tmp_path)}
    done = subprocess.run(["bash", "-c", text], env=nowhere, capture_output=True, text=True)
    assert ("nobody" in done.stderr, "invalid" in done.stderr) == (True, False), done.stderr


@pytest.mark.slow
def test_local_runs_start_sh_with_its_variables(awkward, tmp_path, monkeypatch):
    server = recording(tmp_path / "bin", "tritonserver", after="sys.exit(7)")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    ports = free_ports(3)
    options = [*port_options(ports), "--env", "ODD=a b", "--", "--log-info=a b"]
    text = dry_run("local", awkward, *options).stdout
    assert "#     tritonserver \\\n" in text
    command = become_by(monkeypatch, "launch", "local", str(awkward), *options)
    assert command == ["bash", "-c", text, "launch"]
    done = subprocess.run(command, capture_output=True)
    assert done.returncode == 7, done.stderr
    [call] = server.calls
    # A link: Triton's Python backend would let a shell split the folder's own path.
    link = f"/dev/shm/deepseek_triton_{call['env']['DEEPSEEK_TRITON_LAUNCH']}_repository"
    assert values(call["args"], "--model-repository") == [link]
    assert not os.path.lexists(link)
    assert values(call["args"], "--http-port") == [str(ports[0])]
    assert (call["args"][-1], call["env"]["ODD"]) == ("--log-info=a b", "a b")


@pytest.mark.slow
def test_local_takes_the_wheels_server_where_there_is_no_other(launchable, monkeypatch):
    pytest.importorskip("pytriton", reason="the nvidia-pytriton wheel is not installed")
    folders = os.environ["PATH"].split(os.pathsep)
    monkeypatch.setenv("PATH", os.pathsep.join(f for f in folders if not os.path.exists(f"{f}/tritonserver")))
    *_, last = dry_run("local", launchable / "tiny").stdout.splitlines()
    assert last.startswith(f"exec {launchable}/tiny/start.sh --backend-directory=")
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")  # the wheel's server needs a folder there
    assert "note: /proc/none/" in dry_run("local", launchable / "tiny").stderr  # refused without --dry-run
