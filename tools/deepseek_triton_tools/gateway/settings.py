"""The decisions of a gateway's owner. The command line and a file fill it in."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

DEFAULT_PORT = 9000
"""The port of Triton's own OpenAI front end, so that clients need no change."""


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """A model by the name that clients use.

    name: "" for the name that the servers tell. servers: URLs, `dns+http://HOST:PORT` (each address of a name), or
    `file:PATH` (a list that is read again when it changes). triton_model: the model's name on the servers.
    """

    servers: tuple[str, ...]
    name: str = ""
    triton_model: str = "tensorrt_llm"
    context_servers: tuple[str, ...] = ()
    """Compute the prompts for `servers`, which generate the answers then. Without any, `servers` do both."""
    local_prefill_tokens: int = 0
    """Prompts of at most so many tokens are computed by the server that generates the answer."""


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """All of a gateway's settings."""

    models: tuple[ModelSettings, ...]
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    workers: int = 1
    tls_certificate: Path | None = None
    """The gateway's own, as PEM. None for plain HTTP."""
    tls_key: Path | None = None
    """None where the certificate's file has the key."""
    keys_file: Path | None = None
    """None lets anyone ask."""
    metrics_need_key: bool = False
    """Whether GET /metrics wants a key, as the API does. Only an admin's key is told of single servers and keys."""
    page: bool = True
    """Whether the chat page and the dashboard are served."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages may ask, as in https://chat.example.com; "*" for all."""
    max_body_bytes: int = 64 * 2**20
    body_timeout_s: float = 60.0
    """How long a request's body may take to come whole."""
    keep_alive_s: float = 15.0
    """After so long without an event, a stream gets a comment, so that proxies keep the connection."""
    drain_s: int = 30
    """How long running requests may go on after a stop was asked for."""
    reasoning_fields: tuple[str, ...] = ("reasoning_content",)
    """The name of an answer's reasoning: reasoning_content, reasoning, or both."""
    access_log: str | None = None
    """A file that gets a line of JSON for each request; "-" for stdout."""
    traces_url: str | None = None
    """Where OTLP over HTTP is taken, such as http://localhost:4318."""
    upstream_headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    """Added to each request to Triton, such as a restricted API's key. They are secrets."""
    upstream_ca: Path | None = None
    """Certificates to trust for servers with https://, as PEM. None for the system's."""
    metrics_port: int | None = 8002
    """Where the servers' metrics are, on the host of each. None: they are not asked for."""
    limits_file: Path | None = None
    """Where several workers count what keys use; `serve` sets it. None for one process."""
