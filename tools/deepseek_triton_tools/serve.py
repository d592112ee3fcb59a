"""`deepseek-triton serve`: tritonserver on a model repository, in the foreground; and the server as an object.

What is promised: nothing is started that can't work, the server's output always has a reader, its exit code is passed on,
and when this process is gone, however it went, so are the server and the Python stubs it had started.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal

import httpx
from rich.console import Console
from rich.text import Text

from deepseek_triton_tools.errors import PortError, RepositoryError, ServerFailedError, ToolError
from deepseek_triton_tools.tritonserver import HOPELESS, failure_cause, find_tritonserver, parse_log_line

Port = int | Literal["auto"]

ENDPOINTS = ("http", "grpc", "metrics")

_TICK_S = 0.2
_LOG_TAIL_LINES = 2000
_PLAIN_PROGRESS_EVERY_S = 10
_GRACE_S = 10
"""On top of the exit timeout: the server begins to unload its models only when that has run out."""
_STUBS_LEAVE_S = 5
"""A stub looks every 0.3 s whether its server still lives."""
_LAUNCHES = 3
"""Attempts with new ports, where `auto` ones were taken by somebody else while the models loaded."""

_GUARDED_EXEC = """\
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL)):
    sys.exit("prctl: " + os.strerror(ctypes.get_errno()))
if os.getppid() != int(sys.argv[1]):
    sys.exit("the starting process is gone")
os.execv(sys.argv[2], sys.argv[2:])
"""
"""Becomes the server, after asking the kernel to kill it when its parent dies. A program of its own rather than a
preexec_fn: between fork and exec in a process with threads no Python code is safe."""

_OWN_OPTIONS = {
    "--model-repository": "DIR",
    "--model-store": "DIR",
    "--http-address": "--host",
    "--grpc-address": "--host",
    "--metrics-address": "--host",
    "--http-port": "--http-port",
    "--grpc-port": "--grpc-port",
    "--metrics-port": "--metrics-port",
    "--exit-timeout-secs": "--exit-timeout",
    "--log-file": "--log-file",
}
"""tritonserver's options that serve sets, and serve's own for each."""


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """What to serve and how."""

    repository: Path
    tritonserver: Path | None = None
    http_port: Port = 8000
    grpc_port: Port = 8001
    metrics_port: Port = 8002
    host: str = "127.0.0.1"
    """tritonserver has no authentication, and its API can load models and map shared memory: it listens beyond this
    machine only when that was asked for."""
    exit_timeout_secs: int = 30
    """What requests in flight get to finish after a stop was asked for. An idle connection that a client keeps open
    counts too: the server waits for it as long."""
    log_file: Path | None = None
    """The server's whole log is appended here."""
    verbose: bool = False
    server_args: tuple[str, ...] = ()
    """Further arguments for tritonserver, after our own."""


@dataclass(frozen=True)
class Progress:
    """How far a server is that loads."""

    elapsed_s: float
    last_message: str
    """What the server's log said last."""


