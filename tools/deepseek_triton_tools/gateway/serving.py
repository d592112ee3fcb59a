"""Runs the gateway: uvicorn, in one process or in several that share a socket."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import pickle
import signal
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn

from deepseek_triton_tools.gateway.bounded_head import BoundedHeadProtocol
from deepseek_triton_tools.gateway.settings import GatewaySettings
from deepseek_triton_tools.host.open_files import allow_open_files

_FOLDER_VARIABLE = "DEEPSEEK_TRITON_GATEWAY_FOLDER"
"""Names the folder that the workers of one gateway share."""
_SETTINGS = "settings"
_OPEN_FILES = 2**16
"""Each client has a connection, and so has each request to a server. Some are kept for the next request."""


class DrainNotice(logging.Filter):
    """Lets pass what uvicorn says below WARNING only where a stop waits, which somebody at a terminal must be told."""

    def __init__(self, settings: GatewaySettings) -> None:
        super().__init__()
        self._notice = f"stopping: running requests may go on for {settings.drain_s} s"
        if settings.workers == 1:  # workers are uvicorn's own servers, which drop their requests then
            self._notice += "; Ctrl-C again ends them at once"

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING and record.getMessage().startswith("Waiting for connections"):
            record.msg = self._notice
            return True
        return record.levelno >= logging.WARNING


def serve(settings: GatewaySettings) -> None:
    """Serve until SIGINT or SIGTERM; then finish what runs, for at most `drain_s`. Raises SystemExit if it can't."""
    _configure_logging(settings)
    allow_open_files(_OPEN_FILES)
    # uvicorn sends itself the signal again when it has stopped; the folder below is to be removed even then.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    if settings.workers == 1:
        from deepseek_triton_tools.gateway.app.application import create_app

        _run(functools.partial(create_app, settings), settings)
        return
    with tempfile.TemporaryDirectory(prefix="deepseek-triton-gateway-") as name:
        # uvicorn starts workers as new programs, which read the settings from a file. Only this user can read it, and
        # so the secrets in it.
        folder = Path(name)
        metrics = folder / "metrics"
        metrics.mkdir()
        shared = dataclasses.replace(settings, limits_file=folder / "limits")
        (folder / _SETTINGS).write_bytes(pickle.dumps(shared))
        os.environ |= {_FOLDER_VARIABLE: name, "PROMETHEUS_MULTIPROC_DIR": str(metrics)}
        _run(f"{__name__}:worker_application", settings)


def worker_application() -> object:
    """The application of one worker."""
    from deepseek_triton_tools.gateway.app.application import create_app

    settings: GatewaySettings = pickle.loads((Path(os.environ[_FOLDER_VARIABLE]) / _SETTINGS).read_bytes())
    _configure_logging(settings)
    return create_app(settings)


class GatewayServer(uvicorn.Server):
    """Ends requests in good order at a second Ctrl-C: uvicorn would drop them, and print where each of them stood. It
    does so at the third, for clients that don't read the end of their answer."""

    _ending = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit and sig == signal.SIGINT and not self._ending:
            self._ending = True
            for task in self.server_state.tasks:
                task.cancel()
        else:
            super().handle_exit(sig, frame)


def _run(factory: str | Callable[[], object], settings: GatewaySettings) -> None:
    options: dict[str, Any] = {
        "factory": True,
        "host": settings.host,
        "port": settings.port,
        "workers": settings.workers,
        "ssl_certfile": settings.tls_certificate,
        "ssl_keyfile": settings.tls_key,
        "timeout_graceful_shutdown": settings.drain_s,
        "timeout_keep_alive": 75,  # longer than clients and load balancers keep idle connections, mostly 60 s
        "lifespan": "on",
        "http": BoundedHeadProtocol,
        "ws": "none",
        "log_config": None,
        "access_log": False,  # the gateway has its own
        "server_header": False,
    }
    if settings.workers > 1:
        uvicorn.run(factory, **options)
        return
    server = GatewayServer(uvicorn.Config(factory, **options))
    with suppress(KeyboardInterrupt):  # uvicorn sends itself the signal again
        server.run()
    if not server.started:
        sys.exit(1)


def _configure_logging(settings: GatewaySettings) -> None:
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.WARNING)
    logging.getLogger("deepseek_triton_tools").setLevel(logging.INFO)
    of_uvicorn = logging.getLogger("uvicorn.error")
    of_uvicorn.setLevel(logging.INFO)
    of_uvicorn.addFilter(DrainNotice(settings))
