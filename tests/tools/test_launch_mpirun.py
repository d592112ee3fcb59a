"""`launch mpirun`: the hosts, and the command that start.sh runs. `launch ssh-setup`: the script that sets up ssh."""

import os
import shutil
import socket
import subprocess

import pytest

from deepseek_triton_tools.launching import mpirun
from support.commands import run_command
from support.recording import become_by, recording
from support.supervising import free_ports, port_options
from support.waiting import wait_for


@pytest.fixture
def tmp_path(plain_path):
    return plain_path


@pytest.fixture
def repository(launchable):
    """R1 for two nodes with eight GPUs each."""
    return launchable / "two"


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """A recording mpirun, and the other programs that must exist."""
    recorded = recording(tmp_path / "bin", "mpirun", after="sys.exit(9)")
    for name in ("trtllm-llmapi-launch", "tritonserver"):
        recording(tmp_path / "bin", name)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return recorded


@pytest.fixture
def printed(repository):
    def run(*argv, form="mpirun", code=0):
        done = run_command("launch", form, str(repository), *argv)
        assert done.returncode == code, done.stderr
        return done

    return run


def follows(args, *words):
    return any(tuple(args[n : n + len(words)]) == words for n in range(len(args)))


@pytest.mark.slow
def test_what_is_printed_is_what_is_run(printed, programs, repository, monkeypatch):
    ports = port_options(free_ports(3))
    options = ["--hosts", "localhost,node2", "--ssh-port", "2233", "--ssh-args", "-i /k", "--interface", "lo", *ports]
    text = printed(*options).stdout
    command = become_by(monkeypatch, "launch", "mpirun", str(repository), *options, "--submit")
    done = subprocess.run(command, capture_output=True)
    assert command == ["bash", "-c", text, "launch"]
    assert done.returncode == 9, done.stderr
    [call] = programs.calls
    assert follows(call["args"], "-H", "localhost:8,node2:8")
    assert follows(call["args"], "-mca", "plm_rsh_args", "-p 2233 -i /k")
    assert follows(call["args"], "-mca", "btl_tcp_if_include", "lo")
    assert follows(call["args"], "-n", "16")
    assert call["env"]["NCCL_SOCKET_IFNAME"] == "lo"
    assert "#     mpirun \\\n" in text


@pytest.mark.slow
def test_invalid_hosts_are_refused(printed, tmp_path):
    (tmp_path / "hosts").write_text("a slots=4\nb c\nd;e\n")
    cases = {
        "--hosts a": ["takes 2 nodes, got 1: a"],
        "--hosts a,b,c": ["takes 2 nodes, got 3: a, b, c"],
        "--hosts a,a": ["hosts are named twice: a"],
        "--hosts a,$(x)": ["$(x) can't be a host"],
        "--hosts a,::1": ["::1 can't be a host"],
        "--hosts a,-oProxyCommand=x": ["-oProxyCommand=x can't be a host"],
        "--hosts a,b --ssh-args='/my,key'": ["--ssh-args: mpirun splits them at blanks"],
        f"--host-file {tmp_path}/nowhere": ["--host-file"],
        f"--host-file {tmp_path}/hosts": ["hosts:1: the plan has 8", "hosts:2: expected a", "hosts:3: expected a"],
    }
    for words, expected in cases.items():
        [line] = printed(*words.split(), code=2).stderr.splitlines()
        assert [part for part in expected if part not in line] == [], line


def test_what_start_sh_would_take_from_the_environment_is_said(printed, monkeypatch):
    said = {"HOSTS": "localhost,node2", "SSH_PORT": "2233", "SSH_ARGS": "-v", "INTERFACE": "lo"}
    said |= {"HTTP_ADDRESS": "10.0.0.7", "GRPC_ADDRESS": "10.0.0.8", "READY_FILE": "/run/ready"}
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    lines = printed().stdout.splitlines()
    assert {f"export {name}={value}" for name, value in said.items()} < set(lines)
    assert "export HOSTS=localhost,other" in printed("--hosts", "localhost,other").stdout


def test_host_files_are_as_mpiruns(tmp_path):
    files = {
        "a\nb\n": ("a", "b"),
        "# two\n\na slots=8\n  b slots=8 max_slots=8  # the other\n": ("a", "b"),
        "a:8\nb:8": ("a", "b"),
        "10.0.0.1\nnode-2.cluster": ("10.0.0.1", "node-2.cluster"),
    }
    for text, expected in files.items():
        (tmp_path / "hosts").write_text(text)
        assert mpirun.read_host_file(tmp_path / "hosts", 8) == expected


@pytest.mark.slow
def test_what_is_noted(printed, programs, monkeypatch, tmp_path):
    assert "note: 192.0.2.1 is not this machine" in printed("--hosts", "192.0.2.1,localhost").stderr
    assert printed("--hosts", "localhost,192.0.2.1").stderr == ""
    err = printed("--hosts", "localhost,b", "--env", "NCCL_DEBUG=INFO", "--env", "MINE=1").stderr
    assert err.startswith("note: --env MINE: start.sh hands only the variables of the engine")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    hosts = ["--hosts", "localhost,b"]
    assert "trtllm-llmapi-launch, tritonserver; run it in nvcr.io/" in printed(*hosts).stderr
    assert "on the first node (launch ssh-setup starts that container on each node)" in printed(*hosts).stderr
    assert printed(*hosts, form="ssh-setup").stderr == ""


