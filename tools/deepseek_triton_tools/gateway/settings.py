"""The decisions of a gateway's owner, and where the list of servers comes from: URLs, the addresses of a DNS name, or a
file. The command line and a file fill them in."""

import asyncio
import fcntl
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from deepseek_triton_client import InvalidRequest
from deepseek_triton_client._core.client_settings import Endpoint
from deepseek_triton_tools.tool_errors import ToolError

DEFAULT_PORT = 9000
"""The port of Triton's own OpenAI front end, so that clients need no change."""


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """A model by the name that clients use.

    name: "" for the name that the servers tell. servers: URLs of HTTP or gRPC,
    `dns+http://HOST:PORT` (each address of a name), or `file:PATH` (a list that is read again when it changes).
    triton_model: the model's name on the servers.
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
    metrics_port: int | None = 0
    """On the host of each server. None: they are not asked for. 0: 8002 beside 8000 and 8001, and else unknown."""
    shared_folder: Path | None = None
    """Where several workers keep what all must know; `serve` sets it. None for one process."""


class SharedTable:
    """All workers of a gateway read and change it, as JSON in the folder; without a folder, this process alone does."""

    def __init__(self, folder: Path | None = None, name: str = "") -> None:
        self._path = folder and folder / name
        self._own: dict[str, Any] = {}
        if self._path is not None:
            self._path.touch()

    @contextmanager
    def changing(self) -> Iterator[dict[str, Any]]:
        """The others wait meanwhile."""
        if self._path is None:
            yield self._own
            return
        with self._path.open("r+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # ends with the process that has it
            try:
                table = msgspec.json.decode(file.read(), type=dict[str, Any])
            except msgspec.DecodeError:  # it is new, or who wrote it was killed
                table = {}
            yield table
            with suppress(OSError):  # on a full disk each worker goes by what it knows itself
                file.seek(0)
                file.write(msgspec.json.encode(table))
                file.truncate()  # not before: ext4 writes a file to the disk at once that was cut to nothing


_DNS_PREFIX = "dns+"
_FILE_PREFIX = "file:"
_PORTS = {"http": 8000, "https": 8000, "grpc": 8001, "grpcs": 8001}
"""Triton's own, for each protocol."""
_METRICS = "metrics="
_DNS_PERIOD_S = 5.0
_FILE_PERIOD_S = 1.0


class SourceError(ToolError):
    """A list of servers can't be read, or is wrong."""


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Where a server is. metrics_port: on the same host, where it differs from the settings'; else None."""

    url: str
    metrics_port: int | None = None


@dataclass(frozen=True, slots=True)
class ServerSource:
    """A list of servers that may change.

    name: as its owner wrote it. period_s: between two looks; None for a list that never changes. read: the list as it
    is now; it raises SourceError where it can't be known, so that the former list is still the best.
    """

    name: str
    period_s: float | None
    read: Callable[[], Awaitable[Sequence[ServerAddress]]]


def parse_source(text: str) -> ServerSource:
    """A source as it is written in the settings. Raises SourceError."""
    if text.startswith(_FILE_PREFIX):
        return ServerSource(text, _FILE_PERIOD_S, ServersFile(text, Path(text.removeprefix(_FILE_PREFIX))).read)
    if text.startswith(_DNS_PREFIX):
        address = parse_address(text.removeprefix(_DNS_PREFIX))
        if urlsplit(address.url).scheme in ("https", "grpcs"):
            raise SourceError(f"expected dns+http://HOST:PORT, got {text!r}: certificates are for names, not addresses")
        return ServerSource(text, _DNS_PERIOD_S, lambda: _addresses_of(text, address))
    address = parse_address(text)

    async def read() -> Sequence[ServerAddress]:
        return [address]

    return ServerSource(text, None, read)


def parse_address(text: str) -> ServerAddress:
    """A server's URL, alike however it was written; http:// may be left out before a port. `#metrics=PORT` behind it is
    the port of its metrics.

    Raises SourceError.
    """
    expected = f"expected HOST:PORT, http:// or grpc://HOST:PORT, perhaps with #metrics=PORT behind it, got {text!r}"
    has_scheme = "://" in text
    if "@" in text:
        after = text.rpartition("@")[2]
        raise SourceError(f"expected a URL without a user and a password, which headers are for, got ***@{after}")
    try:
        parts = urlsplit(text if has_scheme else f"http://{text}")
        port = parts.port or (has_scheme and _PORTS.get(parts.scheme))
        metrics_port = int(parts.fragment.removeprefix(_METRICS)) if parts.fragment.startswith(_METRICS) else None
    except ValueError as error:
        raise SourceError(expected) from error
    host = parts.hostname
    # urlsplit silently drops line breaks.
    if parts.scheme not in _PORTS or not port or not host or parts.query or not text.isprintable():
        raise SourceError(expected)
    is_grpc = parts.scheme.startswith("grpc")
    if (parts.fragment and metrics_port is None) or (is_grpc and parts.path.rstrip("/")):
        raise SourceError(expected)
    if is_grpc and not all(map(find_spec, ("grpc", "tritonclient"))):
        raise SourceError(f"{text}: gRPC needs one more package: pip install 'tritonclient[grpc]'")
    url = url_of(parts.scheme, host, port) + parts.path.rstrip("/")
    try:
        Endpoint.parse(url)
    except InvalidRequest as error:
        raise SourceError(error.message.removeprefix("url: ")) from error
    return ServerAddress(url, metrics_port)


def url_of(scheme: str, host: str, port: int) -> str:
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


async def _addresses_of(name: str, address: ServerAddress) -> Sequence[ServerAddress]:
    """Each address of a name, such as the pods of a headless Kubernetes service."""
    parts = urlsplit(address.url)
    try:
        found = await asyncio.get_running_loop().getaddrinfo(str(parts.hostname), parts.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise SourceError(f"{name}: its addresses can't be looked up: {error}") from error
    # Resolvers turn the order round with each answer, and a list in another order would count as a new one.
    hosts = sorted({str(endpoint[0]) for *_, endpoint in found})
    return [
        ServerAddress(url_of(parts.scheme, host, int(parts.port or 0)) + parts.path, address.metrics_port)
        for host in hosts
    ]


class ServersFile:
    """A file with a URL in each line; # begins a comment.

    A changed list counts when two looks found the same, so that one that is half written does not.
    """

    def __init__(self, name: str, path: Path) -> None:
        self._name = name
        self._path = path
        self._seen: str | None = None
        self._addresses: list[ServerAddress] = []

    async def read(self) -> Sequence[ServerAddress]:
        try:
            text = await asyncio.to_thread(self._path.read_text, encoding="utf-8")
        except (OSError, UnicodeError) as error:
            raise SourceError(f"{self._name}: can't be read: {error}") from error
        is_settled = self._seen is None or text == self._seen
        self._seen = text
        if not is_settled:
            return self._addresses
        addresses, problems = [], []
        for number, line in enumerate(text.splitlines(), start=1):
            # A URL has its metrics port behind a #, so a comment begins with one after a blank.
            if url := "" if line.lstrip().startswith("#") else line.partition(" #")[0].strip():
                try:
                    addresses.append(parse_address(url))
                except SourceError as error:
                    problems.append(f"line {number}: {error}")
        if problems:
            raise SourceError(f"{self._name}: {'; '.join(problems)}")
        if not addresses:
            raise SourceError(f"{self._name}: expected a URL in each line, got none")
        self._addresses = addresses
        return addresses
