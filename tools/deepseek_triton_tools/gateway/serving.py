"""Runs the gateway: uvicorn, in one process or in several that share a socket."""

import asyncio
import dataclasses
import functools
import logging
import os
import pickle
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing import resource_tracker
from pathlib import Path
from socket import socket
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.supervisors.multiprocess import Multiprocess

from deepseek_triton_tools.gateway.settings import GatewaySettings
from deepseek_triton_tools.host.processes import allow_open_files

_FOLDER_VARIABLE = "DEEPSEEK_TRITON_GATEWAY_FOLDER"
"""Names the folder that the workers of one gateway share."""
_SETTINGS = "settings"
_OPEN_FILES = 2**16
"""Each client has a connection, and so has each request to a server. Some are kept for the next request."""
Problems = Callable[[bool], Iterable[str]]
"""Why workers can't begin, or, of True, should not take the place of others that are well."""
_STOPPING = "stopping: running requests may go on for %s s"
_log = logging.getLogger(__name__)


def serve(settings: GatewaySettings, problems: Problems = lambda _: ()) -> None:
    """Serve until a signal says stop; then finish what runs, for at most `drain_s`. Raises SystemExit if it can't."""
    _configure_logging()
    allow_open_files(_OPEN_FILES)
    # uvicorn sends itself the signal again when it has stopped; the folder below is to be removed even then.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    if settings.workers == 1:
        from deepseek_triton_tools.gateway.application import create_app

        _run(functools.partial(create_app, settings), settings, problems)
        return
    with tempfile.TemporaryDirectory(prefix="deepseek-triton-gateway-") as name:
        # uvicorn starts workers as new programs, which read the settings from a file. Only this user can read it, and
        # so the secrets in it.
        folder = Path(name)
        (metrics := folder / "metrics").mkdir()
        shared = dataclasses.replace(settings, shared_folder=folder)
        (folder / _SETTINGS).write_bytes(pickle.dumps(shared))
        os.environ |= {_FOLDER_VARIABLE: name, "PROMETHEUS_MULTIPROC_DIR": str(metrics)}
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # for multiprocessing's own process, which a terminal would end
        resource_tracker.ensure_running()
        _run(f"{__name__}:worker_application", settings, problems)


def worker_application() -> object:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a terminal that hangs up tells all of its processes
    from deepseek_triton_tools.gateway.application import create_app

    settings: GatewaySettings = pickle.loads((Path(os.environ[_FOLDER_VARIABLE]) / _SETTINGS).read_bytes())
    _configure_logging()
    return create_app(settings)


class GatewayServer(uvicorn.Server):
    """Ends requests in good order at a second Ctrl-C: uvicorn would drop them, and print where each of them stood. It
    does so at the third, for clients that don't read the end of their answer."""

    _ending = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if sig == signal.SIGHUP and not self.should_exit:
            _log.warning("SIGHUP stops a gateway with one worker; a reload of its certificate needs --workers 2")
        if self.should_exit and sig == signal.SIGINT and not self._ending:
            self._ending = True
            for task in self.server_state.tasks:
                task.cancel()
        else:
            super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        _log.info(f"{_STOPPING}; Ctrl-C again ends them at once", self.config.timeout_graceful_shutdown)
        await super().shutdown(sockets)


