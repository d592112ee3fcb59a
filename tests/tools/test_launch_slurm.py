"""`launch slurm`: the batch script, run with recording programs in place of Slurm's."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys

import pytest

from deepseek_triton_tools.launching import containers, slurm
from deepseek_triton_tools.launching.launch_settings import StopTimes
from support.commands import run_command
from support.recording import recording
from support.supervising import free_ports, port_options
from support.waiting import PATIENCE_S, wait_for


@pytest.fixture
def tmp_path(plain_path):
    return plain_path


@pytest.fixture
def script(launchable):
    def render(name, *options):
        done = run_command("launch", "slurm", str(launchable / name), *options)
        assert done.returncode == 0, done.stderr
        assert "@@" not in done.stdout
        assert max(len(line) for line in done.stdout.splitlines() if line.startswith("# ")) <= 120
        return done.stdout

    return render


@pytest.fixture
def run(tmp_path):
    """Runs a script as the first node would, and returns the calls of srun and of the supervisor's Python."""
    srun, python = recording(tmp_path / "bin", "srun"), recording(tmp_path / "bin", "python3")
    scontrol = recording(tmp_path / "bin", "scontrol", after="print('node1\\nnode2')")

    def run(text):
        environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
        environment["SLURM_JOB_NODELIST"] = "node[1-2]"
        subprocess.run(["bash", "-c", text], env=environment, check=True)
        assert scontrol.calls[-1]["args"] == ["show", "hostnames", "node[1-2]"]
        return srun.calls, python.calls

    return run


