"""A tritonserver below the supervisor: start it, wait for it, stop it.

The supervisor (supervise.py) reserves the ports, starts tritonserver, ends it when this process ends in whatever way,
and leaves nothing of it behind. Here is what it does not know: where tritonserver is and what it needs, free ports, and
what its log says.
"""

from __future__ import annotations

import functools
import os
import random
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
from collections.abc import Callable, Collection
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Literal, TextIO

from deepseek_triton_client import Client, DeepseekTritonError, Timeouts
from deepseek_triton_tools.host.tritonserver import Installation, find_tritonserver
from deepseek_triton_tools.server.server_log import HOPELESS, dead_engine, failure_cause, parse_log_line
from deepseek_triton_tools.terminal.output_streams import complain
from deepseek_triton_tools.tool_errors import PortError, RepositoryError, ServerFailedError, ToolError

Port = int | Literal["auto"]

_ENDPOINTS = ("http", "grpc", "metrics")
_FIRST_UNPRIVILEGED = 1024
_PORT_CHOICE = 16384
"""Number of ports that `auto` chooses from. With Linux's defaults they are 16384 to 32767."""
_TICK_S = 0.2
_LOG_TAIL_LINES = 2000
_ANSWER_S = 5.0
"""Seconds for one answer of a server that loads."""
_GRACE_S = 10
"""Seconds to unload its models, which the server begins after the exit timeout, before it is killed."""
_CLIENTS_LEAVE_S = 0.5
"""Seconds before a stop, for clients that just had their answers to disconnect. A SIGTERM in the moment in which a
client disconnects can crash Triton 2.51; 0.2 s between the two were enough in every try (docs/tritonserver.md)."""
_LAST_OUTPUT_S = 5
"""Seconds for the last output, and for the supervisor's guard where the supervisor itself was killed."""
_LAUNCHES = 3
"""Most starts of one server: it is started again when another program took an `auto` port during the load."""
_END_NOW = signal.SIGUSR2
"""The supervisor's signal that ends everything at once."""
_SUPERVISOR = "deepseek-triton: "
"""Beginning of the supervisor's own lines."""

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
"""tritonserver's option that `serve` sets -> the option of `serve` for it."""

_CLOSING_OPTIONS = ("--http-restricted-api", "--grpc-restricted-protocol")
_CLOSED_APIS = "shared-memory,trace,logging"
"""Triton's endpoints that want a key which nobody is told, as in start.sh. By them any client could map the host's
memory, have files written and change what is logged."""


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """A model repository, and how tritonserver serves it."""

    repository: Path
    tritonserver: Path | None = None
    http_port: Port = 8000
    grpc_port: Port = 8001
    metrics_port: Port = 8002
    host: str = "127.0.0.1"
    """The address to listen on. tritonserver has no authentication, and its API can load models and map shared memory,
    so other machines reach it only when that was asked for."""
    exit_timeout_secs: int = 30
    """Seconds for active requests to finish after a stop; also for idle connections that clients keep open."""
    log_file: Path | None = None
    """The server's whole log is appended here."""
    verbose: bool = False
    server_args: tuple[str, ...] = ()
    """Further arguments of tritonserver, after our own."""


@dataclass(frozen=True)
class StartProgress:
    """Progress of a server's start."""

    elapsed_s: float
    last_message: str
    """The last message in the server's log."""


