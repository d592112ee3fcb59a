"""`launch docker` and `launch local`: the printed text runs, and it is exactly what the command runs."""

import csv
import os
import shutil
import subprocess

import pytest

from deepseek_triton_tools.cli.main import main
from deepseek_triton_tools.launching import containers
from deepseek_triton_tools.launching.stop_times import StopTimes
from support.cached_checkpoint import write_checkpoint
from support.recording import become_by, recording
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
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "R1"
    write_checkpoint(folder)
    return folder


@pytest.fixture(scope="module")
def repository(tmp_path_factory, checkpoint):
    folder = tmp_path_factory.mktemp("built") / "repository"
    build = ["build", "deepseek-r1", "--gpu", "h200", "--model", str(checkpoint), "--output", str(folder)]
    assert main(build) == 0
    return folder


@pytest.fixture
def launched(tmp_path, monkeypatch, capsys):
    """Run the printed text, check that the command becomes the same text, and return docker's arguments."""
    docker = recording(tmp_path / "bin", "docker")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")

    def run(*argv):
        capsys.readouterr()
        assert main(["launch", *map(str, [*argv[:2], "--dry-run", *argv[2:]])]) == 0
        text = capsys.readouterr().out
        assert max(len(line) for line in text.splitlines() if line.lstrip().startswith("#")) <= 120
        command = become_by(monkeypatch, "launch", *map(str, argv))
        assert command == ["bash", "-c", text, "launch"]
        subprocess.run(command, check=True)
        args: list[str] = docker.calls[-1]["args"]
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


def test_the_container_has_all_that_the_server_needs(launched, repository, checkpoint, tmp_path):
    args = launched("docker", repository, "--exit-timeout", "60", "--", "--log-verbose", "1")
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
        ("--detach --name r1", ["--detach", "--name r1"], []),
        ("--image mine:1", ["mine:1 "], [IMAGE]),
        ("--interface eth1", ["--env INTERFACE=eth1"], []),
        ("--ready-within 0 --max-restarts 0", ["READY_WITHIN=0", "MAX_RESTARTS=0"], []),
    ]
    for options, present, absent in cases:
        line = " ".join(launched("docker", repository, *options.split()))
        assert ([text for text in present if text not in line], options) == ([], options)
        assert ([text for text in absent if text in line], options) == ([], options)


