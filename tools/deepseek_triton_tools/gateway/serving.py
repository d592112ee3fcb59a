"""Runs the gateway: uvicorn, in one process or in several that share a socket."""

from __future__ import annotations

import os
import pickle
import tempfile
from pathlib import Path

import uvicorn

from deepseek_triton_tools.gateway.settings import GatewaySettings

_STATE_VARIABLE = "DEEPSEEK_TRITON_GATEWAY_STATE"
"""Names the folder that the processes of one gateway share."""
_APPLICATION = f"{__name__}:worker_application"


def serve(settings: GatewaySettings) -> None:
    """Serve until SIGINT or SIGTERM; then finish what runs, for at most `drain_s`. Raises SystemExit if it can't."""
    with tempfile.TemporaryDirectory(prefix="deepseek-triton-gateway-") as folder:
        # uvicorn makes workers by starting the program anew. The file can be read by this user only, and so can the
        # secrets in it.
        (Path(folder) / "settings").write_bytes(pickle.dumps(settings))
        os.environ[_STATE_VARIABLE] = folder
        uvicorn.run(
            _APPLICATION,
            factory=True,
            host=settings.host,
            port=settings.port,
            workers=settings.workers,
            ssl_certfile=settings.tls_certificate,
            ssl_keyfile=settings.tls_key,
            timeout_graceful_shutdown=settings.drain_s,
            lifespan="on",
            ws="none",
            log_level="warning",
            access_log=False,  # the gateway has its own
            server_header=False,
        )


def worker_application() -> object:
    """The application of one process, with the settings that `serve` was given."""
    from deepseek_triton_tools.gateway.app.application import create_app

    settings: GatewaySettings = pickle.loads((Path(os.environ[_STATE_VARIABLE]) / "settings").read_bytes())
    return create_app(settings)
