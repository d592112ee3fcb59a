"""Real tritonservers, one for each engine, started once in a session on free ports."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from servers import STANDIN, build, url

from deepseek_triton_build.source import model_repository
from deepseek_triton_client import Client
from deepseek_triton_tools.server_process import ServerProcess

SCHEMES = ("http", "grpc")


@pytest.fixture(scope="session")
def tiny_server() -> Iterator[ServerProcess]:
    """The transformers engine on the demo checkpoint: model_repository/ as it is checked out."""
    with ServerProcess.serving(model_repository()) as server:
        yield server


@pytest.fixture(scope="session")
def simulated_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The digital twin of a batch-1 deployment: one request at a time, about 158 tokens a second."""
    preset = "h200x8-r1-fp8-min-latency"
    folder = tmp_path_factory.mktemp("simulated") / "repository"
    with ServerProcess.serving(build(folder, "tiny", "--engine", "simulated", "--preset", preset)) as server:
        yield server


@pytest.fixture(scope="session")
def trtllm_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `build deepseek-r1` writes, with the stand-in where a container has TensorRT-LLM installed."""
    folder = tmp_path_factory.mktemp("trtllm") / "repository"
    repository = build(folder, "deepseek-r1", "--gpu", "h200", "--gpus", "8")
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(STANDIN, repository / "tensorrt_llm/1/tensorrt_llm", ignore=ignore)
    return repository


@pytest.fixture(scope="session")
def trtllm_server(trtllm_repository: Path) -> Iterator[ServerProcess]:
    """The production path on the strict stand-in for TensorRT-LLM."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STANDIN_TOKENS_PER_S", "500")  # otherwise all of an answer may leave in one response
        with ServerProcess.serving(trtllm_repository) as server:
            yield server


@pytest.fixture(params=SCHEMES)
def tiny(request: pytest.FixtureRequest, tiny_server: ServerProcess) -> Iterator[Client]:
    with Client(url(tiny_server, request.param)) as client:
        yield client


@pytest.fixture(params=SCHEMES)
def simulated(request: pytest.FixtureRequest, simulated_server: ServerProcess) -> Iterator[Client]:
    with Client(url(simulated_server, request.param)) as client:
        yield client


@pytest.fixture(params=SCHEMES)
def trtllm(request: pytest.FixtureRequest, trtllm_server: ServerProcess) -> Iterator[Client]:
    with Client(url(trtllm_server, request.param)) as client:
        yield client
