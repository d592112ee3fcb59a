"""Repositories and addresses for the live tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from deepseek_triton_tools.server_process import ServerProcess

STANDIN = Path(__file__).resolve().parent / "standin" / "tensorrt_llm"


def build(folder: Path, *argv: str) -> Path:
    """A repository from the command line, as a user makes it."""
    command = [sys.executable, "-m", "deepseek_triton_tools.cli", "build", *argv, "--output", str(folder)]
    subprocess.run(command, check=True, capture_output=True)
    return folder


def url(server: ServerProcess, scheme: str) -> str:
    return f"{scheme}://127.0.0.1:{server.http_port if scheme == 'http' else server.grpc_port}"
