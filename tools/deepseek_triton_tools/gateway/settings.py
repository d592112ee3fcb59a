"""What an owner of a gateway decides. The command line and a file fill it in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

DEFAULT_PORT = 9000
"""The port of Triton's own OpenAI front end, so that clients need no change."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model by the name that clients use.

    name: "" for the name that the servers tell. servers: URLs, `dns+http://HOST:PORT` (each address of a name), or
    `file:PATH` (a list that is read again when it changes). triton_model: the model's name on the servers.
    """

    servers: tuple[str, ...]
    name: str = ""
    triton_model: str = "tensorrt_llm"


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """All of a gateway's settings.

    upstream_headers: added to each request to Triton, such as a restricted API's key. keys_file: None lets anyone ask.
    """

    models: tuple[ServedModel, ...]
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    workers: int = 1
    upstream_headers: tuple[tuple[str, str], ...] = ()
    keys_file: Path | None = None
    reasoning_fields: tuple[str, ...] = ("reasoning_content",)
