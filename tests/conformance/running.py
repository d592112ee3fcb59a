"""Servers and gateways as child processes, run from the project's own environment."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / ".venv" / "bin" / "deepseek-triton"
TINY = ROOT / "model_repository"
"""The repository as it is checked out: the trained tiny checkpoint."""

NAMES = ("first", "second")
"""The obedient model's: the same server by two names, because some tests ask for another model than the first."""

_START_S = 180
_STOP_S = 60


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port


@contextmanager
def triton(repository: Path, log: Path) -> Iterator[str]:
    """A tritonserver, by its URL."""
    port = free_port()
    others = ("--grpc-port", "auto", "--metrics-port", "auto")
    url = f"http://127.0.0.1:{port}"
    with _running(["serve", str(repository), "--http-port", str(port), *others], f"{url}/v2/health/ready", log):
        yield url


@contextmanager
def gateway(*servers: str, log: Path, options: tuple[str, ...] = ()) -> Iterator[str]:
    """A gateway in front of servers, by its URL."""
    with gateway_process(*servers, log=log, options=options) as (url, _):
        yield url


@contextmanager
def gateway_process(*servers: str, log: Path, options: tuple[str, ...] = ()) -> Iterator[tuple[str, int]]:
    """A gateway in front of servers, by its URL and its pid."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    named = [word for server in servers for word in ("--server", server)]
    with _running(["gateway", *named, "--port", str(port), *options], f"{url}/health", log) as pid:
        yield url, pid


@contextmanager
def _running(arguments: list[str], ready_url: str, log: Path) -> Iterator[int]:
    with log.open("w") as output:
        process = subprocess.Popen([PROGRAM, *arguments], stdout=output, stderr=output, stdin=subprocess.DEVNULL)
    try:
        _wait(process, ready_url, log)
        yield process.pid
    finally:
        process.terminate()
        try:
            process.wait(_STOP_S)
        finally:
            process.kill()


def _wait(process: subprocess.Popen[bytes], ready_url: str, log: Path) -> None:
    give_up_at = time.monotonic() + _START_S
    while time.monotonic() < give_up_at and process.poll() is None:
        try:
            if httpx.get(ready_url, trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise RuntimeError(f"{ready_url} gave no 200; the program's output:\n{log.read_text()[-4000:]}")
