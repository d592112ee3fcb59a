"""Tritonservers that are killed and started again behind a gateway, and how the gateway sees them."""

import os
import signal
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deepseek_triton_tools.server.server_process import ServeOptions, ServerProcess
from support.servers import url
from support.web import web


class RestartedServer:
    """A tritonserver that can be killed, and started again on the same ports."""

    def __init__(self, repository: Path) -> None:
        self.process = ServerProcess.serving(repository)
        self.options = ServeOptions(
            repository=repository,
            http_port=self.process.http_port,
            grpc_port=self.process.grpc_port,
            metrics_port=self.process.metrics_port,
        )
        self.line = self.line_over("http")

    def line_over(self, protocol: str) -> str:
        return f"{url(self.process, protocol)}#metrics={self.process.metrics_port}\n"

    def kill(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        assert self.process.wait() == 128 + signal.SIGKILL

    def start_again(self) -> None:
        """Start it, and return before it is ready."""
        self.process = ServerProcess(self.options)
        self.process.start()

    def stop(self) -> None:
        self.process.stop()


@contextmanager
def fleet(repositories: Iterable[Path]) -> Iterator[list[RestartedServer]]:
    """A server for each repository; they start and stop side by side, because a start is mostly waiting."""
    with ThreadPoolExecutor() as pool:
        starting = [pool.submit(RestartedServer, repository) for repository in repositories]
        try:
            yield [start.result() for start in starting]
        finally:
            running = [start.result() for start in starting if not start.exception()]
            list(pool.map(RestartedServer.stop, running))


def fleet_of(address: str) -> dict[str, dict[str, Any]]:
    """Each server as the gateway sees it, by its URL."""
    [model] = web.get(f"{address}/fleet").json()["models"]
    return {server["url"]: server for server in model["servers"]}


def up(address: str) -> set[str]:
    return {url for url, server in fleet_of(address).items() if server["state"] == "up" and not server["leaving"]}
