"""A tritonserver below the supervisor: start it, wait for it, stop it.

The supervisor (supervise.py) reserves the ports, starts tritonserver, says when its models are ready, kills it when a
stop takes too long or when this process ends in whatever way, and leaves nothing of it behind. Here is what it does not
know: where tritonserver is and what it needs, free ports, and what its log says.
"""

import os
import random
import re
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext, suppress
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
# Number of ports that `auto` chooses from. With Linux's defaults they are 16384 to 32767.
_PORT_CHOICE = 16384
_TICK_S = 0.2
_LOG_TAIL_LINES = 2000
_ANSWER_S = 5.0
# Seconds before a stop, for clients that just had their answers to disconnect. A SIGTERM in the moment in which a
# client disconnects can crash Triton 2.51; 0.2 s between the two were enough in every try (docs/tritonserver.md).
_CLIENTS_LEAVE_S = 0.5
# Seconds for the last output, and for the supervisor's guard where the supervisor itself was killed.
_LAST_OUTPUT_S = 5
_TRIES = 3
# The supervisor's signal that ends everything at once.
_END_NOW = signal.SIGUSR2
# Beginning of the supervisor's own lines.
_SUPERVISOR = "deepseek-triton: "
# The supervisor's words at the end of a stop that took longer than the exit timeout and 15 s.
_KILLED = "did not end in time and was killed"
_STOPPED_LOADING = "stopped while it was loading"
_STOPS = (_KILLED, _STOPPED_LOADING, "ended at once, as asked")

# tritonserver's option that `serve` sets -> the option of `serve` for it.
_OWN_OPTIONS = {
    "--model-repository": "DIR",
    "--model-store": "DIR",
    **{f"--{name}-address": "--host" for name in _ENDPOINTS},
    **{f"--{name}-port": f"--{name}-port" for name in _ENDPOINTS},
    "--exit-timeout-secs": "--exit-timeout",
    "--log-file": "--log-file",
}

_CLOSING_OPTIONS = ("--http-restricted-api", "--grpc-restricted-protocol")
# Triton's endpoints that want a key which nobody is told, as in start.sh. By them any client could map the host's
# memory, have files written and change what is logged.
_CLOSED_APIS = ("shared-memory", "trace", "logging")


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
    elapsed_s: float
    last_message: str
    """The last message in the server's log."""