class ServerProcess:
    """One tritonserver and all the processes that it starts.

    It is a context manager that stops the server at the end. Two threads read the output. Everything else is for the
    caller's thread only.
    """

    http_port: int
    grpc_port: int
    metrics_port: int

    def __init__(self, options: ServeOptions, *, on_line: Callable[[str], None] | None = None) -> None:
        """Check the options; nothing is started yet. `on_line` gets every line of the server's output, in the reader's
        thread, until it raises OSError.

        :raises ToolError: when the folder or the arguments are wrong.
        """
        for option in (argument.partition("=")[0] for argument in options.server_args):
            if option in _OWN_OPTIONS:
                own = _OWN_OPTIONS[option]
                raise ToolError(f"{option} is set by serve itself: use serve's own {own}", exit_code=2)
        self.options = options
        self.models = model_names(options.repository)
        self.loaded_models: list[str] = []
        """Those that could be called when the server became ready: all, unless the server was told to load fewer."""
        self.stop_requested = False
        self.killed_after_s = 0
        """Seconds after a stop at which the server was killed because it had not ended; 0 where that was not needed."""
        self.pid: int | None = None
        """The server's process; None when it was never started."""
        self._on_line = on_line
        self._supervisor: subprocess.Popen[str] | None = None
        self._readers: list[threading.Thread] = []
        self._is_started = threading.Event()
        # The reader threads append while others copy. Both are atomic in CPython.
        self._lines: deque[str] = deque(maxlen=_LOG_TAIL_LINES)
        self._supervisor_said: deque[str] = deque(maxlen=_LOG_TAIL_LINES)
        self._log_is_whole = True
        self._hopeless = False
        self._kill_at: float | None = None
        self._patience_s = 0
        self._stop_signal = signal.SIGTERM
        self._was_ready = False
        self._launch = secrets.token_hex(4)
        self._links: tempfile.TemporaryDirectory[str] | None = None

    @classmethod
    def serving(
        cls,
        repository: Path,
        *,
        tritonserver: Path | None = None,
        server_args: tuple[str, ...] = (),
        on_progress: Callable[[StartProgress], None] | None = None,
    ) -> ServerProcess:
        """Start a server of `repository` on free ports of the loopback address, and wait until it is ready. Use it in a
        `with` block.

        :raises ToolError: when it can't be started or doesn't become ready. Nothing is left running.
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
        """The host to connect to. A server that listens on every address is reached at the loopback address."""
        host = self.options.host
        return "127.0.0.1" if host == "0.0.0.0" else f"[{host}]" if ":" in host else host

    @property
    def http_url(self) -> str:
        return f"http://{self.address}:{self.http_port}"

    @property
    def metrics_url(self) -> str:
        return f"http://{self.address}:{self.metrics_port}/metrics"

    @property
    def returncode(self) -> int | None:
        """The exit code, 128 + N for signal N. None while it runs, or if it never started."""
        code = self._supervisor.poll() if self._supervisor is not None else None
        if code == 0 and self.stop_requested and not self._was_ready:
            return 128 + self._stop_signal  # tritonserver takes no orderly stop while it loads
        return code if code is None or code >= 0 else 128 - code

    @property
    def log_tail(self) -> list[str]:
        """The last 2,000 lines of the server's output."""
        return list(self._lines.copy())

    def start(self) -> None:
        """Start the server, and return before it is ready.

        :raises ToolError: when there is no tritonserver, a port is taken, or the log can't be written. Nothing runs.
        """
        installation = find_tritonserver(self.options.tritonserver)
        options = self.options
        # Another program may take an `auto` port between its choice and its reservation.
        for _ in range(_LAUNCHES if "auto" in (options.http_port, options.grpc_port, options.metrics_port) else 1):
            self._choose_ports()
            self._launch_supervisor(installation)
            if self.pid is not None or self.stop_requested:
                return
            self._wait_for_end()
        said = self._supervisor_said[-1] if self._supervisor_said else f"the supervisor ended with {self.returncode}"
        raise PortError(
            f"{said.removeprefix(_SUPERVISOR)} (--http-port, --grpc-port and --metrics-port also take auto)"
        )

    def _choose_ports(self) -> None:
        ports = {name: getattr(self.options, f"{name}_port") for name in _ENDPOINTS}
        for name, port in ports.items():
            ports[name] = free_port(self.options.host, ports.values()) if port == "auto" else port
        self.http_port, self.grpc_port, self.metrics_port = ports.values()

    def _launch_supervisor(self, installation: Installation) -> None:
        from deepseek_triton_build import version_dir  # not for `serve --help`

        options = self.options
        log = _open_log(options.log_file)
        command = [
            *(sys.executable, "-S", str(version_dir() / "supervise.py"), "run"),
            *("--with-parent", str(os.getpid()), "--restart", "never", "--http-address", options.host),
            *(word for name in _ENDPOINTS for word in (f"--{name}-port", str(getattr(self, f"{name}_port")))),
            *("--repository", str(options.repository), "--exit-timeout", str(options.exit_timeout_secs), "--"),
            *(str(installation.binary), *installation.extra_args, *self._own_backends(installation)),
            *(*self._arguments(), *options.server_args),
        ]
        self._lines.clear()
        self._supervisor_said.clear()
        self._hopeless = self._was_ready = False
        self._is_started.clear()
        self.pid = None
        self._supervisor = supervisor = subprocess.Popen(
            command,
            env=os.environ | dict(installation.environment) | {"DEEPSEEK_TRITON_LAUNCH": self._launch},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
        assert supervisor.stdout is not None
        assert supervisor.stderr is not None
        self._readers = [
            threading.Thread(target=self._read, args=(supervisor.stdout, log), daemon=True),
            threading.Thread(target=self._listen, args=(supervisor.stderr,), daemon=True),
        ]
        for reader in self._readers:
            reader.start()
        self._is_started.wait()
        if self.stop_requested:
            supervisor.terminate()  # the stop was requested before there was a process to signal

    def _arguments(self) -> list[str]:
        return [
            f"--model-repository={self._path_without_blanks()}",
            *(f"--{endpoint}-address={self.options.host}" for endpoint in _ENDPOINTS),
            *(f"--{endpoint}-port={getattr(self, f'{endpoint}_port')}" for endpoint in _ENDPOINTS),
            f"--exit-timeout-secs={self.options.exit_timeout_secs}",
            # A prefix for each launch: two servers share no region, and the supervisor removes what is left.
            f"--backend-config=python,shm-region-prefix-name=deepseek_triton_{self._launch}_",
            *(
                f"{option}={_CLOSED_APIS}:closed={secrets.token_hex(16)}"
                for option in _CLOSING_OPTIONS
                if not self._was_given(option)
            ),
        ]

    def _path_without_blanks(self) -> Path:
        """Return the repository, or a link to it. Triton hands its path to the Python stub through a shell, without
        quotes: a stub whose path has a blank ends at its first look at it, and the server waits for ever (2.51)."""
        repository = self.options.repository.absolute()
        if not re.search(r"\s", str(repository)):
            return repository
        link = self._link_folder() / "repository"
        link.symlink_to(repository)
        return link

    def _own_backends(self, installation: Installation) -> list[str]:
        """Return the argument for the backends that lie in the models' folders (`build --backend-name`), if any do."""
        own = [path.parent for path in self.options.repository.glob("*/backends/*/model.py")]
        if not own:
            return []
        return [f"--backend-directory={installation.backend_directory(self._link_folder() / 'backends', own)}"]

    def _link_folder(self) -> Path:
        """Return a folder of this launch's own."""
        if self._links is None:
            self._links = tempfile.TemporaryDirectory(prefix="deepseek-triton-")
        return Path(self._links.name)

    def _listen(self, messages: TextIO) -> None:
        """Run the thread that reads what the supervisor says."""
        with messages:
            for line in messages:
                self._supervisor_said.append(line.rstrip("\n"))
                if match := re.fullmatch(rf"{_SUPERVISOR}started process (\d+)\n", line):
                    self.pid = int(match[1])
                    self._is_started.set()
        self._is_started.set()

    def _read(self, output: TextIO, log: FileIO | None) -> None:
        """Run the thread that reads the server's output."""
        sinks: list[Callable[[str], object]] = [self._on_line] if self._on_line else []
        with output, log or nullcontext():
            if log:
                sinks.append(functools.partial(self._write_log, log))
            for line in output:
                self._accept(line.rstrip("\n"), sinks)

    def _write_log(self, log: FileIO, line: str) -> None:
        try:
            log.write(f"{line}\n".encode())
        except OSError as error:
            self._log_is_whole = False
            complain(f"deepseek-triton serve: the log in {self.options.log_file} ends: {error.strerror}")
            raise

    def _accept(self, line: str, sinks: list[Callable[[str], object]]) -> None:
        self._lines.append(line)
        self._hopeless = self._hopeless or HOPELESS in line
        for sink in sinks.copy():
            try:
                sink(line)
            except OSError as error:
                # The disk is full or the terminal closed. Reading goes on: the server would block on unread output.
                sinks.remove(sink)
                self._lines.append(f"deepseek-triton: the log goes on without one of its readers: {error}")

    def wait_until_ready(self, on_progress: Callable[[StartProgress], None] | None = None) -> bool:
        """Wait until every model of the folder can be called. Returns False when a stop was requested before that.

        There is no time limit, because a cold load can take an hour. `on_progress` is called a few times a second.

        :raises ServerFailedError: when the server ended or can't become ready. Nothing is left running.
        """
        began = time.monotonic()
        launches = 1
        while self.stop_requested or not self._answers():
            if on_progress:
                on_progress(StartProgress(time.monotonic() - began, self._last_message()))
            if not self._has_ended(_TICK_S) and not self._hopeless:
                continue
            if self.stop_requested:
                self._wait_for_end()
                return False
            if launches == _LAUNCHES or not self._lost_free_port():
                raise self.failure()
            launches += 1
            self.start()
        self._was_ready = True
        return True

    def _answers(self) -> bool:
        """Whether the server, every model and the metrics answer. The metrics are the last to come up."""
        expected = {"ready", "loading"} if self._was_given("--model-control-mode") else {"ready"}
        try:
            states = {model: self._state(model) for model in self.models}
            if not expected.issuperset(states.values()):
                return False
            self.loaded_models = [model for model, state in states.items() if state == "ready"]
            if not self._was_given("--allow-metrics"):
                with self._client(self.models[0]) as client:
                    client.metrics()
        except DeepseekTritonError:
            return False
        return True

    def _state(self, model: str) -> str:
        with self._client(model) as client:
            [readiness] = client.readiness()
        return readiness.state

    def _client(self, model: str) -> Client:
        """A client for one look. No connection is kept after it: one that idles would hold up the server's exit."""
        return Client(
            self.http_url, model_name=model, metrics_url=self.metrics_url, timeouts=Timeouts(connect=_ANSWER_S)
        )

    def _was_given(self, option: str) -> bool:
        return any(argument.partition("=")[0] == option for argument in self.options.server_args)

    def _last_message(self) -> str:
        parsed = map(parse_log_line, reversed(self.log_tail))
        return next((line.message for line in parsed if line.message and not line.is_table), "")

    def _lost_free_port(self) -> bool:
        """Whether the server ended because another program took an `auto` port after we had chosen it."""
        options = self.options
        given = {options.http_port, options.grpc_port, options.metrics_port}
        taken = re.search(r"Socket '\S+:(\d+)' already in use", "\n".join(self.log_tail))
        return taken is not None and int(taken[1]) not in given

    def failure(self) -> ServerFailedError:
        """The error for a server that ended without being asked to, and where to read more."""
        if self._hopeless and self._supervisor is not None:
            self._supervisor.send_signal(_END_NOW)
        code = self.wait()
        if self._hopeless:
            cause, code = failure_cause(self.log_tail), 1
        elif code > 128 and (reason := dead_engine(self.log_tail)):
            cause = f"the engine died and the backend ended tritonserver, as on_fatal says: {reason}"
        elif code > 128:
            hint = "; was memory short?" if code == 128 + signal.SIGKILL else ""
            cause = f"tritonserver was ended by signal {code - 128}{hint}"
        else:
            cause = failure_cause(self.log_tail)
        return ServerFailedError(f"{cause.rstrip('.')}{self._where_to_read_more()}", exit_code=code or 1)

    def _where_to_read_more(self) -> str:
        if self.options.verbose:
            return ""
        path = self.options.log_file if self._log_is_whole else None
        if path is None:
            # After a load of an hour nobody wants to hear that --log-file would have helped, so the log is kept anyway.
            try:
                descriptor, name = tempfile.mkstemp(prefix="deepseek-triton-server-", suffix=".log")
                path = Path(name)
                with open(descriptor, "w", encoding="utf-8") as file:
                    file.writelines(f"{line}\n" for line in self.log_tail)
            except OSError as error:  # the cause matters more
                return f" (the server's log can't be kept: {error.strerror})"
        return f" (the server's log: {path})"

    def request_stop(self, signum: int = signal.SIGTERM) -> None:
        """Ask the server to end, and return at once. It is killed when its time has run out, or by a second call. This
        is the only method for signal handlers. `wait` and `wait_until_ready` do the killing."""
        is_repeated, self.stop_requested = self.stop_requested, True
        self._patience_s = 0 if is_repeated else self.options.exit_timeout_secs + _GRACE_S
        self._kill_at = time.monotonic() + self._patience_s
        if self._supervisor is not None and not is_repeated:
            self._stop_signal = signal.Signals(signum)
            self._supervisor.send_signal(signum)

    def wait(self) -> int:
        """Block until the server has ended and nothing of it is left. Returns its exit code; 128 + N for signal N."""
        assert self._supervisor is not None, "it was never started"
        self._wait_for_end()
        code = self.returncode
        assert code is not None
        return code

    def stop(self) -> None:
        """End the server, if one runs: in order, with the exit timeout for open requests, then by force."""
        if self._supervisor is None:
            return
        if not self.stop_requested:
            if not self._has_ended(0):
                time.sleep(_CLIENTS_LEAVE_S)
            self.request_stop()
        self.wait()

    def _has_ended(self, within_s: float) -> bool:
        """Wait for the end of a supervisor that was started; kill everything when a stop has taken too long."""
        if self._supervisor is None:
            return True
        if self._kill_at is not None and time.monotonic() >= self._kill_at:
            self.killed_after_s, self._kill_at = self._patience_s, None
            self._supervisor.send_signal(_END_NOW)
        with suppress(subprocess.TimeoutExpired):
            self._supervisor.wait(within_s)
        return self._supervisor.returncode is not None

    def _wait_for_end(self) -> None:
        """Wait for the supervisor, its last output and, where it was killed, its guard, which keeps the pipes open."""
        while not self._has_ended(_TICK_S):
            pass
        for reader in self._readers:
            reader.join(_LAST_OUTPUT_S)
        if self._links is not None:
            self._links.cleanup()
            self._links = None


def free_port(host: str, others: Collection[object] = ()) -> int:
    """Return a free port below those of outgoing connections, which could take it before the model has loaded.

    Where none can be listened on, the supervisor says why.
    """
    try:
        low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:
        low = _FIRST_UNPRIVILEGED + _PORT_CHOICE
    below = range(max(_FIRST_UNPRIVILEGED, low - _PORT_CHOICE), max(low, _FIRST_UNPRIVILEGED + _PORT_CHOICE))
    for port in random.sample(below, 32):
        with suppress(OSError), socket.socket(socket.AF_UNIX) as reservation:
            # The name by which a supervisor reserves a port that its server will open only when the model has loaded.
            reservation.bind(f"\0deepseek-triton/port/{port}")
            socket.create_server((host, port)).close()
            if port not in others:
                return port
    return random.choice(below)


def model_names(repository: Path) -> list[str]:
    """Return the names of the models in the folder, sorted. Raises RepositoryError when there is none."""
    try:
        folders = sorted(repository.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        raise RepositoryError(
            f"there is no folder {repository}: `deepseek-triton build` writes a model repository"
        ) from None
    except OSError as error:
        raise RepositoryError(f"{repository} can't be read: {error.strerror}") from error
    if os.path.isfile(repository / "config.pbtxt"):
        raise RepositoryError(f"{repository} is a model, not a model repository: give the folder above it")
    models, closed = [], ""
    for folder in folders:
        try:
            if (folder / "config.pbtxt").is_file():
                models.append(folder.name)
        except OSError as error:
            closed += f"; {folder} can't be read: {error.strerror}"
    if not models:
        raise RepositoryError(
            f"{repository} holds no model: expected {repository}/MODEL/config.pbtxt"
            + (closed or "; `deepseek-triton build` writes one")
        )
    return models


def _open_log(path: Path | None) -> FileIO | None:
    """Open the log without a buffer, so that closing it doesn't write a line again that a full disk has refused."""
    try:
        return path.open("ab", buffering=0) if path else None
    except OSError as error:
        raise ToolError(f"the log can't be written to {path}: {error.strerror}") from error
