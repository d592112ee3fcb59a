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
    assert values(args, "--gpus") == ["all"]
    assert values(args, "--shm-size") == [str(9 * 2**30)]
    assert values(args, "--ulimit") == ["memlock=-1", "stack=67108864", "nofile=1048576:1048576"]
    assert values(args, "--network") == ["host"]
    assert values(args, "--stop-timeout") == [str(StopTimes(exit_timeout_s=60).docker_stop_timeout_s)]
    assert {"--rm", "--publish"} & set(args) == {"--rm"}
    variables = environment(args)
    assert (variables["HTTP_PORT"], variables["EXIT_TIMEOUT"]) == ("8000", "60")
    assert set(containers.KERNEL_CACHES) < set(variables)


@pytest.mark.parametrize(
    ("options", "present", "absent"),
    [
        (["--gpus", "8"], ["--gpus 8"], []),
        (["--gpus", "8,9,0,1,2,3,4,5"], ['--gpus "device=8,9,0,1,2,3,4,5"'], []),
        (["--gpus", "none"], [], ["--gpus"]),
        (["--shm-size", "16GiB"], [f"--shm-size {16 * 2**30}"], ["--ipc"]),
        (["--ipc-host"], ["--ipc host"], ["--shm-size"]),
        (["--network", "bridge"], ["--network bridge", "--publish 8000:8000", "--publish 8002:8002"], []),
        (["--address", "127.0.0.1"], ["HTTP_ADDRESS=127.0.0.1 --env GRPC_ADDRESS=127.0.0.1"], ["--publish"]),
        (["--network", "b", "--address", "127.0.0.1"], ["--publish 127.0.0.1:8001:8001"], ["_ADDRESS"]),
        (["--network", "b", "--address", "::1"], ["--publish [::1]:8000:8000"], ["_ADDRESS"]),
        (["--restart", "unless-stopped"], ["--restart unless-stopped"], ["--rm"]),
        (["--detach", "--name", "r1"], ["--detach", "--name r1"], []),
        (["--image", "mine:1"], ["mine:1 "], [IMAGE]),
        (["--interface", "eth1"], ["--env INTERFACE=eth1"], []),
        (["--ready-within", "0", "--max-restarts", "0"], ["READY_WITHIN=0", "MAX_RESTARTS=0"], []),
    ],
)
def test_options(launched, repository, options, present, absent):
    line = " ".join(launched("docker", repository, *options))
    assert [text for text in present if text not in line] == []
    assert [text for text in absent if text in line] == []


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


def test_one_gpu_of_several_is_named_by_its_uuid(launched, tmp_path):
    assert main(["build", "tiny", "--output", str(tmp_path / "tiny")]) == 0
    args = launched("docker", tmp_path / "tiny", "--image", "mine", "--gpus", "GPU-1a2b-3c")

    assert values(args, "--gpus") == ['"device=GPU-1a2b-3c"']


def test_a_value_with_a_blank_is_refused_because_the_engine_splits_it(launched, repository, tmp_path, capsys):
    folder = tmp_path / "with blank"
    shutil.copytree(repository, folder)
    assert launched("docker", folder)[-1] == f"{folder}/start.sh"
    capsys.readouterr()
    assert main(["launch", "docker", str(folder), "--dry-run", "--", "--log-file", "a b"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "trtllm-llmapi-launch splits words" in line


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--gpus", "some"], "--gpus: expected all, none, a number or devices"),
        (["--gpus", "4"], "takes 8 GPUs of each node, got 4"),
        (["--gpus", "0,1,2,3,4,5,6,6"], "takes 8 GPUs of each node, got 7"),
        (["--name", "a b"], "--name: docker takes letters"),
        (["--name", "a"], "two of them at least, got a"),
        (["--ipc-host", "--shm-size", "1G"], "--ipc-host uses the machine's /dev/shm"),
    ],
)
def test_values_that_docker_would_refuse_are_refused(repository, capsys, options, expected):
    capsys.readouterr()
    assert main(["launch", "docker", str(repository), "--dry-run", *options]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert expected in line


def test_without_an_image_it_is_refused(tmp_path, capsys):
    assert main(["build", "tiny", "--output", str(tmp_path / "tiny")]) == 0
    capsys.readouterr()
    assert main(["launch", "docker", str(tmp_path / "tiny")]) == 2
    assert "was planned for no container: name with --image one" in capsys.readouterr().err


def test_a_checkpoint_that_is_not_here_is_printed_but_not_run(tmp_path, monkeypatch, capsys):
    recorded = recording(tmp_path / "bin", "docker")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    repository, checkpoint = tmp_path / "repository", tmp_path / "gone"
    build = ["build", "deepseek-r1", "--gpu", "h200", "--model", str(checkpoint), "--output", str(repository)]
    assert main(build) == 0
    capsys.readouterr()

    assert main(["launch", "docker", str(repository)]) == 1
    assert f"the checkpoint {checkpoint} is not on this machine" in capsys.readouterr().err
    assert recorded.calls == []
    assert main(["launch", "docker", str(repository), "--dry-run"]) == 0
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


# local


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

    command = become_by(monkeypatch, *argv)
    done = subprocess.run(command, capture_output=True)

    assert command == ["bash", "-c", text, "launch"]
    assert done.returncode == 7, done.stderr
    [call] = server.calls
    args = call["args"]
    # A link: Triton's Python backend would let a shell split the folder's own path.
    link = f"/dev/shm/deepseek_triton_{call['env']['DEEPSEEK_TRITON_LAUNCH']}_repository"
    assert values(args, "--model-repository") == [link]
    assert not os.path.lexists(link)
    assert values(args, "--http-port") == [str(ports[0])]
    assert args[-1] == "--log-info=a b"
    assert call["env"]["ODD"] == "a b"
    assert "#     tritonserver \\\n" in text


def test_local_takes_the_wheels_server_where_there_is_no_other(tmp_path, monkeypatch, capsys):
    pytest.importorskip("pytriton", reason="the nvidia-pytriton wheel is not installed")
    folders = os.environ["PATH"].split(os.pathsep)
    monkeypatch.setenv("PATH", os.pathsep.join(f for f in folders if not os.path.exists(f"{f}/tritonserver")))
    assert main(["build", "tiny", "--output", str(tmp_path / "tiny")]) == 0
    capsys.readouterr()
    assert main(["launch", "local", str(tmp_path / "tiny"), "--dry-run"]) == 0

    *_, last = capsys.readouterr().out.splitlines()
    assert last.startswith(f"exec {tmp_path}/tiny/start.sh --backend-directory=")


def test_the_container_has_no_rights_and_a_read_only_image(launched, repository):
    args = launched("docker", repository)

    assert values(args, "--cap-drop") == ["ALL"]
    assert values(args, "--cap-add") == ["DAC_OVERRIDE"]
    assert values(args, "--security-opt") == ["no-new-privileges"]
    assert "--read-only" in args
    assert values(args, "--tmpfs") == ["/tmp:exec,mode=1777"]
    assert "HOME=/tmp" in values(args, "--env")
    assert "--privileged" not in args
