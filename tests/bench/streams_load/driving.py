"""One run: a system served, its client processes started together, and what all of them used."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from bench._served import memory_mib, serving_repository, stub_pid
from bench.streams_load.cases import ENGINE, Case
from bench.streams_load.client import Share, client_process
from bench.streams_load.measures import Measures, Used, measure
from bench.streams_load.serving import PROMPT, chars_per_token, consume_engine, make_repository

from deepseek_triton_tools.server.server_process import ServerProcess

_AGREED_S = 0.3
"""From the last client's word that it is ready to the start."""
_START_UP_S = 120.0
_PATIENCE_S = 120.0
"""On top of three times the ideal."""
_MEMORY_TICK_S = 0.05
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_spawn = multiprocessing.get_context("spawn")


def run(system: str, case: Case, folder: Path, *, num_clients: int, peer: Path | None) -> Measures:
    """One run; raw samples and logs go to `folder`, which is made."""
    folder.mkdir(parents=True)
    if system == ENGINE:
        return _run_engine(case)
    with tempfile.TemporaryDirectory(prefix="deepseek-triton-bench-") as place:
        repository = make_repository(system, case, Path(place) / "repository", peer)
        with serving_repository(repository, folder / "tritonserver.log") as server:
            return _drive(system, case, server, folder, num_clients)


def _run_engine(case: Case) -> Measures:
    with _children(consume_engine, [case]) as pipes:
        ((tokens_per_s, total_s),) = _receive(pipes, _PATIENCE_S)
    return Measures(tokens_per_s=tokens_per_s, total_s=total_s)


def _drive(system: str, case: Case, server: ServerProcess, folder: Path, num_clients: int) -> Measures:
    step = min(num_clients, case.num_streams)
    shares = [_share(system, case, server, folder, first, step) for first in range(step)]
    used = {"stub": _Process(stub_pid(server)), "server": _Process(_pid(server))}
    with _children(client_process, shares) as pipes, _watching(list(used.values())):
        _receive(pipes, _START_UP_S)
        before = {name: process.cpu_s() for name, process in used.items()}
        start_ns = time.monotonic_ns() + int(_AGREED_S * 1e9)
        _send(pipes, start_ns)
        client_cpu_s = sum(_receive(pipes, shares[0].patience_s + _START_UP_S))
        after = {name: process.cpu_s() for name, process in used.items()}
        _send(pipes, "all have ended")
        _receive(pipes, _START_UP_S)
    return measure(
        case,
        [share.samples for share in shares],
        Used(
            stub_cpu_s=after["stub"] - before["stub"],
            server_cpu_s=after["server"] - before["server"],
            client_cpu_s=client_cpu_s,
            stub_mib=used["stub"].peak_mib,
            server_mib=used["server"].peak_mib,
        ),
    )


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


def _pid(server: ServerProcess) -> int:
    assert server.pid is not None
    return server.pid


@contextmanager
def _children(target: Callable[[Any, Any], None], arguments: Sequence[Any]) -> Iterator[list[Connection]]:
    """The pipes of processes, one for each argument of `target`. Those that still run at the end are ended."""
    pipes: list[Connection] = []
    processes = []
    try:
        for argument in arguments:
            here, there = _spawn.Pipe()
            process = _spawn.Process(target=target, args=(argument, there), daemon=True)
            process.start()
            there.close()  # or nobody would hear of its end
            pipes.append(here)
            processes.append(process)
        yield pipes
    finally:
        for process in processes:
            process.kill()
            process.join()


def _send(pipes: Sequence[Connection], word: Any) -> None:
    for pipe in pipes:
        pipe.send(word)


def _receive(pipes: Sequence[Connection], within_s: float) -> list[Any]:
    """A word of each, in whatever order they come; one that ends instead is told of at once."""
    words: list[Any] = []
    waiting = list(pipes)
    deadline = time.monotonic() + within_s
    while waiting:
        ready = wait(waiting, max(0.0, deadline - time.monotonic()))
        if not ready:
            raise SystemExit(f"a child process said nothing for {within_s:.0f} s")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            try:
                words.append(pipe.recv())
            except (EOFError, ConnectionResetError):
                raise SystemExit("a child process failed: what it said is above") from None
            waiting.remove(pipe)
    return words


@dataclass
class _Process:
    """What a process of the server has used."""

    pid: int
    peak_mib: dict[str, float] = field(default_factory=dict)

    def cpu_s(self) -> float:
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            raise SystemExit("tritonserver or its stub has ended: see tritonserver.log") from None
        return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S  # utime and stime, by proc(5)

    def note_memory(self) -> None:
        for part, mib in memory_mib(self.pid).items():
            self.peak_mib[part] = max(self.peak_mib.get(part, 0.0), mib)


@contextmanager
def _watching(processes: Sequence[_Process]) -> Iterator[None]:
    """Their memory is looked at again and again, in a thread."""
    stop = threading.Event()

    def watch() -> None:
        while True:
            stopped = stop.wait(_MEMORY_TICK_S)
            # Gone: whoever asks for its CPU time says so.
            with contextlib.suppress(OSError, KeyError):
                for process in processes:
                    process.note_memory()
            if stopped:
                return

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