def directives(text):
    lines = [line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH ")]
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


def split(words):
    """Return the words before and after the first `--`."""
    at = words.index("--")
    return words[:at], words[at + 1 :]


def test_the_supervisor_is_in_front_of_srun(script, run, launchable):
    text = script("two", "--no-container", "--time", "7-0", "--partition", "gpu", "--", "--log-verbose", "1")
    sruns, [supervisor] = run(text)
    supervise, ranks = split(supervisor["args"])
    folder = launchable / "two"
    assert sruns == []
    assert supervise == [
        f"{folder}/tensorrt_llm/1/supervise.py",
        "run",
        *("--repository", str(folder), "--ranks", "16", "--ranks-per-node", "8"),
        *("--http-port", "8000", "--grpc-port", "8001", "--metrics-port", "8002"),
        *("--ready-within", "5280", "--exit-timeout", "30", "--hosts", "node1,node2"),
    ]
    assert ranks[0] == "srun"
    assert {"--label", "--kill-on-bad-exit=1", "--mpi=pmix", "--nodes=2", "--ntasks=16", "--cpu-bind=none"} < set(ranks)
    assert ranks[-3:] == [f"{folder}/start.sh", "--log-verbose", "1"]
    assert not any(word.startswith("--container") for word in ranks)
    assert re.fullmatch("[0-9a-f]{8}", supervisor["env"]["DEEPSEEK_TRITON_LAUNCH"])
    assert supervisor["env"]["EXIT_TIMEOUT"] == "30"
    assert "TRITON_CACHE_DIR" not in supervisor["env"]


@pytest.mark.slow
def test_the_supervisor_takes_what_it_is_given(script, tmp_path):
    """This runs the real supervisor, with another command than srun."""
    ports = port_options(free_ports(3))
    options = ["--ready-file", str(tmp_path / "ready"), "--max-restarts", "1", "--address", "127.0.0.1"]
    text = script("two", "--no-container", "--python", sys.executable, *ports, *options)
    command = text[text.index("exec ") :].partition("-- srun")[0] + "-- sh -c 'exit 5'"
    done = subprocess.run(["bash", "-c", f"hosts=a,b; {command}"], capture_output=True, text=True)
    assert done.returncode == 5, done.stderr
    assert "--http-address 127.0.0.1" in command


@pytest.mark.slow
def test_in_containers_what_is_needed_is_mounted(script, run, launchable, tmp_path):
    kept, ready = tmp_path / "kept", tmp_path / "ready" / "file"
    options = ["--cache-dir", str(kept), "--ready-file", str(ready), "--image", "registry.example:5000/triton:1"]
    [prepared], [supervisor] = run(script("one", *options, "--env", "CUDA_CACHE_PATH=/c"))
    _, ranks = split(supervisor["args"])
    folder, cache = launchable / "one", f"{kept}/registry.example_5000_triton_1-h200"
    once = ["--nodes=1", "--ntasks-per-node=1", "--ntasks=1"]
    assert prepared["args"] == [*once, "mkdir", "-p", "--", cache, str(ready.parent)]
    assert "--container-image=registry.example:5000#triton:1" in ranks
    assert "--no-container-mount-home" in ranks
    [mounts] = [word.partition("=")[2].split(",") for word in ranks if word.startswith("--container-mounts=")]
    assert mounts == [
        f"{folder}:{folder}:ro",
        "/models/R1:/models/R1:ro",
        f"{cache}:{containers.KERNELS_MOUNT}",
        f"{ready.parent}:{ready.parent}",
    ]
    kernels = {"TRITON_CACHE_DIR": f"{containers.KERNELS_MOUNT}/triton", "CUDA_CACHE_PATH": "/c"}
    assert supervisor["env"].items() >= kernels.items()
    assert "--ready-file" in supervisor["args"]


@pytest.mark.slow
def test_variables_that_are_passed_on(script, run, monkeypatch):
    """sbatch passes the submitting user's variables on to the ranks. pyxis prefers the image's value of a variable,
    unless --container-env names the variable (its README)."""
    monkeypatch.setenv("HTTP_ADDRESS", "10.0.0.7")
    monkeypatch.setenv("HF_HUB_CACHE", "/shared/hub")
    _, [supervisor] = run(script("two", "--no-container"))
    assert supervisor["env"]["HTTP_ADDRESS"] == "10.0.0.7"
    assert supervisor["args"][supervisor["args"].index("--http-address") + 1] == "10.0.0.7"
    _, [_, supervisor] = run(script("one", "--env", "NCCL_DEBUG=INFO", "--env", "OTHER=1"))
    assert "--container-env=NCCL_DEBUG,OTHER" in supervisor["args"]
    text = script("r1")
    assert "/shared/hub:/shared/hub," in text
    assert "export HF_HUB_CACHE=/shared/hub\n" in text


@pytest.mark.slow
def test_one_rank_has_a_supervisor_of_its_own(script, run, launchable):
    sruns, pythons = run(script("tiny", "--image", "mine", "--env", "ODD=a 'b' $c"))
    assert pythons == []
    assert sruns[-1]["args"][-1] == f"{launchable}/tiny/start.sh"
    assert sruns[-1]["env"]["ODD"] == "a 'b' $c"


_SRUN = """\
import signal, subprocess
command = sys.argv[1:]
if "env" in command:
    def kill(*_):
        task.kill()
        print("srun: forcing job termination", flush=True)
        os._exit(143)
    task = subprocess.Popen(command[command.index("env"):])
    signal.signal(signal.SIGTERM, kill)
    os._exit(task.wait())
"""
"""srun of Slurm 22.05: it kills its task at SIGTERM."""
_START = """\
#!/bin/sh
touch {folder}/begun
while [ ! -e {folder}/goes ]; do sleep 0.1; done
exec {python} {folder}/tensorrt_llm/1/supervise.py run --exit-timeout 30 {ports} -- {python} -c "{server}"
"""
_SERVER = """\
import pathlib, signal, sys, time
pathlib.Path('/proc/self/comm').write_text('tritonserver')
signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1), print('drained', flush=True), sys.exit()))
print('serving', flush=True)
signal.pause()
"""


@pytest.mark.slow
@pytest.mark.parametrize("runs", [True, False], ids=["while it serves", "before the container runs"])
def test_one_rank_in_a_container_drains_when_the_job_is_told_to_end(script, launchable, tmp_path, runs):
    """start.sh is replaced: its supervisor is the real one, its server needs a second to drain."""
    folder = tmp_path / "tiny"
    shutil.copytree(launchable / "tiny", folder)
    own = ["--image", "mine", "--env", "XDG_RUNTIME_DIR=/none", "--python", sys.executable]
    text = script("tiny", *own).replace(str(launchable / "tiny"), str(folder))
    ports = " ".join(port_options(free_ports(3)))
    start = _START.format(folder=folder, python=shlex.quote(sys.executable), ports=ports, server=_SERVER)
    (folder / "start.sh").write_text(start)
    srun = recording(tmp_path / "bin", "srun", after=_SRUN)
    recording(tmp_path / "bin", "scontrol", after="print('node1')")
    environment = os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "node1"}
    log = tmp_path / "log"
    with log.open("wb") as output:
        job = subprocess.Popen(["bash", "-c", text], env=environment, stdout=output, stderr=output)
    wait_for((folder / "begun").exists, log.read_text)
    if runs:
        (folder / "goes").touch()
        wait_for(lambda: "serving" in log.read_text(), log.read_text)
    job.send_signal(signal.SIGTERM)
    assert (job.wait(PATIENCE_S) == 0, "drained" in log.read_text()) == (runs, runs), log.read_text()
    assert "forcing" not in log.read_text()
    assert srun.calls[-1]["env"]["XDG_RUNTIME_DIR"] == "/dev/shm"


