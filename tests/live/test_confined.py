"""Server and gateway run with a read-only root and without rights, as launch docker and kubernetes start them."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from deepseek_triton_client import Client
from deepseek_triton_tools.host.tritonserver import find_tritonserver
from support.confinement import HERE, confined
from support.mounting import NOBODY
from support.servers import build
from support.supervising import free_ports, port_options
from support.waiting import wait_for
from support.web import web

CLI = (sys.executable, "-B", "-m", "deepseek_triton_tools.cli.main")
USERS: dict[str, tuple[int, tuple[str, ...]]] = {
    "nobody": (NOBODY, ()),
    "root without rights": (0, ()),
    "root as on GPUs": (0, ("+dac_override", "+ipc_lock")),
}


@contextmanager
def running(command: list[str], log: Path, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    environment = os.environ | {"HOME": "/tmp"} | variables
    with open(log, "wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()
    assert process.returncode in (0, 143), log.read_text()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository, and a tritonserver that start.sh finds."""
    top = tmp_path_factory.mktemp("confined")
    build(top / "repository", "tiny")
    installation = find_tritonserver()
    extra = " ".join(f'"{argument}"' for argument in installation.extra_args)
    program = top / "bin/tritonserver"
    program.parent.mkdir()
    program.write_text(f'#!/usr/bin/env bash\nexec "{installation.binary}" {extra} "$@"\n')
    program.chmod(0o755)
    top.chmod(0o755)
    return top


def asked(url: str) -> None:
    with Client(url) as client:
        client.wait_until_ready(60)
        assert client.chat([{"role": "user", "content": "Hi"}], max_tokens=3).num_output_tokens == 3


@pytest.mark.parametrize(
    "user", ["nobody", pytest.param("root without rights", marks=pytest.mark.nightly), "root as on GPUs"]
)
def test_start_sh_needs_no_rights_and_writes_to_tmp_only(folder: Path, tmp_path: Path, user: str) -> None:
    number, kept = USERS[user]
    http, grpc, metrics = map(str, free_ports(3))
    variables = dict(find_tritonserver().environment) | {"HTTP_PORT": http, "GRPC_PORT": grpc, "METRICS_PORT": metrics}
    variables["EXIT_TIMEOUT"] = "10"
    variables["PATH"] = f"{HERE}/bin:{variables.get('PATH', os.environ['PATH'])}"
    command = confined(folder, [HERE / "repository/start.sh"], is_root=not number, kept=kept)
    with running(command, tmp_path / "log", **variables) as process:
        asked(f"http://127.0.0.1:{http}")
        status = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        fields = dict(line.split(":\t", 1) for line in status if ":\t" in line)
        assert fields["NoNewPrivs"] == "1"
        if not kept:
            assert {fields[name] for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {"0" * 16}


def test_serve_needs_no_rights_and_writes_to_tmp_only(folder: Path, tmp_path: Path) -> None:
    ports = free_ports(3)
    command = confined(folder, [*CLI, "serve", HERE / "repository", *port_options(ports), "--exit-timeout", "10"])
    with running(command, tmp_path / "log"):
        asked(f"http://127.0.0.1:{ports[0]}")


@pytest.mark.parametrize("workers", [pytest.param("1", marks=pytest.mark.nightly), "2"])
def test_the_gateway_needs_no_rights_and_writes_to_tmp_only(folder: Path, tmp_path: Path, workers: str) -> None:
    (port,) = free_ports(1)
    server = "http://127.0.0.1:9"  # it need not be there
    options = ("--server", server, "--port", str(port), "--workers", workers)
    with running(confined(folder, [*CLI, "gateway", *options]), tmp_path / "log"):
        wait_for(lambda: answers(f"http://127.0.0.1:{port}/health"))


def answers(url: str) -> bool:
    try:
        return web.get(url).status_code == 200
    except httpx.TransportError:
        return False