class GatewayWorkers(Multiprocess):
    """Takes no connection once the workers are to end: the kernel would accept those that come to this process's own
    copy of the socket, and nobody would answer them. Says which have died, and begins none that could not start."""

    _told = ""

    def __init__(self, config: uvicorn.Config, problems: Problems) -> None:
        super().__init__(config, [config.bind_socket()])
        self._problems = problems

    def keep_subprocess_alive(self) -> None:
        before = [*self.processes]
        if all(each.process.is_alive() for each in before) or self._may_begin("a worker died and is not replaced"):
            super().keep_subprocess_alive()
        for each in before:
            if each not in self.processes:
                _log.warning("worker %s died (exit code %s) and was replaced", each.pid, each.exitcode)

    def restart_all(self) -> None:
        self._told = ""
        if self._may_begin("the workers stay, with the former files", renews=True):
            _log.info("the workers are replaced: keys and certificates are read again, --config is not")
            super().restart_all()

    def _may_begin(self, instead: str, *, renews: bool = False) -> bool:
        """Whether a worker could start now. If not, the log says so, once."""
        problem = "; ".join(self._problems(renews))
        former, self._told = self._told, f"{instead}: {problem}"
        if problem and self._told != former:
            _log.error("%s", self._told)
        return not problem

    def handle_term(self) -> None:
        if not self.should_exit.is_set():
            _log.info(_STOPPING, self.config.timeout_graceful_shutdown)
        super().handle_term()

    handle_int = handle_term

    def terminate_all(self) -> None:
        for each in self.sockets:
            each.close()
        super().terminate_all()


def _run(factory: str | Callable[[], object], settings: GatewaySettings, problems: Problems) -> None:
    config = uvicorn.Config(
        factory,
        factory=True,
        host=settings.host,
        port=settings.port,
        workers=settings.workers,
        ssl_certfile=settings.tls_certificate,
        ssl_keyfile=settings.tls_key,
        timeout_graceful_shutdown=settings.drain_s,
        timeout_keep_alive=75,  # longer than clients and load balancers keep idle connections, mostly 60 s
        timeout_worker_healthcheck=20,  # it starts after the first checks of its servers, which take 5 s at most
        lifespan="on",
        http=BoundedHeadProtocol,
        ws="none",
        log_config=None,
        access_log=False,  # the gateway has its own
        server_header=False,
    )
    if settings.workers > 1:
        GatewayWorkers(config, problems).run()
        return
    server = GatewayServer(config)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup ignores it
        signal.signal(signal.SIGHUP, server.handle_exit)
    with suppress(KeyboardInterrupt):  # uvicorn sends itself the signal again
        server.run()
    if not server.started:
        sys.exit(1)


def _configure_logging() -> None:
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.WARNING)
    logging.getLogger("deepseek_triton_tools").setLevel(logging.INFO)


MOST_HEAD_BYTES = 2**16
"""Bytes of a request's line and headers, or of what follows its last byte of body, beyond those that come in the first
piece, which is at most 256 KiB."""
HEAD_S = 60.0
"""Seconds from a connection's beginning, or a request's first byte, to the end of the request's headers."""


class BoundedHeadProtocol(HttpToolsProtocol):
    """Ends a connection, with 431 or 408, whose request has no end of its headers, or of the trailers behind a body."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._in_head = self._in_request = True
        self._num_bytes = -1
        """Bytes of the head, or behind the body, beyond the first piece with them; -1 before that."""
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._in_request or self.transport.is_closing():
            return
        self._num_bytes = 0 if self._num_bytes < 0 else self._num_bytes + len(data)
        if self._num_bytes > MOST_HEAD_BYTES:
            self._refuse(b"431 Request Header Fields Too Large")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = self._in_request = True
        self._num_bytes = -1
        self._wait()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Drop trailers: uvicorn would keep all of them, and nobody reads them."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head, self._num_bytes = False, -1
        self._stop_waiting()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_bytes = -1
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_request, self._num_bytes = False, -1
        super().on_message_complete()

    def _wait(self) -> None:
        if self._deadline is None:
            self._deadline = asyncio.get_running_loop().call_later(HEAD_S, self._refuse, b"408 Request Timeout")

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _refuse(self, status: bytes) -> None:
        self._stop_waiting()
        if not self.transport.is_closing():
            if self._in_head or not self.cycle.response_started:
                self.transport.write(b"HTTP/1.1 %b\r\nconnection: close\r\ncontent-length: 0\r\n\r\n" % status)
            self.transport.close()
