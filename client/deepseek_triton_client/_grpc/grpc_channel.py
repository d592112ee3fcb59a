"""What both kinds of gRPC channel have in common: the seam above them, and how they are set up."""

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
"""So long an end may take that was announced: it has nothing to wait for but the network."""


class GrpcCall(Protocol):
    """One request and its responses. One thread or task reads."""

    async def read(self) -> bytes | None:
        """The next response; None when the call has ended well. Raises grpc.RpcError, or Cancelled after `cancel`."""
        ...

    async def end(self) -> None:
        """Waits for the end, which the server has announced, however it comes out. Cancels the call after `END_S`."""
        ...

    def cancel(self) -> None:
        """The server sees it, and a `read` that waits fails. Does nothing to a call that has ended."""
        ...


class GrpcChannel(Protocol):
    """Calls to one server, over one connection that is made when it is needed."""

    def call(self, path: str, request: bytes, *, metadata: Metadata, timeout_s: float | None) -> GrpcCall:
        """Sends one request. Raises Cancelled once the channel is closed."""
        ...

    async def close(self) -> None:
        """Cancels the calls that have not ended."""
        ...


def target(endpoint: Endpoint) -> str:
    """With its scheme, or gRPC would look for one in the host's name."""
    return f"dns:///{endpoint.address}"


def options(settings: Settings) -> list[tuple[str, int]]:
    limit, connect_s = settings.connection.max_message_bytes, settings.timeouts.connect
    found = [
        ("grpc.max_send_message_length", -1),
        ("grpc.max_receive_message_length", -1 if limit is None else limit),
        # After a failed attempt every call fails for this long, up to two minutes by default. A server that comes back
        # after an hour of loading should be seen at once.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        # Connections of its own: otherwise all clients of a process share one for each target, and its fate.
        ("grpc.use_local_subchannel_pool", 1),
        # As over HTTP: what is asked for is what is connected to.
        ("grpc.enable_http_proxy", 0),
    ]
    if settings.connection.ping_s is not None:
        # Finds a peer that vanished without a word. Not more often than Triton allows: by default it ends the
        # connection of a client that pings again within 5 minutes without data in between, as a long prefill has none.
        found += [
            ("grpc.keepalive_time_ms", max(1, round(settings.connection.ping_s * 1000))),
            ("grpc.keepalive_timeout_ms", 20_000),
            ("grpc.http2.max_pings_without_data", 0),
        ]
    if connect_s is not None:
        # The name says otherwise, but this is how long one attempt to connect may take. A second more than the limit,
        # so that it is the limit that runs out, and says so, and not the attempt.
        found.append(("grpc.min_reconnect_backoff_ms", round(connect_s * 1000) + 1000))
    return found


def credentials(tls: Tls) -> Any:
    """Raises InvalidRequest for files that are not what they should be."""
    if tls.ca is not None or tls.certificate is not None:
        tls_context(tls)  # gRPC says nothing of a file that it can't use, and then fails at every call
    certificate = _contents(tls.certificate)
    key = certificate if tls.key is None else _contents(tls.key)
    return grpc.ssl_channel_credentials(_contents(tls.ca), key, certificate)


def check_headers(names: Sequence[str]) -> None:
    """Raises InvalidRequest for what gRPC can't send."""
    for name in names:
        if not re.fullmatch(r"[A-Za-z0-9_.-]+", name) or name.lower().endswith("-bin"):
            raise InvalidRequest(
                f"headers: over gRPC expected a name of letters, digits and -, not in -bin, got {name!r}"
            )


def _contents(path: Any) -> bytes | None:
    return None if path is None else Path(path).read_bytes()
