"""Real tritonservers with models of a few lines. Their processes are known by the test's folder in their arguments."""

import contextlib
import os
import queue
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton

from deepseek_triton_tools.cli import serve as serve_module
from deepseek_triton_tools.cli.serve import serve
from deepseek_triton_tools.server import server_process
from deepseek_triton_tools.server.server_process import ServeOptions, ServerProcess, free_port
from deepseek_triton_tools.tool_errors import PortError, RepositoryError, ServerFailedError, ToolError
from support.commands import run_command
from support.supervising import name_of
from support.waiting import PATIENCE_S, clients_leave, wait_for

pytestmark = pytest.mark.slow

CONFIG = """\
backend: "python"
input [ { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "text_output" data_type: TYPE_STRING dims: [ 1 ] } ]
instance_group [ { kind: KIND_CPU } ]
"""

IDENTITY = """\
import time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        pb_utils.Logger.log_info("initializing")

    def execute(self, requests):
        inputs = [pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("text_output", values)]) for values in inputs]

    def finalize(self):
        pb_utils.Logger.log_warn("finalizing")
"""


def write_model(repository, name="echo", *, model=IDENTITY, config=CONFIG):
    version = repository / name / "1"
    version.mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(config)
    if model is not None:
        (version / "model.py").write_text(model)
    return repository