@pytest.fixture
def setup(printed, tmp_path, programs):
    """Runs single steps of the script, without a container."""
    script = tmp_path / "setup.sh"
    [port] = free_ports(1)
    script.write_text(printed("--hosts", "localhost,127.0.0.1", "--ssh-port", str(port), form="ssh-setup").stdout)
    environment = {**os.environ, "KEYS": str(tmp_path / "keys"), "CONTAINER": ""}

    def run(*step, code=0, **more):
        command = ["bash", str(script), *step]
        done = subprocess.run(command, env=environment | more, capture_output=True, text=True, timeout=60)
        assert done.returncode == code, done.stderr
        return done.stdout or done.stderr

    run.port = port
    return run


def test_the_hello_has_the_flags_of_the_launch(setup, programs):
    setup("hello", code=9)
    assert follows(programs.args, "-H", "localhost:8,127.0.0.1:8")
    assert follows(programs.args, "-n", "16", "python3", "-c")
    [ssh_args] = [programs.args[n + 1] for n, word in enumerate(programs.args) if word == "plm_rsh_args"]
    assert ssh_args.startswith(f"-p {setup.port} -i ")
    assert "StrictHostKeyChecking=yes" in ssh_args
    compile(programs.args[-1], "hello", "exec")


def test_steps_that_need_no_keys(setup, repository, programs):
    assert "expected keys, container, sshd" in setup("all-of-it", code=2)
    for keys in ("relative", "/with blank", "/quo'te"):
        assert "KEYS: expected an absolute path" in setup("keys", code=2, KEYS=keys)
    printed = setup("command").splitlines()[-1]
    assert f"SSH_PORT={setup.port}" in printed
    subprocess.run(["bash", "-c", printed.replace("env ", "env DRY_RUN=1 ", 1)], check=True, capture_output=True)


def test_keys_stay(setup, tmp_path):
    def keys():
        setup("keys")
        return {path.name: path.read_bytes() for path in (tmp_path / "keys").iterdir()}

    first = keys()
    assert keys() == first
    assert (tmp_path / "keys").stat().st_mode & 0o77 == 0
    assert f"[127.0.0.1]:{setup.port} ssh-ed25519 " in first["known_hosts"].decode()


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh is not installed")
def test_ssh_finds_the_hosts_key(setup, tmp_path):
    for port, name in (("22", "localhost"), ("2233", "[localhost]:2233")):
        setup("keys", PORT=port)
        find = ["ssh-keygen", "-F", name, "-f", str(tmp_path / "keys/known_hosts")]
        assert subprocess.run(find, capture_output=True).returncode == 0, port


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/usr/sbin/sshd"), reason="sshd is not installed")
@pytest.mark.skipif(os.geteuid() != 0, reason="a login without PAM, to an account of any state, needs root")
def test_ssh_reaches_the_sshd_that_the_script_starts(setup, tmp_path):
    home = {"HOME": str(tmp_path)}
    setup("keys", **home)
    assert "ssh can't reach localhost" in setup("check", code=1, **home)
    try:
        assert "listens at port" in setup("sshd", **home)
        wait_for(lambda: is_open(setup.port))
        assert setup("check", **home) == "check: localhost\ncheck: 127.0.0.1\n"
        assert "is already in use" in setup("sshd", **home)
    finally:
        end_sshd(setup.port)


def is_open(port):
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def end_sshd(port):
    """End the sshd that the test started; its port tells which it is."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                words = file.read().split(b"\0")
        except OSError:
            continue
        if any(b"sshd" in word for word in words[:2]) and str(port).encode() in b" ".join(words).split():
            os.kill(int(pid), 15)


@pytest.mark.slow
def test_the_containers_are_those_of_docker(printed, launchable, tmp_path, programs, monkeypatch):
    """docker refuses to mount a folder that does not exist."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    docker = recording(tmp_path / "bin", "docker", after="sys.exit('inspect' in sys.argv)")
    options = ["--hosts", "localhost,b", "--gpus", "8", "--name", "r1", "--ready-file", str(tmp_path / "run/ready")]
    script = run_command("launch", "ssh-setup", str(launchable / "r1x2"), *options, "--ssh-args=-4 -v").stdout
    subprocess.run(["bash", "-c", script, "setup", "container"], env={**os.environ, "KEYS": "/keys"}, check=True)
    args = docker.calls[-1]["args"]
    assert (args[:3], args[-2:]) == (["run", "--name", "r1"], ["sleep", "infinity"])
    assert {"--detach", "--rm"} & set(args) == {"--detach"}
    assert follows(args, "--gpus", "8")
    assert ("/dev/infiniband" in args, "IPC_LOCK" in args) == (os.path.exists("/dev/infiniband"),) * 2
    assert [text in script for text in ("--device /dev/infiniband --cap-add IPC_LOCK", "$port\"' -4 -v'\"")] == [
        True,
        True,
    ]
    assert "type=bind,source=/keys,target=/keys,readonly" in args
    sources = [word.split("source=")[1].split(",")[0] for word in args if "source=" in word]
    assert {str(tmp_path / "hub"), str(tmp_path / "run")} < set(sources)
    assert [source for source in sources if source != "/keys" and not os.path.isdir(source)] == []


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="Open MPI is not installed")
def test_mpirun_itself_takes_the_line(printed):
    """The whole line runs, except that each rank is only an echo. The two hosts are two names of this machine."""
    text = printed("--hosts", "localhost,127.0.0.1", "--interface", "lo", form="ssh-setup").stdout
    [line] = [line for line in text.splitlines() if line.startswith("  inside env ")]
    command = line.removeprefix("  inside ").partition(" python3 -c ")[0] + " echo rank"
    done = subprocess.run(["bash", "-c", f"ssh_args=-x; {command}"], capture_output=True, text=True)
    assert done.stdout.split() == ["rank"] * 16, done.stderr