class ServerProcess(AbstractContextManager["ServerProcess"]):
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
        self._arguments = {argument.partition("=")[0] for argument in options.server_args}
        if own := sorted(self._arguments & _OWN_OPTIONS.keys()):
            raise ToolError(f"{own[0]} is set by serve itself: use serve's own {_OWN_OPTIONS[own[0]]}", exit_code=2)
        words = "\0".join(("", *options.server_args))
        self._restricted = {key: ",".join(re.findall(rf"\0{key}[=\0]([^:]*)", words)) for key in _CLOSING_OPTIONS}
        if "health" in self._restricted["--http-restricted-api"]:
            raise ToolError("--http-restricted-api has to leave health open: the supervisor has no key", exit_code=2)
        self.options = options
        self.models = model_names(options.repository)
        self.loaded_models: list[str] = []
        """Those that could be called when the server became ready: all, unless the server was told to load fewer."""
        self.stop_requested = False
        self.pid: int | None = None
        """The server's process; None when it was never started."""
        self._on_line = on_line
        self._log: FileIO | None = None
        self._supervisor: subprocess.Popen[str] | None = None
        self._readers: list[threading.Thread] = []
        self._has_spoken = threading.Event()
        self._is_ready = False
        # The reader threads append while others copy. Both are atomic in CPython.
        self._lines: deque[str] = deque(maxlen=_LOG_TAIL_LINES)
        self._last_words = ""
        self._hopeless = False
        self._stop_signal = signal.SIGTERM
        self._missed_stop = False
        self._links: tempfile.TemporaryDirectory[str] | None = None

    @classmethod
    def serving(
        cls,
        repository: Path,
        *,
        tritonserver: Path | None = None,
        server_args: tuple[str, ...] = (),
        on_progress: Callable[[StartProgress], None] | None = None,
    ) -> "ServerProcess":
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
        if code == 0 and self._last_words.startswith(_STOPPED_LOADING):
            return 128 + self._stop_signal  # tritonserver takes no orderly stop while it loads
        return code if code is None or code >= 0 else 128 - code

    @property
    def was_killed(self) -> bool:
        """Whether it had to be killed because a stop took too long."""
        return self._last_words.startswith(_KILLED)

    @property
    def log_tail(self) -> list[str]:
        """The last 2,000 lines of the server's output."""
        return list(self._lines.copy())

    def start(self) -> None:
        """Start the server, and return before it is ready.

        :raises ToolError: when there is no tritonserver, a port is taken, or the log can't be written. Nothing runs.
        """
        installation = find_tritonserver(self.options.tritonserver)
        ports = {name: getattr(self.options, f"{name}_port") for name in _ENDPOINTS}
        # Another program may take an `auto` port between its choice and its reservation.
        for _ in range(_TRIES if "auto" in ports.values() else 1):
            chosen = dict(ports)
            for name, port in ports.items():
                chosen[name] = free_port(self.options.host, chosen.values()) if port == "auto" else port
            self.http_port, self.grpc_port, self.metrics_port = chosen.values()
            self._launch_supervisor(installation)
            if self.pid is not None or self.stop_requested:
                return
            self.wait()
        words = self._last_words or f"the supervisor ended with {self.returncode}"
        if words.startswith("--") or self.returncode != 2:
            raise ToolError(words, exit_code=self.returncode or 1)
        raise PortError(f"{words} (--http-port, --grpc-port and --metrics-port also take auto)", exit_code=2)

    def _launch_supervisor(self, installation: Installation) -> None:
        from deepseek_triton_build import version_dir  # not for `serve --help`

        options, launch = self.options, secrets.token_hex(4)
        if options.log_file is not None:
            try:
                # Without a buffer: closing it would write a line again that a full disk has refused.
                self._log = options.log_file.open("ab", buffering=0)
            except OSError as error:
                raise ToolError(f"the log can't be written to {options.log_file}: {error.strerror}") from error
        ports = {name: getattr(self, f"{name}_port") for name in _ENDPOINTS}
        command = [
            *(sys.executable, "-S", str(version_dir() / "supervise.py"), "run"),
            *("--with-parent", str(os.getpid()), "--restart", "never", "--http-address", options.host),
            *(word for name, port in ports.items() for word in (f"--{name}-port", str(port))),
            *(f"--repository={options.repository}", "--exit-timeout", str(options.exit_timeout_secs), "--"),
            *(str(installation.binary), *installation.extra_args, *self._places(installation)),
            *(f"--{name}-address={options.host}" for name in _ENDPOINTS),
            *(f"--{name}-port={port}" for name, port in ports.items()),
            f"--exit-timeout-secs={options.exit_timeout_secs}",
            # A prefix for each launch: two servers share no region, and the supervisor removes what is left.
            f"--backend-config=python,shm-region-prefix-name=deepseek_triton_{launch}_",
            *(
                f"{option}={','.join(left)}:closed={secrets.token_hex(16)}"
                for option, named in self._restricted.items()
                if (left := [api for api in _CLOSED_APIS if api not in named])
            ),
            *options.server_args,
        ]
        self._has_spoken.clear()
        # A stop that comes before there is a process to signal is sent below. In this order none falls in between, and
        # none is sent twice, which would end the server at once.
        self._supervisor = None
        self._missed_stop = self.stop_requested
        self._supervisor = supervisor = subprocess.Popen(
            command,
            env=os.environ | dict(installation.environment) | {"DEEPSEEK_TRITON_LAUNCH": launch},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
        outputs = ((self._read, supervisor.stdout), (self._listen, supervisor.stderr))
        self._readers = [threading.Thread(target=read, args=(output,), daemon=True) for read, output in outputs]
        for reader in self._readers:
            reader.start()
        self._has_spoken.wait()
        if self._missed_stop:
            supervisor.send_signal(self._stop_signal)

    def _places(self, installation: Installation) -> list[str]:
        """Return the arguments for the repository, and for backends that lie in it (`build --backend-name`)."""
        repository = self.options.repository.absolute()
        self._links = links = tempfile.TemporaryDirectory(prefix="deepseek-triton-")
        arguments = []
        if own := [path.parent for path in repository.glob("*/backends/*/model.py")]:
            folder = installation.backend_directory(Path(links.name, "backends"), own)
            arguments.append(f"--backend-directory={folder}")
        # Triton hands the path to the Python stub through a shell, without quotes: a stub whose path has a blank ends
        # at its first look at it, and the server waits for ever (2.51). The wheel's stub takes ASCII alone.
        if shlex.quote(str(repository)) != str(repository):
            link = Path(links.name, "repository")
            link.symlink_to(repository)
            repository = link
        return [*arguments, f"--model-repository={repository}"]

    def _listen(self, messages: TextIO) -> None:
        """Run the thread that reads what the supervisor says."""
        with messages:
            for line in messages:
                self._last_words = line.rstrip("\n").removeprefix(_SUPERVISOR)
                if match := re.fullmatch(r"started process (\d+)", self._last_words):
                    self.pid = int(match[1])
                    self._has_spoken.set()
                if self._last_words.startswith("launch "):  # it waits for another one, which is stopping
                    complain(self._last_words)
                self._is_ready = self._is_ready or self._last_words.startswith("ready after ")
        self._has_spoken.set()

    def _read(self, output: TextIO) -> None:
        """Run the thread that reads the server's output. It never stops reading: the server would block on it."""
        with output, self._log or nullcontext():
            for line in output:
                text = line.rstrip("\n")
                self._lines.append(text)
                self._hopeless = self._hopeless or HOPELESS in text
                try:
                    if self._log is not None:
                        self._log.write(f"{text}\n".encode())
                except OSError as error:
                    self._log = None
                    complain(f"deepseek-triton serve: the log in {self.options.log_file} ends: {error.strerror}")
                try:
                    if self._on_line is not None:
                        self._on_line(text)
                except OSError:  # the terminal was closed
                    self._on_line = None

    def wait_until_ready(self, on_progress: Callable[[StartProgress], None] | None = None) -> bool:
        """Wait until every model of the folder can be called. Returns False when a stop was requested before that.

        There is no time limit, because a cold load can take an hour. `on_progress` is called a few times a second.

        :raises ServerFailedError: when the server ended or can't become ready. Nothing is left running.
        """
        began = time.monotonic()
        while self.stop_requested or not (self._is_ready and self._has_metrics()):
            if on_progress:
                parsed = map(parse_log_line, reversed(self.log_tail))
                last = next((line.message for line in parsed if line.message and not line.is_table), "")
                on_progress(StartProgress(time.monotonic() - began, last))
            if not self._has_ended(_TICK_S) and not self._hopeless:
                continue
            if not self.stop_requested:
                raise self.failure()
            self.wait()
            return False
        self.loaded_models = [model for model in self.models if self._is_loaded(model)]
        return True

    def _has_metrics(self) -> bool:
        """Whether the metrics' port is open: the server opens it last."""
        if "--allow-metrics" in self._arguments:
            return True
        with suppress(OSError):
            socket.create_connection((self.address.strip("[]"), self.metrics_port), _ANSWER_S).close()
            return True
        return False

    def _is_loaded(self, model: str) -> bool:
        if "--model-control-mode" not in self._arguments:
            return True
        with (
            suppress(DeepseekTritonError),
            # No connection is kept: one that idles would hold up the server's exit.
            Client(self.http_url, model_name=model, timeouts=Timeouts(connect=_ANSWER_S)) as client,
        ):
            return client.readiness()[0].state == "ready"
        return False

    def failure(self) -> ServerFailedError:
        """The error for a server that ended without being asked to, and where to read more."""
        if self._hopeless and self._supervisor is not None:
            self._supervisor.send_signal(_END_NOW)
        code = self.wait()
        cause = failure_cause(self.log_tail)
        if self._hopeless:
            code = 1
        elif self._last_words.startswith(_STOPS):  # by `launch stop`
            cause = self._last_words.partition(" (")[0]
        elif code > 128 and (reason := dead_engine(self.log_tail)):
            cause = f"the engine died and the backend ended tritonserver, as on_fatal says: {reason}"
        elif code > 128:
            hint = "; was memory short?" if code == 128 + signal.SIGKILL else ""
            cause = f"tritonserver was ended by signal {code - 128}{hint}"
        where = "" if self.options.verbose else f" ({self._where_the_log_is()})"
        return ServerFailedError(f"{cause.rstrip('.')}{where}", exit_code=code or 1)

    def _where_the_log_is(self) -> str:
        """After a load of an hour nobody wants to hear that --log-file would have helped, so the log is kept anyway."""
        if self._log is not None:
            return f"the server's log: {self.options.log_file}"
        try:
            descriptor, name = tempfile.mkstemp(prefix="deepseek-triton-server-", suffix=".log")
            with open(descriptor, "w", encoding="utf-8") as file:
                file.writelines(f"{line}\n" for line in self.log_tail)
        except OSError as error:  # the cause matters more
            return f"the server's log can't be kept: {error.strerror}"
        return f"the server's log: {name}"

    def request_stop(self, signum: int = signal.SIGTERM) -> None:
        """Ask the server to end, and return at once. A second call kills it. This is the only method for signal
        handlers."""
        is_repeated, self.stop_requested = self.stop_requested, True
        self._stop_signal = self._stop_signal if is_repeated else signal.Signals(signum)
        if self._supervisor is None:
            self._missed_stop = True
        else:
            self._supervisor.send_signal(_END_NOW if is_repeated else signum)

    def wait(self) -> int:
        """Block until the server has ended and nothing of it is left. Returns its exit code; 128 + N for signal N."""
        assert self._supervisor is not None, "it was never started"
        while not self._has_ended(_TICK_S):
            pass
        # Where the supervisor was killed, its guard keeps the pipes open until it has ended everything.
        for reader in self._readers:
            reader.join(_LAST_OUTPUT_S)
        if self._links is not None:
            self._links.cleanup()
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
        if self._supervisor is None:
            return True
        with suppress(subprocess.TimeoutExpired):
            self._supervisor.wait(within_s)
        return self._supervisor.returncode is not None


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
    """Return the names of the models in the folder, sorted.

    :raises RepositoryError: when there is none.
    """
    if os.path.isfile(repository / "config.pbtxt"):
        raise RepositoryError(f"{repository} is a model, not a model repository: give the folder above it")
    try:
        folders = sorted(repository.iterdir())
    except OSError as error:
        why = f"{repository} can't be read: {error.strerror}"
        if isinstance(error, (FileNotFoundError, NotADirectoryError)):
            why = f"there is no folder {repository}: `deepseek-triton build` writes a model repository"
        raise RepositoryError(why) from error
    models, closed = [], ""
    for folder in folders:
        try:
            if (folder / "config.pbtxt").is_file():
                models.append(folder.name)
        except OSError as error:
            closed += f"; {folder} can't be read: {error.strerror}"
    if not models:
        hint = closed or "; `deepseek-triton build` writes one"
        raise RepositoryError(f"{repository} holds no model: expected {repository}/MODEL/config.pbtxt{hint}")
    return models
