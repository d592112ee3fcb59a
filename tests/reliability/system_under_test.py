"""What a soak runs: a tritonserver with a gateway before it, a context and a generation server with another, and what
all of them hold of memory, descriptors, threads and shared memory."""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from bench._served import serving_repository, stub_pid

from conformance.running import gateway_process
from deepseek_triton_tools.server.server_process import ServerProcess
from reliability.front_end_queues import lengthen_queues
from reliability.jobs import CONTEXT, GATEWAY, GENERATION, PAIR, SERVER
from support.servers import build, change_yaml, shared_repository, standin_repository

TOKENS_PER_S = 400
"""Of each request."""
_METRICS_PERIOD_S = 1.0
PACED = {"pace": "real", "speed": TOKENS_PER_S / 100, "text": "dictated"}
"""Without a preset the simulated engine makes 100 tokens a second for each request."""


@dataclass(frozen=True, kw_only=True)
class SystemUnderTest:
    """`servers` and `gateways` by target."""

    servers: Mapping[str, ServerProcess]
    gateways: Mapping[str, str]
    models: Mapping[str, str]
    """A gateway's target -> the model that it serves."""
    pids: Mapping[str, int]
    """A name -> a process whose resources count."""
    send_buffer_bytes: int
    """Of the shortest queue of any server's HTTP front end."""
    stop_gateways: Callable[[], None]

    @property
    def urls(self) -> dict[str, str]:
        return {name: server.http_url for name, server in self.servers.items()} | dict(self.gateways)

    @property
    def grpc_address(self) -> str:
        return f"127.0.0.1:{self.servers[SERVER].grpc_port}"


def repository(folder: Path, engine: str, target: str, **triton_config: Any) -> Path:
    """Write the repository of one server: the simulated engine's, or with "trtllm" that of the stand-in."""
    settings: dict[str, Any] = {"metrics_period_s": _METRICS_PERIOD_S, **triton_config}
    if engine == "simulated":
        made = build(folder, "tiny", "--engine", "simulated")
        settings.setdefault("engine_options", PACED)
    elif target == SERVER:
        made = standin_repository(folder)
    else:
        made = shared_repository(folder, "1.2.1", is_context=target == CONTEXT)
    change_yaml(made / "tensorrt_llm/1/model.yaml", **settings)
    return made


@contextmanager
def running_system(engine: str, folder: Path) -> Iterator[SystemUnderTest]:
    """Start everything, with its logs in `folder`, and stop it at the end: the gateways first."""
    os.environ["STANDIN_TOKENS_PER_S"] = str(TOKENS_PER_S * (1 if engine == "simulated" else 10))
    with ExitStack() as stack:
        servers, pids, send_buffers = {}, {}, []
        for target in (SERVER, CONTEXT, GENERATION):
            made = repository(folder / "repositories" / target, engine, target)
            server = stack.enter_context(serving_repository(made, folder / f"{target}.log"))
            servers[target] = server
            pids |= {target: server.pid, f"{target}'s model": stub_pid(server)}
            send_buffers.append(lengthen_queues(server.pid))
        # The gateways end first: a connection that they keep holds up a server's exit.
        front = stack.enter_context(ExitStack())
        gateways, models = {}, {}
        pair = (servers[GENERATION].http_url, "--context-server", servers[CONTEXT].http_url)
        for target, (url, *options) in ((GATEWAY, (servers[SERVER].http_url,)), (PAIR, pair)):
            process = gateway_process(url, log=folder / f"{target}.log", options=tuple(options))
            address, pid = front.enter_context(process)
            gateways[target], pids[target] = address, pid
            [model] = httpx.get(f"{address}/v1/models", trust_env=False).json()["data"]
            models[target] = model["id"]
        yield SystemUnderTest(
            servers=servers, gateways=gateways, models=models, pids=pids, send_buffer_bytes=min(send_buffers),
            stop_gateways=front.close,
        )  # fmt: skip


def resources(pid: int) -> dict[str, float]:
    """Anonymous and all memory in MiB, threads, open descriptors, and MiB of shared memory that it maps.

    :raises OSError: when the process has ended.
    """
    status = Path(f"/proc/{pid}/status").read_text()
    found = dict(re.findall(r"^(VmRSS|RssAnon|Threads):\s+(\d+)", status, re.MULTILINE))
    if "RssAnon" not in found:
        raise ProcessLookupError(pid)
    shared = {line.split(maxsplit=5)[5] for line in _lines(f"/proc/{pid}/maps") if "/dev/shm/" in line}
    num_shared = 0
    for path in shared:
        with suppress(OSError):  # it has been removed, and is still mapped
            num_shared += os.stat(path).st_blocks * 512
    return {
        "anonymous": int(found["RssAnon"]) / 1024,
        "resident": int(found["VmRSS"]) / 1024,
        "threads": int(found["Threads"]),
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        "shared": num_shared / 2**20,
    }


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()
