"""A stub notices its server's exit in time to end what is open, and can end a server that nothing else would end.

With a model of a few lines: whatever an engine does is kept out of it.
"""

import os
import signal
import threading
import time
from pathlib import Path

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton

from deepseek_triton_build import model_repository
from deepseek_triton_tools.server.server_process import ServerProcess
from support.servers import url
from support.supervising import runs
from support.waiting import PATIENCE_S
from support.web import web

CONFIG = """\
name: "endless"
backend: "python"
max_batch_size: 0
model_transaction_policy { decoupled: true }
input [ { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "text_output" data_type: TYPE_STRING dims: [ 1 ] } ]
instance_group [ { kind: KIND_CPU count: 1 } ]
"""
MODEL = """\
import os, sys, threading, time
sys.path.append(VERSION_DIR)
import numpy as np
import triton_python_backend_utils as pb_utils
from deepseek_backend.triton_process import ExitWatch, end_server, own_regions, parent_server

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL

class TritonPythonModel:
    def initialize(self, args):
        self.open = []
        self.fatal = False
        self.watch = ExitWatch(parent_server())
        print("stub", os.getpid(), "exit timeout", self.watch.exit_timeout_s, flush=True)
        print("regions", *own_regions(), flush=True)
        threading.Thread(target=self.run, daemon=True).start()

    def execute(self, requests):
        for request in requests:
            self.open.append(request.get_response_sender())
            self.fatal = self.fatal or "fatal" in request.parameters()

    def run(self):
        while not self.fatal:
            exiting = self.watch.is_exiting()
            for sender in self.open.copy():
                text = np.array([b"end" if exiting else b"more"], dtype=object)
                response = pb_utils.InferenceResponse([pb_utils.Tensor("text_output", text)])
                sender.send(response, flags=FINAL if exiting else 0)
                if exiting:
                    self.open.remove(sender)
            time.sleep(0.1)
        for sender in self.open:
            error = pb_utils.TritonError("the engine is dead", pb_utils.TritonError.UNAVAILABLE)
            sender.send(pb_utils.InferenceResponse(error=error), flags=FINAL)
        end_server(parent_server())

    def finalize(self):
        self.watch.close()
        print("finalized", flush=True)
"""


@pytest.fixture
def server(tmp_path):
    version = tmp_path / "endless" / "1"
    version.mkdir(parents=True)
    (tmp_path / "endless/config.pbtxt").write_text(CONFIG)
    backend = str(model_repository() / "tensorrt_llm/1")
    (version / "model.py").write_text(MODEL.replace("VERSION_DIR", repr(backend)))
    with ServerProcess.serving(tmp_path) as running:
        yield running


class OpenStreams:
    """One stream over HTTP and one over gRPC, read in the background."""

    def __init__(self, server):
        self.http, self.grpc = [], []
        self.began = threading.Semaphore(0)
        self._threads = [threading.Thread(target=read, args=(server,)) for read in (self._read_http, self._read_grpc)]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        for _ in self._threads:
            assert self.began.acquire(timeout=20)
        return self

    def __exit__(self, *_):
        for thread in self._threads:
            thread.join(PATIENCE_S)

    def _read_http(self, server):
        address = f"{url(server, 'http')}/v2/models/endless/generate_stream"
        with httpx.stream("POST", address, json={"text_input": "a"}, timeout=20, trust_env=False) as response:
            for line in filter(None, response.iter_lines()):
                self.http.append(line)
                if len(self.http) == 1:
                    self.began.release()

    def _read_grpc(self, server):
        ended = threading.Event()

        def take(result, error):
            if ended.is_set():
                return
            self.grpc.append(str(error) if error else result.as_numpy("text_output")[0].decode())
            if len(self.grpc) == 1:
                self.began.release()
            if self.grpc[-1] != "more":
                ended.set()

        with triton.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as client:
            text = triton.InferInput("text_input", [1], "BYTES")
            text.set_data_from_numpy(np.array([b"a"], dtype=np.object_))
            client.start_stream(take)
            client.async_stream_infer("endless", [text])
            ended.wait(PATIENCE_S)
            # Not cancelled: a cancel in the moment of the last response keeps this server from unloading the model.
            client.stop_stream()


def printed(server, what):
    return next(line for line in server.log_tail if line.startswith(what)).split()[1:]


def stub_of(server):
    return int(printed(server, "stub")[0])


def test_open_requests_can_be_ended_before_the_server_cuts_them_off(server):
    with OpenStreams(server) as streams:
        server.request_stop()

    assert server.wait() == 0
    assert not any("Exit timeout expired" in line for line in server.log_tail)
    assert '"end"' in streams.http[-1]
    assert streams.grpc[-1] == "end"
    assert "finalized" in server.log_tail
    assert printed(server, "stub")[-1] == "30.0"


def test_a_server_at_work_is_not_taken_for_one_that_exits(server):
    with OpenStreams(server) as streams:
        for _ in range(30):
            assert web.get(server.metrics_url).is_success
            time.sleep(0.1)
        assert set(streams.grpc) == {"more"}
        assert [Path(name).is_file() for name in printed(server, "regions")] == [True]
        server.request_stop()


def test_a_sigterm_to_the_stub_is_noticed_and_does_not_end_it(server):
    with OpenStreams(server) as streams:
        os.kill(stub_of(server), signal.SIGTERM)

    assert streams.grpc[-1] == "end"
    assert server.returncode is None
    server.stop()
    assert server.returncode == 0


def test_the_server_is_ended_after_its_clients_have_their_errors(server):
    with OpenStreams(server) as streams:
        address = f"{url(server, 'http')}/v2/models/endless/generate"
        answer = web.post(address, json={"text_input": "a", "fatal": True})

    assert server.wait() == 128 + signal.SIGKILL
    assert "the engine is dead" in answer.text
    assert "the engine is dead" in streams.http[-1]
    assert "the engine is dead" in streams.grpc[-1]
    assert not runs(stub_of(server))