class ServerProcess:
    """One tritonserver and all that it starts.

    A context manager: leaving it stops the server. Two threads serve it: the guardian starts and reaps the process, the
    reader takes its output. Everything else belongs to the caller's thread.
    """

    http_port: int
    grpc_port: int
    metrics_port: int

    def __init__(self, options: ServeOptions, *, on_line: Callable[[str], None] | None = None) -> None:
        """`on_line` gets every line of the server's output, in the reader's thread; an OSError from it ends that.

        :raises ToolError: when the folder or the arguments can't be right. Nothing is started yet.
        """
        _check_server_args(options.server_args)
        self.options = options
        self.models = model_names(options.repository)
        self.stop_requested = False
        self._on_line = on_line
        self._process: subprocess.Popen[str] | None = None
        self._ended = threading.Event()
        self._reader: threading.Thread | None = None
        self._lines: deque[str] = deque(maxlen=_LOG_TAIL_LINES)
        self._lines_lock = threading.Lock()
        self._hopeless = False
        self._kill_at: float | None = None
        self._shm_prefix = f"deepseek_triton_{secrets.token_hex(4)}_"

    @classmethod
    def serving(
        cls,
        repository: Path,
        *,
        tritonserver: Path | None = None,
        server_args: tuple[str, ...] = (),
        on_progress: Callable[[Progress], None] | None = None,
    ) -> ServerProcess:
        """A server of `repository` on free ports of the loopback address, ready; use it in a `with`.

        :raises ToolError: when it can't be started or doesn't become ready; nothing is left running.
        """
        options = ServeOptions(
            repository=repository,
            tritonserver=tritonserver,
            http_port="auto",
            grpc_port="auto",
            metrics_port="auto",
            server_args=server_args,
        )
        server = cls(options)
        try:
            server.start()
            server.wait_until_ready(on_progress)
        except BaseException:
            server.stop()
            raise
        return server

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def address(self) -> str:
        """The host to connect to: a server that listens on every address is reached on the loopback one."""
        return "127.0.0.1" if self.options.host == "0.0.0.0" else self.options.host

    @property
    def http_url(self) -> str:
        return f"http://{self.address}:{self.http_port}"

    @property
    def metrics_url(self) -> str:
        return f"http://{self.address}:{self.metrics_port}/metrics"

    @property
    def pid(self) -> int | None:
        """None when it was never started."""
        return self._process.pid if self._process is not None else None

    @property
    def returncode(self) -> int | None:
        """None while it runs or was never started; minus the signal's number if one ended it."""
        return self._process.returncode if self._process is not None else None

    @property
    def log_tail(self) -> list[str]:
        """The last 2,000 lines of the server's output."""
        with self._lines_lock:
            return list(self._lines)

    def start(self) -> None:
        """Start the server; returns before it is ready.

        :raises ToolError: when there is no tritonserver, or a port is taken. Nothing is started then.
        """
        installation = find_tritonserver(self.options.tritonserver)
        self.http_port, self.grpc_port, self.metrics_port = choose_ports(self.options)
        command = [
            *(sys.executable, "-I", "-S", "-c", _GUARDED_EXEC, str(os.getpid())),
            str(installation.binary),
            *installation.extra_args,
            *self._arguments(),
            *self.options.server_args,
        ]
        with self._lines_lock:
            self._lines.clear()
        self._hopeless = False
        self._ended.clear()
        spawned: Future[subprocess.Popen[str]] = Future()
        environment = os.environ | dict(installation.environment)
        threading.Thread(target=self._guard, args=(command, environment, spawned), daemon=True).start()
        self._process = spawned.result()
        self._reader = threading.Thread(target=self._read, args=(self._process,), daemon=True)
        self._reader.start()
        if self.stop_requested:
            # A signal came between its handler's installation and here, and found no process.
            self._process.terminate()

    def _arguments(self) -> list[str]:
        ports = zip(ENDPOINTS, (self.http_port, self.grpc_port, self.metrics_port), strict=True)
        return [
            f"--model-repository={self.options.repository.absolute()}",
            *(f"--{endpoint}-address={self.options.host}" for endpoint in ENDPOINTS),
            *(f"--{endpoint}-port={port}" for endpoint, port in ports),
            f"--exit-timeout-secs={self.options.exit_timeout_secs}",
            # Of its own for each server: so that two never meet, and so that what a killed one leaves can be removed.
            f"--backend-config=python,shm-region-prefix-name={self._shm_prefix}",
        ]

    def _guard(
        self, command: list[str], environment: dict[str, str], spawned: Future[subprocess.Popen[str]]
    ) -> None:
        """The guardian. The parent whose death the kernel tells of is the thread that forked, so this one stays.

        It also reaps at once: a stub takes a server that is dead but not reaped for alive, and would never leave.
        """
        try:
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                encoding="utf-8",
                errors="replace",
                start_new_session=True,
            )
        except BaseException as error:
            spawned.set_exception(error)
            return
        spawned.set_result(process)
        process.wait()
        self._ended.set()

    def _read(self, process: subprocess.Popen[str]) -> None:
        """The reader: until the server and all its stubs have closed their end."""
        with contextlib.ExitStack() as stack:
            sinks: list[Callable[[str], object]] = [self._on_line] if self._on_line else []
            if self.options.log_file:
                log = stack.enter_context(self.options.log_file.open("a", encoding="utf-8", buffering=1))
                sinks.append(lambda line: log.write(line + "\n"))
            for line in stack.enter_context(process.stdout or []):
                self._accept(line.rstrip("\n"), sinks)

    def _accept(self, line: str, sinks: list[Callable[[str], object]]) -> None:
        with self._lines_lock:
            self._lines.append(line)
        self._hopeless |= HOPELESS in line
        for sink in sinks.copy():
            try:
                sink(line)
            except OSError:
                # A full disk or a closed terminal: without it the server goes on, with nobody reading it would block.
                sinks.remove(sink)

    def wait_until_ready(self, on_progress: Callable[[Progress], None] | None = None) -> bool:
        """True when every model of the folder can be called; False when a stop was requested before that.

        There is no limit to the time: a cold load takes an hour. `on_progress` is called a few times a second.

        :raises ServerFailedError: when the server ended or can't become ready; nothing is left running.
        """
        began = time.monotonic()
        launches = 1
        # No connection is kept: one that idles would hold up the server's exit.
        with httpx.Client(trust_env=False, timeout=5, headers={"Connection": "close"}) as client:
            while not self._ended.wait(_TICK_S) and not self._hopeless and not self._kill_if_due():
                if not self.stop_requested and self._answers(client):
                    return True
                if on_progress:
                    on_progress(Progress(time.monotonic() - began, self._last_message()))
                if self._ended.is_set() and not self.stop_requested and self._lost_free_ports() and launches < _LAUNCHES:
                    launches += 1
                    self._clear_away()
                    self.start()
        return self._not_ready()
