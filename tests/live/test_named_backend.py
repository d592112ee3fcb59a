"""A model whose config.pbtxt names the backend vllm (`build --backend-name vllm`) is the same model."""

import os
import signal

from deepseek_triton_client import Client
from deepseek_triton_tools.server.server_process import ServerProcess
from support.server_processes import children_of
from support.servers import MODEL_KILLED, build, url
from support.web import web


def test_a_model_answers_as_under_tritons_own_backend(tmp_path, tiny_server, random_checkpoint):
    model = ("tiny", "--model", str(random_checkpoint))
    repository = build(tmp_path / "repository with blanks", *model, "--backend-name", "vllm")
    asked = {"max_tokens": 8, "logprobs": 2}
    with ServerProcess.serving(repository) as server:
        config = web.get(f"{server.http_url}/v2/models/tensorrt_llm/config").json()
        with Client(url(server, "grpc")) as client, Client(url(tiny_server, "grpc")) as other:
            answer, expected = (each.generate("hello", **asked) for each in (client, other))
        assert children_of(server.pid)

    assert config["backend"] == "vllm"
    assert answer.answers == expected.answers
    assert answer.answers[0].logprobs
    assert server.returncode == 0


def test_a_model_process_of_a_named_backend_that_dies_ends_the_server(tmp_path):
    repository = build(tmp_path / "repository", "tiny", "--engine", "simulated", "--backend-name", "vllm")
    with ServerProcess.serving(repository) as server:
        os.kill(children_of(server.pid)[0], signal.SIGKILL)

        assert server.wait() - 128 in MODEL_KILLED
