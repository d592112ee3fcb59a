"""Neither tritonserver nor the model's process outlives the other unnoticed."""

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import deepseek_backend
from deepseek_triton_client import Client
from deepseek_triton_tools.server.server_process import ServerProcess
from support.server_processes import assert_gone, children_of
from support.servers import MODEL_KILLED, build, url
from support.web import web


@pytest.fixture
def server(tmp_path):
    with ServerProcess.serving(build(tmp_path / "repository", "tiny", "--engine", "simulated")) as serving:
        yield serving


def test_a_model_process_that_dies_ends_the_server(server):
    stub, guard = children_of(server.pid)
    os.kill(stub, signal.SIGKILL)

    assert server.wait() - 128 in MODEL_KILLED
    assert_gone(stub, guard)
    if server.wait() == 128 + signal.SIGKILL:
        assert "the model's process has died" in str(server.failure())
    else:
        assert any("lock_exception" in line for line in server.log_tail)


def test_a_server_that_dies_leaves_nothing_behind(server):
    stub, guard = children_of(server.pid)
    os.kill(server.pid, signal.SIGKILL)

    assert_gone(stub, guard)


def test_a_server_whose_log_nobody_reads_any_more_leaves_nothing_behind(tmp_path):
    """Whoever read it died first: what the guard has to say must not keep it from its work."""
    repository = build(tmp_path / "repository", "tiny", "--engine", "simulated")
    reader = (
        "import sys; from pathlib import Path; from deepseek_triton_tools.server.server_process import ServerProcess\n"
        "with ServerProcess.serving(Path(sys.argv[1])) as server: print(server.pid, flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", reader, str(repository)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        server = int(process.stdout.readline())
        stub, guard = children_of(server)
        process.kill()

    assert_gone(server, stub, guard)


GUARDED = """\
import os, resource, sys, time
if sys.argv[2:]:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    [os.dup2(0, number) for number in range(3, 1100)]
from deepseek_backend import triton_process
triton_process._LOOK_S = 0.01
triton_process.ProcessGuard(int(sys.argv[1]), []).arm()
print("armed", flush=True)
time.sleep(1000)
"""
READ_ONLY_PROC = ["unshare", "--mount", "bash", "-c", 'mount -o remount,bind,ro /proc && exec "$@"', "-"]


@pytest.mark.parametrize(("before", "options"), [([], ["too many for select(2)"]), (READ_ONLY_PROC, []), ([], [])])
def test_a_guard_guards_in_narrow_surroundings_too_and_from_a_stop(before, options):
    if before and subprocess.run([*before, "true"], capture_output=True, check=False).returncode:
        pytest.skip("nothing can be mounted here")
    if options and resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 1100:
        pytest.skip("this user may not have so many files open")
    environment = {**os.environ, "PYTHONPATH": str(Path(deepseek_backend.__file__).parents[1])}
    with subprocess.Popen(["sleep", "1000"]) as guarded:
        command = [*before, sys.executable, "-c", GUARDED, str(guarded.pid), *options]
        with subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as stub:
            try:
                assert stub.stdout.readline() == b"armed\n"
                if not before and not options:  # a stop, which doesn't count as long as its server is stopped too
                    guarded.send_signal(signal.SIGSTOP)
                    stub.send_signal(signal.SIGSTOP)
                    time.sleep(0.5)
                    assert stub.poll() is None
                    guarded.send_signal(signal.SIGCONT)
                    assert_gone(stub.pid)
                stub.kill()
                assert_gone(guarded.pid)
            finally:
                guarded.kill()


WITH_AN_ENGINE = """\
import os, subprocess, sys, time
from deepseek_backend.engines.vllm.loading import own_process_group
from deepseek_backend.triton_process import ProcessGuard
ProcessGuard(os.getppid(), [])
with own_process_group():
    core = subprocess.Popen(["bash", "-c", "sleep 1000 & echo $!; wait"], stdout=subprocess.PIPE, text=True)
print(os.getpid(), os.getpgrp() == os.getpgid(os.getppid()), core.pid, core.stdout.readline(), flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("killed", ["stub", "group"])
def test_the_processes_of_an_engine_end_with_the_model_process(killed):
    """They are in another process group than the server and the stub, which is killed alone or with all its group."""
    environment = {**os.environ, "PYTHONPATH": str(Path(deepseek_backend.__file__).parents[1])}
    command = ["bash", "-c", '"$@"; exit', "server", sys.executable, "-c", WITH_AN_ENGINE]
    with subprocess.Popen(
        command, env=environment, start_new_session=True, stdout=subprocess.PIPE, text=True
    ) as server:
        stub, is_back, core, worker = server.stdout.readline().split()
        assert is_back == "True"
        assert os.getpgid(int(core)) == os.getpgid(int(worker)) == int(stub)
        if killed == "stub":
            os.kill(int(stub), signal.SIGKILL)
        else:
            os.killpg(server.pid, signal.SIGKILL)
        assert_gone(int(stub), int(core), int(worker))


def test_a_guard_that_is_killed_hurts_nobody(server):
    _, guard = children_of(server.pid)
    os.kill(guard, signal.SIGKILL)

    with Client(url(server, "http")) as client:
        assert client.generate("hello", max_tokens=3).num_output_tokens == 3
    server.stop()
    assert server.returncode == 0


def test_an_unloaded_model_takes_its_guard_along_and_not_the_server(loaded_server):
    stub, guard = children_of(loaded_server.pid)
    web.post(f"{loaded_server.http_url}/v2/repository/models/tensorrt_llm/unload").raise_for_status()

    assert_gone(stub, guard)
    assert web.get(f"{loaded_server.http_url}/v2/health/live").status_code == 200
