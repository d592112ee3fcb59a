"""What an import costs, in interpreters that have done nothing else."""

from __future__ import annotations

import random
import subprocess
import sys

from bench._harness import Target

CLIENT, ASYNC_CLIENT = "import deepseek_triton_client", "... and its AsyncClient"
HTTP_CLIENT, GRPC_CLIENT = "... and Client(http://...)", "... and Client(grpc://...)"
HTTPX, TRITON_HTTP, TRITON_GRPC = "import httpx", "import tritonclient.http", "import tritonclient.grpc"

STATEMENTS = {
    HTTPX: "import httpx",
    CLIENT: "import deepseek_triton_client",
    ASYNC_CLIENT: "import deepseek_triton_client; deepseek_triton_client.AsyncClient",
    HTTP_CLIENT: "from deepseek_triton_client import Client; Client('http://localhost')",
    GRPC_CLIENT: "from deepseek_triton_client import Client; Client('grpc://localhost')",
    TRITON_HTTP: "import tritonclient.http",
    TRITON_GRPC: "import tritonclient.grpc",
}
TARGETS = tuple(Target(who=name, measure="ms", versus=HTTPX, at_most_more=20) for name in (CLIENT, ASYNC_CLIENT))

_TIMED = """
import time
started = time.perf_counter()
{}
print((time.perf_counter() - started) * 1e3)
"""


def sample(rounds: int, chance: random.Random) -> dict[str, list[float]]:
    """Milliseconds of each, in turn, `rounds` times. One more before that, which fills the file cache, is left out."""
    found: dict[str, list[float]] = {name: [] for name in STATEMENTS}
    for number in range(rounds + 1):
        for name in chance.sample(list(STATEMENTS), len(STATEMENTS)):
            milliseconds = _once(STATEMENTS[name])
            if number:
                found[name].append(milliseconds)
    return found


def _once(statement: str) -> float:
    command = [sys.executable, "-c", _TIMED.format(statement)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
