"""One run: a system served, its client processes started together, and what all of them used."""

import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from bench._harness import children, cpu_s, receive, send
from bench._served import serving_repository, stub_pid
from bench.streams_load.cases import ENGINE, Case
from bench.streams_load.client import Share, client_process
from bench.streams_load.measures import measure
from bench.streams_load.serving import PROMPT, chars_per_token, consume_engine, make_repository

from deepseek_triton_tools.server.server_process import ServerProcess

_AGREED_S = 0.3
"""From the last client's word that it is ready to the start."""
_START_UP_S = 120.0
_PATIENCE_S = 120.0
"""On top of three times the ideal."""


def run(system: str, case: Case, folder: Path, *, num_clients: int, peer: Path | None) -> dict[str, float]:
    """The measures of one run; raw samples and logs go to `folder`, which is made."""
    folder.mkdir(parents=True)
    if system == ENGINE:
        with children(consume_engine, [case]) as pipes:
            ((tokens_per_s, total_s),) = receive(pipes, _PATIENCE_S)
        return {"tokens_per_s": tokens_per_s, "total_s": total_s}
    with tempfile.TemporaryDirectory(prefix="deepseek-triton-bench-") as place:
        repository = make_repository(system, case, Path(place) / "repository", peer)
        with serving_repository(repository, folder / "tritonserver.log") as server:
            return _drive(system, case, server, folder, num_clients)


def _drive(system: str, case: Case, server: ServerProcess, folder: Path, num_clients: int) -> dict[str, float]:
    step = min(num_clients, case.num_streams)
    shares = [_share(system, case, server, folder, first, step) for first in range(step)]
    pids = {"stub": stub_pid(server), "server": server.pid}
    with children(client_process, shares) as pipes:
        receive(pipes, _START_UP_S)
        before = _used(pids)
        send(pipes, time.monotonic_ns() + int(_AGREED_S * 1e9))
        client_cpu_s = sum(receive(pipes, shares[0].patience_s + _START_UP_S))
        used = {name: after - before[name] for name, after in _used(pids).items()}
        send(pipes, "all have ended")
        receive(pipes, _START_UP_S)
    return measure(case, [share.samples for share in shares], {**used, "client": client_cpu_s})


def _used(pids: Mapping[str, int]) -> dict[str, float]:
    try:
        return {name: cpu_s(pid) for name, pid in pids.items()}
    except OSError:
        raise SystemExit("tritonserver or its stub has ended: see tritonserver.log") from None


def _share(system: str, case: Case, server: ServerProcess, folder: Path, first: int, step: int) -> Share:
    (model,) = server.models
    return Share(
        protocol=case.protocol,
        host="127.0.0.1",
        port=server.grpc_port if case.protocol == "gRPC" else server.http_port,
        model=model,
        prompt=PROMPT,
        streaming=case.streaming,
        first=first,
        step=step,
        num_streams=case.num_streams,
        num_tokens=case.num_tokens,
        chars_per_token=chars_per_token(system),
        open_s=case.open_s,
        patience_s=3 * (case.ideal_s or 0.0) + _PATIENCE_S,
        samples=folder / f"{first}.npz",
    )