def test_a_name_of_the_hub_is_looked_for_in_the_cache(launched, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    folder = str(tmp_path / "hub-r1")
    assert main(["build", "deepseek-r1", "--gpu", "h200", "--output", folder]) == 0
    args = launched("docker", folder)
    assert mounts(args)[str(tmp_path / "hub")] == (str(tmp_path / "hub"), False)
    assert environment(args)["HF_HUB_CACHE"] == str(tmp_path / "hub")
    assert "HF_TOKEN" in values(args, "--env")
    assert "secret" not in " ".join(args)


def test_paths_with_special_characters_work(launched, tmp_path):
    folder, kept = tmp_path / AWKWARD / "tiny", tmp_path / AWKWARD / "kept"
    folder.parent.mkdir()
    assert main(["build", "tiny", "--output", str(folder)]) == 0
    ready = tmp_path / AWKWARD / "ready"
    more = ["--image", "mine", "--cache-dir", kept, "--ready-file", ready, "--env", f"ODD={AWKWARD}"]
    args = launched("docker", folder, *more, "--", "--log-info=a b")
    assert args[-2:] == [f"{folder}/start.sh", "--log-info=a b"]
    assert mounts(args)[str(folder)] == (str(folder), True)
    assert mounts(args)[containers.KERNELS_MOUNT] == (f"{kept}/mine-cpu", False)
    assert mounts(args)[str(ready.parent)] == (str(ready.parent), False)
    assert environment(args)["ODD"] == AWKWARD
    assert "--gpus" not in args
    args = launched("docker", folder, "--image", "mine", "--gpus", "GPU-1a2b-3c")
    assert values(args, "--gpus") == ['"device=GPU-1a2b-3c"']  # one of several by its UUID


@pytest.mark.slow
def test_what_docker_or_the_engine_would_refuse_is_refused(launched, repository, tmp_path, capsys):
    blank = tmp_path / "with blank"
    shutil.copytree(repository, blank)
    assert launched("docker", blank)[-1] == f"{blank}/start.sh"
    assert main(["build", "tiny", "--output", str(tmp_path / "tiny")]) == 0
    cases = [
        (repository, ["--gpus", "some"], "--gpus: expected all, none, a number or devices"),
        (repository, ["--gpus", "4"], "takes 8 GPUs of each node, got 4"),
        (repository, ["--gpus", "0,1,2,3,4,5,6,6"], "takes 8 GPUs of each node, got 7"),
        (repository, ["--name", "a b"], "--name: docker takes letters"),
        (repository, ["--name", "a"], "two of them at least, got a"),
        (repository, ["--ipc-host", "--shm-size", "1G"], "--ipc-host uses the machine's /dev/shm"),
        (blank, ["--", "--log-file", "a b"], "trtllm-llmapi-launch splits words"),
        (tmp_path / "tiny", [], "was planned for no container: name with --image one"),
    ]
    for folder, options, expected in cases:
        capsys.readouterr()
        assert main(["launch", "docker", str(folder), "--dry-run", *options]) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert expected in line


def test_a_checkpoint_that_is_not_here_is_printed_but_not_run(tmp_path, monkeypatch, capsys):
    recorded = recording(tmp_path / "bin", "docker")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    repository, checkpoint = str(tmp_path / "repository"), tmp_path / "gone"
    assert main(["build", "deepseek-r1", "--gpu", "h200", "--model", str(checkpoint), "--output", repository]) == 0
    capsys.readouterr()
    assert main(["launch", "docker", repository]) == 1
    assert f"the checkpoint {checkpoint} is not on this machine" in capsys.readouterr().err
    assert recorded.calls == []
    assert main(["launch", "docker", repository, "--dry-run"]) == 0
    captured = capsys.readouterr()
    assert captured.err.startswith("note: the checkpoint ")
    assert "exec" in captured.out


@pytest.mark.skipif(shutil.which("docker") is None, reason="docker is not installed")
def test_docker_itself_takes_the_command(tmp_path, capsys):
    """There is no daemon. docker parses the whole command before it looks for one."""
    folder = tmp_path / AWKWARD / "tiny"
    folder.parent.mkdir()
    assert main(["build", "tiny", "--output", str(folder)]) == 0
    capsys.readouterr()
    options = ["--image", "mine:1", "--gpus", "0,3", "--restart", "on-failure:3", "--network", "bridge"]
    assert main(["launch", "docker", str(folder), "--dry-run", *options]) == 0
    text = capsys.readouterr().out
    nowhere = {**os.environ, "DOCKER_HOST": f"unix://{tmp_path}/nobody", "DOCKER_CONFIG": str(tmp_path)}
    done = subprocess.run(["bash", "-c", text], env=nowhere, capture_output=True, text=True)
    assert "nobody" in done.stderr, done.stderr
    assert "invalid" not in done.stderr


@pytest.mark.slow
def test_local_runs_start_sh_with_its_variables(tmp_path, monkeypatch, capfd):
    folder = tmp_path / AWKWARD / "tiny"
    folder.parent.mkdir()
    assert main(["build", "tiny", "--output", str(folder)]) == 0
    server = recording(tmp_path / "bin", "tritonserver", after="sys.exit(7)")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    ports = free_ports(3)
    argv = ["launch", "local", str(folder), *port_options(ports), "--env", "ODD=a b", "--", "--log-info=a b"]
    capfd.readouterr()
    assert main([*argv[:3], "--dry-run", *argv[3:]]) == 0
    text = capfd.readouterr().out
    assert "#     tritonserver \\\n" in text
    command = become_by(monkeypatch, *argv)
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
def test_local_takes_the_wheels_server_where_there_is_no_other(tmp_path, monkeypatch, capsys):
    pytest.importorskip("pytriton", reason="the nvidia-pytriton wheel is not installed")
    folders = os.environ["PATH"].split(os.pathsep)
    monkeypatch.setenv("PATH", os.pathsep.join(f for f in folders if not os.path.exists(f"{f}/tritonserver")))
    assert main(["build", "tiny", "--output", str(tmp_path / "tiny")]) == 0
    capsys.readouterr()
    assert main(["launch", "local", str(tmp_path / "tiny"), "--dry-run"]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    assert last.startswith(f"exec {tmp_path}/tiny/start.sh --backend-directory=")
