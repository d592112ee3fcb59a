"""Real tritonservers, one for each engine, started once in a session on free ports."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from deepseek_triton_client import Client
from deepseek_triton_tools.serve import ServerProcess

STANDIN = Path(__file__).resolve().parents[1] / "standin" / "tensorrt_llm"
SCHEMES = ("http", "grpc")


def build(folder: Path, *argv: str) -> Path:
    """A repository from the command line, as a user makes it."""
    command = [sys.executable, "-m", "deepseek_triton_tools.cli", "build", *argv, "--output", str(folder)]
    subprocess.run(command, check=True, capture_output=True)
    return folder


def set_triton_config(repository: Path, **values: object) -> None:
    path = repository / "tensorrt_llm/1/model.yaml"
    document = yaml.safe_load(path.read_text())
    document["triton_config"].update(values)
    path.write_text(yaml.safe_dump(document))


def url(server: ServerProcess, scheme: str) -> str:
    return f"{scheme}://127.0.0.1:{server.http_port if scheme == 'http' else server.grpc_port}"


def running(repository: Path) -> Iterator[ServerProcess]:
    with ServerProcess.serving(repository) as server:
        yield server


@pytest.fixture(scope="session")
def tiny_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The transformers engine on the demo checkpoint."""
    yield from running(build(tmp_path_factory.mktemp("tiny") / "repository", "tiny"))


@pytest.fixture(scope="session")
def simulated_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The digital twin of a batch-1 deployment: one request at a time, about 158 tokens a second."""
    preset = "h200x8-r1-fp8-min-latency"
    folder = tmp_path_factory.mktemp("simulated") / "repository"
    yield from running(build(folder, "tiny", "--engine", "simulated", "--preset", preset))


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
    yield from running(trtllm_repository)


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
