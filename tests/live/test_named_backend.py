"""A model whose config.pbtxt names the backend vllm (`build --backend-name vllm`) is the same model."""

import os
import signal
from pathlib import Path

import httpx

from deepseek_backend.process.process_guard import NAME
from deepseek_triton_client import Client
from deepseek_triton_tools.host.process_sessions import session_members
from deepseek_triton_tools.server.server_process import ServerProcess
from support.servers import MODEL_KILLED, build, url


def processes_of(server):
    return {Path(f"/proc/{pid}/comm").read_text().strip(): pid for pid in session_members(server.pid)}


def test_a_model_answers_as_under_tritons_own_backend(tmp_path, tiny_server, random_checkpoint):
    model = ("tiny", "--model", str(random_checkpoint))
    repository = build(tmp_path / "repository with blanks", *model, "--backend-name", "vllm")
    asked = {"max_tokens": 8, "logprobs": 2}
    with ServerProcess.serving(repository) as server:
        config = httpx.get(f"{server.http_url}/v2/models/tensorrt_llm/config").json()
        with Client(url(server, "grpc")) as client, Client(url(tiny_server, "grpc")) as other:
            answer, expected = (each.generate("hello", **asked) for each in (client, other))
        names = processes_of(server)

    assert config["backend"] == "vllm"
    assert answer.answers == expected.answers
    assert answer.answers[0].logprobs
    assert NAME in names
    assert server.returncode == 0


def test_a_model_process_of_a_named_backend_that_dies_ends_the_server(tmp_path):
    repository = build(tmp_path / "repository", "tiny", "--engine", "simulated", "--backend-name", "vllm")
    with ServerProcess.serving(repository) as server:
        os.kill(processes_of(server)["triton_python_b"], signal.SIGKILL)

        assert server.wait() - 128 in MODEL_KILLED
