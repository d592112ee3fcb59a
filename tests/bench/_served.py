"""What the scripts here serve and how they look at it: a repository, a tritonserver, /metrics, memory."""

import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from deepseek_backend import backend_metrics
from deepseek_triton_tools.server.server_process import ServeOptions, ServerProcess
from support.server_processes import session_members
from support.servers import build, change_yaml, standin_repository

_EXIT_TICK_S = 0.005
_METRICS_TICK_S = 0.02
_STUB_NAME = "triton_python_b"  # as far as the kernel keeps it


def repository(folder: Path, engine: str, **triton_config: Any) -> Path:
    """A repository of the simulated engine or, with "trtllm", of the stand-in for TensorRT-LLM."""
    if engine == "trtllm":
        made = standin_repository(folder)
    else:
        made = build(folder, "tiny", "--engine", engine)
    change_yaml(made / "tensorrt_llm/1/model.yaml", **triton_config)
    return made


@contextmanager
def serving(engine: str, log_file: Path, **triton_config: Any) -> Iterator[ServerProcess]:
    """A tritonserver of such a repository."""
    with tempfile.TemporaryDirectory(prefix="deepseek-triton-bench-") as folder:
        made = repository(Path(folder) / "repository", engine, **triton_config)
        with serving_repository(made, log_file) as server:
            yield server


@contextmanager
def serving_repository(made: Path, log_file: Path) -> Iterator[ServerProcess]:
    """A tritonserver on free ports of the loopback address, ready. Its log is appended to `log_file`."""
    options = ServeOptions(repository=made, http_port="auto", grpc_port="auto", metrics_port="auto", log_file=log_file)
    with ServerProcess(options) as server:
        server.start()
        server.wait_until_ready()
        yield server


def await_exit(server: ServerProcess, within_s: float) -> float | None:
    """When the server ended, by time.monotonic(); None: it still runs."""
    deadline = time.monotonic() + within_s
    while server.returncode is None:
        if time.monotonic() > deadline:
            return None
        time.sleep(_EXIT_TICK_S)
    return time.monotonic()


@dataclass(frozen=True, kw_only=True)
class Backend:
    """The backend's numbers on /metrics, all series of a family together."""

    accepted: float
    finished: float
    refused: float
    inflight: float
    in_engine: float

    @property
    def left(self) -> float:
        """What it still has, by whichever of its numbers says more."""
        return max(self.inflight, self.in_engine, abs(self.accepted - self.finished))


def backend(client: httpx.Client, server: ServerProcess) -> Backend:
    sums = _sums(client.get(server.metrics_url).text)
    return Backend(
        accepted=sums[backend_metrics.ACCEPTED.name],
        finished=sums[backend_metrics.FINISHED.name],
        refused=sums[backend_metrics.REFUSED.name],
        inflight=sums[backend_metrics.INFLIGHT.name],
        in_engine=sums[backend_metrics.RUNNING.name] + sums[backend_metrics.WAITING.name],
    )


def _sums(text: str) -> Mapping[str, float]:
    sums: dict[str, float] = {}
    for name, number in re.findall(rf"^({backend_metrics.PREFIX}\w+)(?:{{.*}})? (\S+)$", text, re.MULTILINE):
        sums[name] = sums.get(name, 0.0) + float(number)
    return sums


def await_backend(server: ServerProcess, holds: Callable[[Backend], bool], within_s: float) -> Backend:
    """The first numbers that hold, or the last ones in time."""
    deadline = time.monotonic() + within_s
    with metrics_client() as client:
        while True:
            numbers = backend(client, server)
            if holds(numbers) or time.monotonic() > deadline:
                return numbers
            time.sleep(_METRICS_TICK_S)


def metrics_client() -> httpx.Client:
    """Keeps no connection: one that idles would hold up the server's exit."""
    return httpx.Client(trust_env=False, timeout=10, headers={"Connection": "close"})


def stub_pid(server: ServerProcess) -> int:
    """The process that runs the model's Python."""
    (pid,) = [pid for pid in session_members(server.pid) if _name(pid) == _STUB_NAME]
    return pid


def _name(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().rstrip("\n")


def memory_mib(pid: int) -> dict[str, float]:
    """Resident memory: all of it (rss), and what is neither a file nor shared (anon)."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = dict(re.findall(r"^(VmRSS|RssAnon):\s+(\d+) kB$", status, re.MULTILINE))
    return {"rss": int(found["VmRSS"]) / 1024, "anon": int(found["RssAnon"]) / 1024}


def default_folder(name: str) -> Path:
    """A new folder for raw samples, in the user's cache."""
    return Path.home() / ".cache" / "deepseek-triton" / "bench" / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