@pytest.mark.slow
def test_directives(script):
    end = f"B:TERM@{StopTimes(exit_timeout_s=90).docker_stop_timeout_s}"
    plain = {"nodes": "2", "ntasks-per-node": "8", "gpus-per-node": "8", "exclusive": "", "mem": "0"}
    plain |= {"job-name": "two", "output": "two-%j.log", "open-mode": "append", "requeue": ""}
    cases = {
        "": plain,
        "--exit-timeout 90": {"signal": end},
        "--job-name a --log /logs/%j --no-requeue": {"job-name": "a", "output": "/logs/%j", "no-requeue": ""},
        "--account me --time 1-00:00:00": {"account": "me", "time": "1-00:00:00"},
        "--gpus 9 --sbatch=--qos=high": {"gpus-per-node": "9", "qos": "high"},
    }
    for options, expected in cases.items():
        assert expected.items() <= directives(script("two", *options.split())).items()
    # Without GPUs a node is shared.
    assert not {"gpus-per-node", "exclusive", "mem"} & set(directives(script("one", "--gpus", "none")))


@pytest.mark.slow
def test_invalid_options_are_refused(launchable):
    cases = [
        ("one", ["--partition", "a b"], "--partition: a line of #SBATCH takes no blanks"),
        ("one", ["--log", "it's"], "--log: a line of #SBATCH takes no blanks"),
        ("one", ["--sbatch", "qos"], "--sbatch: expected an option of sbatch"),
        ("one", ["--gpus", "all"], "--gpus: expected a number for each node, or none"),
        ("one", ["--gpus", "4"], "takes 8 GPUs of each node, got 4"),
        ("one", ["--ready-file", "/a b/ready"], "/a b: pyxis mounts no path"),
        ("one", ["--cache-dir", "/a,b"], "/a,b/nvcr.io_nvidia_tritonserver_26.07-trtllm-python-py3-h200: pyxis mounts"),
        ("one", ["--no-container", "--image", "mine"], "are for a container, and --no-container uses none"),
        ("tiny", [], "was planned for no container: name with --image one"),
        ("one", ["--no-container", "--", "--http-port=1"], "expected HTTP_PORT to be set"),
    ]
    for name, options, expected in cases:
        refused = run_command("launch", "slurm", str(launchable / name), *options)
        [line] = refused.stderr.splitlines()
        assert (refused.returncode, expected in line) == (2, True), line


def test_images_are_named_as_enroot_does():
    images = {
        "nvcr.io/nvidia/tritonserver:26.07": "nvcr.io#nvidia/tritonserver:26.07",
        "localhost:5000/mine": "localhost:5000#mine",
    }
    kept = ("library/ubuntu", "ubuntu:24.04", "/images/triton.sqsh", "nvcr.io#nvidia/tritonserver")
    images |= {image: image for image in kept}
    assert {image: slurm.enroot_image(image) for image in images} == images


@pytest.mark.slow
def test_submit_hands_the_script_to_sbatch(script, launchable, tmp_path, monkeypatch):
    sbatch = recording(tmp_path / "bin", "sbatch", reads=True, after="sys.exit(os.path.exists('fails'))")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    submit = ["launch", "slurm", str(launchable / "two"), "--time", "1-0", "--submit"]
    assert run_command(*submit).returncode == 0
    [call] = sbatch.calls
    assert (call["args"], call["stdin"]) == (["--parsable"], script("two", "--time", "1-0"))
    (tmp_path / "fails").touch()
    assert run_command(*submit).returncode == 1
