"""Repositories and addresses for the live tests."""

import shutil
import signal
from pathlib import Path

import pytest
import yaml

from deepseek_triton_client import Client, Retries, ServerUnavailable
from deepseek_triton_tools.server.server_process import ServerProcess
from support.commands import run_command

STANDIN = Path(__file__).resolve().parents[1] / "standin" / "tensorrt_llm"


def build(folder: Path, *argv: str) -> Path:
    """A repository from the command line, as a user makes it."""
    done = run_command("build", *argv, "--output", str(folder))
    assert done.returncode == 0, done.stderr
    return folder


def standin_repository(folder: Path, *argv: str) -> Path:
    """What `build deepseek-r1` writes, with the stand-in where a container has TensorRT-LLM installed."""
    return with_standin(build(folder, "deepseek-r1", "--gpu", "h200", "--gpus", "8", *argv))


def with_standin(repository: Path) -> Path:
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(STANDIN, repository / "tensorrt_llm/1/tensorrt_llm", ignore=ignore)
    return repository


def shared_repository(folder: Path, release: str, *, is_context: bool) -> Path:
    """A context or a generation server on the stand-in of a release."""
    profile = "ctx" if is_context else "gen"
    workload = ("--isl", "4000", "--osl", "2000", "--concurrency", "64")
    repository = standin_repository(folder, "--profile", profile, "--trtllm", release, *workload)
    change_yaml(repository / "tensorrt_llm/1/model.yaml", warmup=None, metrics_period_s=0.1)
    return repository


MODEL_KILLED = (signal.SIGKILL, signal.SIGABRT)
"""The signals that may end a server whose model's process has been killed: the guard's, or that of its own crash where
the process held a lock that both share (docs/tritonserver.md). That was seen in 2 of 90 kills on busy cores."""


def url(server: ServerProcess, scheme: str) -> str:
    return f"{scheme}://127.0.0.1:{server.http_port if scheme == 'http' else server.grpc_port}"


def change_yaml(path: Path, **ours: object) -> None:
    """Sets the backend's own settings in a model.yaml."""
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    document["triton_config"] |= ours
    path.write_text(yaml.safe_dump(document), encoding="utf-8")


def twin(folder: Path, *argv: str, **ours: object) -> Path:
    """A repository of the simulated engine, with these of the backend's own settings."""
    repository = build(folder, "tiny", "--engine", "simulated", *argv)
    change_yaml(repository / "tensorrt_llm/1/model.yaml", **ours)
    return repository


def see_it_die(server: ServerProcess) -> None:
    once = Retries(attempts=1)  # the server may be gone by the next
    with Client(url(server, "grpc"), retries=once) as client, pytest.raises(ServerUnavailable) as caught:
        client.generate("the one that sees it happen", max_tokens=100)
    assert caught.value.code == "E_UNAVAILABLE"