@pytest.fixture(autouse=True)
def _logs_of_failures_stay_here(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def repository(tmp_path):
    return write_model(tmp_path / "repository")


AUTOMATIC = {"http_port": "auto", "grpc_port": "auto", "metrics_port": "auto"}


def automatic(repository, **options):
    return ServeOptions(repository=repository, **{**AUTOMATIC, **options})


def processes(folder):
    """Processes with `folder` in their arguments, as tritonserver and its stubs have it."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if str(folder).encode() in path.read_bytes():
                pids.append(int(path.parent.name))
    return pids


def triton_processes(folder):
    """Those among them that are the server and its stubs. The others are the supervisor and its guard."""
    return [pid for pid in processes(folder) if name_of(pid).startswith("triton")]


def arguments_of(pid):
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


class Serving:
    """`serve` in a process of its own; its stdout, its stderr and the server's log are files."""

    def __init__(self, folder, repository, exit_timeout_secs):
        self.repository, self.log = repository, folder / "server.log"
        self.stdout, self.stderr = folder / "stdout", folder / "stderr"
        ports = ["--http-port", "auto", "--grpc-port", "auto", "--metrics-port", "auto"]
        options = [*ports, "--log-file", str(self.log), "--exit-timeout", str(exit_timeout_secs)]
        command = [sys.executable, "-m", "deepseek_triton_tools.cli.main", "serve", str(repository), *options]
        with self.stdout.open("wb") as stdout, self.stderr.open("wb") as stderr:
            self.process = subprocess.Popen(command, stdout=stdout, stderr=stderr)

    def lines_until_ready(self):
        wait_for(
            lambda: "try it: " in self.stdout.read_text() or self.process.poll() is not None, self.stderr.read_text
        )
        assert "try it: " in self.stdout.read_text(), self.stderr.read_text()
        return self.stdout.read_text().splitlines()

    def wait(self):
        return self.process.wait(PATIENCE_S)

    def children(self):
        return [pid for pid in processes(self.repository) if pid != self.process.pid]

    def has_logged(self, text):
        return self.log.is_file() and text in self.log.read_text()


@pytest.fixture
def start(tmp_path):
    with contextlib.ExitStack() as stack:

        def started(repository, exit_timeout_secs=30):
            serving = Serving(tmp_path, repository, exit_timeout_secs)
            stack.enter_context(serving.process)
            stack.callback(serving.process.kill)
            return serving

        yield started


def test_a_server_answers_and_leaves_nothing_behind(tmp_path):
    """Also in a folder whose name a shell would quote. The repository is not replaced while it is served."""
    repository = write_model(tmp_path / "Zoë", "tensorrt_llm")
    (repository / "tensorrt_llm/deepseek-triton.json").write_text('{"files": {}}')
    build = ["build", "tiny", "--output", str(repository), "--force"]
    progress = []
    with ServerProcess.serving(repository, on_progress=progress.append) as server:
        answer = httpx.post(f"{server.http_url}/v2/models/tensorrt_llm/generate", json={"text_input": "hello"})
        metrics = httpx.get(server.metrics_url)
        with socket.create_connection((server.address, server.grpc_port)):
            assert len(triton_processes(tmp_path)) == 2
        regions = {argument for argument in arguments_of(server.pid) if "shm-region-prefix-name" in argument}
        [prefix] = {argument.rpartition("=")[2] for argument in regions}
        assert list(Path("/dev/shm").glob(f"{prefix}*"))
        refused = run_command(*build)
        assert (refused.returncode, "a server runs from this folder" in refused.stderr) == (1, True)
    assert answer.json()["text_output"] == "hello"
    assert "nv_inference_request_success" in metrics.text
    assert any(report.last_message for report in progress)
    assert server.returncode == 0
    assert processes(tmp_path) == []
    assert not list(Path("/dev/shm").glob(f"{prefix}*"))
    assert any("finalizing" in line for line in server.log_tail)
    assert run_command(*build).returncode == 0


RAISES = "class TritonPythonModel:\n    def initialize(self, args):\n        "
DIES = RAISES + "import os; print('last words', flush=True); os._exit(3)"
LOADS_FOR_EVER = IDENTITY.replace('"initializing")', '"loading"); time.sleep(1000)')


FAILURES = {
    "raises": (RAISES + "raise ValueError('no\\nGPU')", CONFIG, "model 'broken' failed to load: no GPU"),
    "imports": ("import nowhere", CONFIG, "ModuleNotFoundError: No module named 'nowhere'"),
    "lacks": (None, CONFIG, "Python model file not found in"),
    "misspells": (IDENTITY, CONFIG + "nonsense: 1", 'line 5, column 9: .* no field named "nonsense"'),
    "other": (IDENTITY, CONFIG.replace("python", "tensorrtllm"), "backend 'tensorrtllm'"),
    "dies": (DIES, CONFIG, "its Python process died while loading .*; its last words: last words"),
}


def test_a_model_that_fails_is_one_line_and_no_process(tmp_path):
    with contextlib.ExitStack() as started:
        servers = {}
        for name, (model, config, _) in FAILURES.items():
            repository = write_model(tmp_path / name / "repository", "broken", model=model, config=config)
            server = ServerProcess(automatic(repository, log_file=tmp_path / name / "server.log"))
            servers[name] = started.enter_context(server)
            server.start()
        for name, server in servers.items():
            log = tmp_path / name / "server.log"
            with pytest.raises(ServerFailedError, match=FAILURES[name][2]) as caught:
                server.wait_until_ready()
            assert caught.value.exit_code == 1
            assert str(caught.value).endswith(f" (the server's log: {log})")
            assert "\n" not in str(caught.value)
            assert log.read_text().splitlines() == server.log_tail
    assert processes(tmp_path) == []


def test_one_broken_model_of_two_is_named(repository, tmp_path):
    write_model(repository, "second", model=RAISES + "raise KeyError('engine')")
    with pytest.raises(ServerFailedError, match="'second' failed to load: KeyError: 'engine'") as caught:
        ServerProcess.serving(repository)
    (log,) = tmp_path.glob("deepseek-triton-server-*.log")
    assert str(log) in str(caught.value)
    assert processes(tmp_path) == []


def test_only_what_is_loaded_is_listed(repository):
    write_model(repository, "another")
    explicit = ("--model-control-mode", "explicit")
    with ServerProcess.serving(repository, server_args=(*explicit, "--load-model=echo")) as server:
        first, *_, last = serve_module._ready_text(server).splitlines()
        assert (first[:13], "/v2/models/echo/generate" in last) == ("ready: echo (", True)
    with ServerProcess.serving(repository, server_args=explicit) as server:
        first, *_, last = serve_module._ready_text(server).splitlines()
        assert first.startswith("ready: no model is loaded (")
        subprocess.run(shlex.split(last.split(": ", 1)[1]), capture_output=True, check=True)
        assert httpx.get(f"{server.http_url}/v2/models/another/ready").is_success


def test_sigterm_reaches_the_server_and_its_exit_code_comes_back(repository, start):
    serving = start(repository)
    ready = serving.lines_until_ready()
    assert ready[0].startswith("ready: echo ")
    _, _, url, _, body = shlex.split(ready[-1].removeprefix("try it: "))
    answer = httpx.post(url, content=body, headers={"Connection": "close"})
    clients_leave()
    serving.process.send_signal(signal.SIGTERM)
    assert answer.json()["text_output"] == "The capital of France is"
    assert serving.wait() == 0
    assert serving.has_logged("Signal (15) received.")
    assert serving.has_logged("finalizing")
    assert serving.children() == []


def test_launch_stop_knows_it(repository, start):
    command = [sys.executable, "-m", "deepseek_triton_tools.cli.main", "launch", "stop", str(repository)]
    for options, code in ([], 0), (["--now"], 128 + signal.SIGKILL):
        serving = start(repository)
        serving.lines_until_ready()
        done = subprocess.run([*command, *options], capture_output=True, text=True, check=True)
        assert (done.stdout.endswith(": stopped\n"), serving.wait()) == (True, code)
        assert "memory" not in serving.stderr.read_text()


def test_nothing_outlives_a_serve_that_was_killed(repository, start):
    serving = start(repository)
    serving.lines_until_ready()
    assert len(triton_processes(repository)) == 2
    serving.process.kill()
    wait_for(lambda: not processes(repository))


def test_a_port_is_taken_while_the_model_loads_and_free_afterwards(tmp_path):
    repository = write_model(tmp_path / "repository", model=LOADS_FOR_EVER)
    with ServerProcess(automatic(repository)) as first:
        first.start()
        with pytest.raises(PortError, match=f"port {first.http_port} is reserved"):
            ServerProcess(automatic(repository, http_port=first.http_port)).start()
    with ServerProcess(automatic(repository, http_port=first.http_port)) as second:
        second.start()
        assert second.http_port == first.http_port


def test_a_signal_while_loading_ends_it(tmp_path, start):
    serving = start(write_model(tmp_path / "repository", model=LOADS_FOR_EVER))
    wait_for(lambda: serving.has_logged('"loading"'))
    serving.process.send_signal(signal.SIGINT)
    assert serving.wait() == 128 + signal.SIGINT
    assert processes(tmp_path) == []


def test_a_second_signal_kills(tmp_path, start):
    hanging = IDENTITY.replace('"finalizing")', '"finalizing"); time.sleep(1000)')
    serving = start(write_model(tmp_path / "repository", model=hanging))
    serving.lines_until_ready()
    serving.process.send_signal(signal.SIGTERM)
    wait_for(lambda: serving.has_logged("Signal (15) received."))
    serving.process.send_signal(signal.SIGTERM)
    assert serving.wait() == 128 + signal.SIGKILL
    assert processes(tmp_path) == []


@pytest.mark.parametrize(
    "tensor", ["text_input", pytest.param("an input that the model lacks", marks=pytest.mark.nightly)]
)
def test_a_server_whose_client_keeps_a_grpc_stream_ends_all_the_same(repository, start, tensor):
    serving = start(repository, exit_timeout_secs=1)
    address = next(line.split()[1] for line in serving.lines_until_ready() if line.startswith("  gRPC"))
    with triton.InferenceServerClient(address) as client:
        answers: queue.Queue[object] = queue.Queue()
        client.start_stream(lambda result, error: answers.put(error))
        text = triton.InferInput(tensor, [1], "BYTES")
        text.set_data_from_numpy(np.array([b"hello"], dtype=np.object_))
        client.async_stream_infer("echo", [text])
        assert (answers.get(timeout=60) is None) == (tensor == "text_input")
        serving.process.send_signal(signal.SIGTERM)
        assert serving.wait() == 128 + signal.SIGKILL
    assert "tritonserver had not ended 16 s after the stop and was killed; " in serving.stderr.read_text()
    assert processes(repository) == []


def test_a_server_that_is_killed_is_a_failure_with_its_code(repository, start):
    serving = start(repository)
    serving.lines_until_ready()
    (server,) = (pid for pid in triton_processes(repository) if name_of(pid) == "tritonserver")
    os.kill(server, signal.SIGKILL)
    assert serving.wait() == 128 + signal.SIGKILL
    assert "ended by signal 9; was memory short?" in serving.stderr.read_text()
    assert serving.children() == []


def test_a_port_that_is_taken_or_going_to_be_is_not_chosen(monkeypatch):
    """A server listens only when its model has loaded. Until then its supervisor has reserved the port."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket(socket.AF_UNIX) as reservation:
        reserved, chosen, expected = (free_port("127.0.0.1") for _ in range(3))
        reservation.bind(f"\0deepseek-triton/port/{reserved}")
        order = [listener.getsockname()[1], reserved, chosen, expected]
        monkeypatch.setattr(server_process.random, "sample", lambda below, most: order)
        assert free_port("127.0.0.1", [chosen]) == expected


def test_ports_that_cannot_be_listened_on(repository, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        for options, expected in [
            ({"grpc_port": port}, rf"port {port} for gRPC is taken by process {os.getpid()} \(.*--grpc-port"),
            ({"http_port": 9000, "grpc_port": 9000}, "a port each, got 9000, 9000, "),
            ({"host": "203.0.113.1"}, r"can't listen on 203.0.113.1"),
        ]:
            with pytest.raises(PortError, match=expected) as caught:
                serve(automatic(repository, **options))
            assert caught.value.exit_code == 2
    assert processes(tmp_path) == []


def test_an_automatic_port_that_was_lost_is_chosen_anew(repository, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as thief:
        lost = [thief.getsockname()[1]]
        monkeypatch.setattr(server_process, "free_port", lambda *given: lost.pop() if lost else free_port(*given))
        with ServerProcess.serving(repository) as server:
            assert httpx.get(f"{server.http_url}/v2/health/ready").is_success
    assert not lost


def test_a_stop_that_was_requested_before_the_start_holds(repository, tmp_path):
    server = ServerProcess(automatic(repository))
    server.request_stop(signal.SIGINT)
    server.start()
    assert server.wait_until_ready() is False
    assert server.returncode == 128 + signal.SIGINT
    assert processes(tmp_path) == []


def test_a_full_disk_does_not_stop_the_server(repository, tmp_path, capfd):
    with ServerProcess(automatic(repository, log_file=Path("/dev/full"))) as server:
        server.start()
        assert server.wait_until_ready()
    assert server.returncode == 0
    assert capfd.readouterr().err == "deepseek-triton serve: the log in /dev/full ends: No space left on device\n"
    broken = write_model(tmp_path / "broken", model=None)
    with ServerProcess(automatic(broken, log_file=Path("/dev/full"))) as server:
        server.start()
        with pytest.raises(ServerFailedError) as caught:
            server.wait_until_ready()
    [kept] = re.findall(r"the server's log: (.+)\)$", str(caught.value))  # not the one that was cut off
    assert Path(kept).read_text()


def test_what_cannot_be_served_is_refused_before_anything_starts(repository, tmp_path):
    (tmp_path / "empty").mkdir()
    folders = {
        "missing": "there is no folder",
        "empty": "holds no model: expected .*/MODEL/config.pbtxt",
        "repository/echo": "give the folder above it",
    }
    for folder, expected in folders.items():
        with pytest.raises(RepositoryError, match=expected):
            serve(ServeOptions(repository=tmp_path / folder))
    health = ("--http-restricted-api", "inference,health:key=value")
    for arguments in (("--http-port=9000",), ("--log-verbose=1", "--http-port", "9000"), health):
        with pytest.raises(ToolError, match=r"use serve's own --http-port|--http-restricted-api") as caught:
            serve(ServeOptions(repository=repository, server_args=arguments))
        assert caught.value.exit_code == 2
    with pytest.raises(ToolError, match="--allow-http is off") as caught:
        serve(automatic(repository, server_args=("--allow-http=false",)))
    assert caught.value.exit_code == 2
    with pytest.raises(ToolError, match="the log can't be written to"):
        ServerProcess(automatic(repository, log_file=tmp_path / "missing/server.log")).start()
    ServerProcess(automatic(repository)).stop()  # of a server that never started
    assert processes(tmp_path) == []


def test_arguments_go_to_the_server(repository):
    with pytest.raises(ServerFailedError, match="unrecognized option '--nonsense'"):
        ServerProcess.serving(repository, server_args=("--nonsense",))


def test_the_lines_of_a_ready_server_that_are_shown():
    for line, shown in [
        ('I1120 21:42:15.68 7144 model.py:5] "engine stopped"', True),
        ('W1120 21:42:15.68 7144 server.cc:5] "careful"', True),
        ('I1120 21:42:15.68 7144 server.cc:5] "chatter"', False),
    ]:
        assert serve_module.is_worth_showing(line) is shown
