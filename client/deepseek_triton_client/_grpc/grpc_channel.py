"""The interface of both kinds of gRPC channel, and their settings."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import grpc  # type: ignore[import-untyped]

from deepseek_triton_client._core.client_settings import Endpoint, Settings, Tls
from deepseek_triton_client._core.exceptions import InvalidRequest
from deepseek_triton_client._core.tls import tls_context

Metadata = Sequence[tuple[str, str]]

END_S = 1.0
"""Seconds that an announced end of a call may take: it has to wait only for the network."""


class GrpcCall(Protocol):
    """One request and its responses. Only one thread or task reads."""

    async def read(self) -> bytes | None:
        """Return the next response; None at a good end. Raises grpc.RpcError, or Cancelled after `cancel`."""
        ...

    async def end(self) -> None:
        """Wait for the end that the server has announced, with whatever status. Cancels the call after `END_S`."""
        ...

    def cancel(self) -> None:
        """Cancel the call: the server sees it, and a waiting `read` fails. Does nothing after the end of the call."""
        ...


class GrpcChannel(Protocol):
    """Calls to one server, over one connection that is made when it is first needed."""

    is_asyncio: bool
    """Whether its coroutines need an event loop; otherwise they block."""

    def call(self, path: str, request: bytes, *, metadata: Metadata, timeout_s: float | None) -> GrpcCall:
        """Send one request. Raises Cancelled if the channel is closed."""
        ...

    async def close(self) -> None:
        """Close the connection and cancel the calls that have not ended."""
        ...


def target(endpoint: Endpoint) -> str:
    """The target as gRPC writes it. With its scheme, or gRPC would look for one in the host's name."""
    return f"dns:///{endpoint.address}"


def options(settings: Settings) -> list[tuple[str, int]]:
    limit, connect_s = settings.connection.max_message_bytes, settings.timeouts.connect
    found = [
        ("grpc.max_send_message_length", -1),
        ("grpc.max_receive_message_length", -1 if limit is None else limit),
        # After a failed attempt to connect, every call fails for this time, which is up to two minutes by default. A
        # server that comes back after an hour of loading should be seen at once.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        # Connections of its own: by default all clients of a process share one for each target, and fail together.
        ("grpc.use_local_subchannel_pool", 1),
        # No proxy is used, as over HTTP: the client connects to the given address.
        ("grpc.enable_http_proxy", 0),
    ]
    if settings.connection.ping_s is not None:
        # Pings must not come more often than Triton allows (see `Connection.ping_s`): a long prefill has no data.
        found += [
            ("grpc.keepalive_time_ms", max(1, round(settings.connection.ping_s * 1000))),
            ("grpc.keepalive_timeout_ms", 20_000),
            ("grpc.http2.max_pings_without_data", 0),
        ]
    if connect_s is not None:
        # Despite its name, this is how long one attempt to connect may take. It is a second longer than the limit, so
        # that the limit runs out first and is reported, and not the attempt.
        found.append(("grpc.min_reconnect_backoff_ms", round(connect_s * 1000) + 1000))
    return found


def credentials(tls: Tls) -> Any:
    """Return the credentials for TLS. Raises InvalidRequest for files that can't be used."""
    if tls.ca is not None or tls.certificate is not None:
        tls_context(tls)  # gRPC accepts a file that it can't use without a word, and then fails at every call
    certificate = _contents(tls.certificate)
    key = certificate if tls.key is None else _contents(tls.key)
    return grpc.ssl_channel_credentials(_contents(tls.ca), key, certificate)


def check_headers(names: Sequence[str]) -> None:
    """Raises InvalidRequest for header names that gRPC can't send."""
    for name in names:
        if not re.fullmatch(r"[A-Za-z0-9_.-]+", name) or name.lower().endswith("-bin"):
            raise InvalidRequest(
                f"headers: over gRPC expected names of letters, digits, _, . and -, not ending in -bin, got {name!r}"
            )


def _contents(path: Any) -> bytes | None:
    return None if path is None else Path(path).read_bytes()
