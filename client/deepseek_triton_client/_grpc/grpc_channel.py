"""gRPC channels of both kinds, their settings, and what the statuses of their calls mean."""

import asyncio
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakSet

import grpc  # type: ignore[import-untyped]
import grpc.aio  # type: ignore[import-untyped]

from deepseek_triton_client._core.client_settings import Settings, Tls
from deepseek_triton_client._core.exceptions import (
    AccessDenied,
    Cancelled,
    DeadlineExceeded,
    DeepseekTritonError,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    ProtocolError,
    ServerError,
    ServerUnavailable,
    error_from_server,
)

Metadata = Sequence[tuple[str, str]]

END_S = 1.0
"""Seconds that an announced end of a call may take: it has to wait only for the network."""


def options(settings: Settings) -> list[tuple[str, int]]:
    limit, connect_s = settings.connection.max_message_bytes, settings.timeouts.connect
    arguments = [
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
        arguments += [
            ("grpc.keepalive_time_ms", max(1, round(settings.connection.ping_s * 1000))),
            ("grpc.keepalive_timeout_ms", 20_000),
            ("grpc.http2.max_pings_without_data", 0),
        ]
    if connect_s is not None:
        # Despite its name, this is how long one attempt to connect may take. It is a second longer than the limit, so
        # that the limit runs out first and is reported, and not the attempt.
        arguments.append(("grpc.min_reconnect_backoff_ms", round(connect_s * 1000) + 1000))
    return arguments


def credentials(tls: Tls) -> Any:
    """Return the credentials for TLS. Raises InvalidRequest for files that can't be used."""
    if tls.ca is not None or tls.certificate is not None:
        tls.context()  # gRPC accepts a file that it can't use without a word, and then fails at every call
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


BY_STATUS_CODE: dict[grpc.StatusCode, type[DeepseekTritonError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.FAILED_PRECONDITION: InvalidRequest,
    grpc.StatusCode.OUT_OF_RANGE: InvalidRequest,
    grpc.StatusCode.ALREADY_EXISTS: InvalidRequest,
    grpc.StatusCode.UNAUTHENTICATED: AccessDenied,
    grpc.StatusCode.PERMISSION_DENIED: AccessDenied,
    grpc.StatusCode.NOT_FOUND: ModelNotFound,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.UNAVAILABLE: ServerUnavailable,
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.INTERNAL: ServerError,
    grpc.StatusCode.UNKNOWN: ServerError,
    grpc.StatusCode.ABORTED: ServerError,
    grpc.StatusCode.DATA_LOSS: ServerError,
    grpc.StatusCode.UNIMPLEMENTED: ProtocolError,
    grpc.StatusCode.OK: ProtocolError,  # an error although its status is OK
}

# Only the message tells a connection that could not be made from one that was lost. gRPC sends these messages when it
# looks for a connection to send a request on, so the request has not been sent; a lost connection gives "Stream removed
# (...)" or "Socket closed". The first three messages are those of grpcio 1.85, the others those of earlier versions.
_NOT_CONNECTED = re.compile(
    r"failed to connect to all addresses|errors resolving |empty address list"
    r"|DNS resolution failed|Name resolution failure|connections to all backends failing"
)

# What a port says that speaks HTTP/1.1: Triton's hangs up, other web servers answer in their own protocol. Of
# localhost's two addresses gRPC tells the last error only, and it may be that of ::1, where nobody listens.
_NOT_GRPC = re.compile(r"Socket closed$|Failed parsing HTTP/2|ipv6:%5B::1%5D.* refused")

# An answer in plain HTTP of a proxy before the server: it is full, or has no server to pass the request on to.
_REFUSED_BY_PROXY = re.compile(r"Received http2 header with status: (429|503)$")

# Both sides use this message; the server, for which the request is too large, puts "SERVER: " before it.
_TOO_LARGE = re.compile(r"(SERVER: )?(?:Received|Decompressed) message larger than max")


def from_rpc_error(error: grpc.RpcError, *, is_query: bool) -> DeepseekTritonError:
    """Return the error for one of gRPC. `is_query`: the call never generates anything."""
    status: grpc.StatusCode = error.code()
    details: str = error.details() or status.name
    kind = BY_STATUS_CODE[status]
    too_large = _TOO_LARGE.search(details) if status is grpc.StatusCode.RESOURCE_EXHAUSTED else None
    if too_large and too_large[1]:
        return InvalidRequest(f"the request is larger than the server accepts: {details}")
    if too_large:
        return ProtocolError(f"a response is larger than connection.max_message_bytes: {details}")
    if _NOT_CONNECTED.match(details) and _NOT_GRPC.search(details):
        details += "; does this port speak HTTP (http://)?"
    if "WRONG_VERSION_NUMBER" in details or "Handshake read failed" in details:
        details += "; a port without TLS has http:// or grpc://"
    if "CERTIFICATE_VERIFY_FAILED" in details:
        details += "; tls.ca (--ca) names its signer"
    # In doubt a request was processed.
    unprocessed = is_query and kind in (Overloaded, ServerUnavailable, DeadlineExceeded)
    if status is grpc.StatusCode.RESOURCE_EXHAUSTED and "RST_STREAM" not in details:  # with it, the stream was cut off
        unprocessed = True
    if status is grpc.StatusCode.UNAVAILABLE and (_NOT_CONNECTED.match(details) or _REFUSED_BY_PROXY.search(details)):
        unprocessed = True
    return error_from_server(details, otherwise=kind, unprocessed=unprocessed)


def _connect(module: Any, target: str, options: list[tuple[str, int]], credentials: Any) -> Any:
    if credentials is None:
        return module.insecure_channel(target, options=options)
    return module.secure_channel(target, credentials, options=options)


class BlockingChannel:
    """Calls to one server, over one connection that is made when it is first needed. Threads may share it."""

    def __init__(self, target: str, *, options: list[tuple[str, int]], credentials: Any) -> None:
        # Not used: SingleThreadedUnaryStream. A lone thread takes a third less CPU with it, many threads take no less,
        # and each call that is cancelled in the middle keeps 18 KiB until the channel is closed (grpcio 1.85).
        self._channel = _connect(grpc, target, options, credentials)
        self._closed = False

    def call(self, path: str, request: bytes, *, metadata: Metadata, timeout_s: float | None) -> "BlockingCall":
        """Send one request. Raises Cancelled if the channel is closed."""
        try:
            return BlockingCall(self._channel.unary_stream(path)(request, timeout=timeout_s, metadata=metadata))
        except ValueError as exc:
            if self._closed:
                raise Cancelled("the client is closed") from exc
            raise

    async def close(self) -> None:
        """Close the connection and cancel the calls that have not ended."""
        self._closed = True
        self._channel.close()


class BlockingCall:
    """One request and its responses. Only one thread reads, any thread may cancel."""

    def __init__(self, responses: Any) -> None:
        self._responses = responses

    async def read(self) -> bytes | None:
        """Return the next response; None at a good end. Raises grpc.RpcError."""
        data: bytes | None = next(self._responses, None)
        return data

    async def end(self) -> None:
        """Wait for the end that the server has announced, with whatever status. Cancels the call after `END_S`."""
        try:
            with suppress(grpc.FutureCancelledError):  # a cancelled call has ended too
                self._responses.exception(timeout=END_S)
        except grpc.FutureTimeoutError:
            self.cancel()

    def cancel(self) -> None:
        """Cancel the call: the server sees it, and a waiting `read` fails. Does nothing after the end of the call."""
        self._responses.cancel()


class AsyncioChannel:
    """See `BlockingChannel`. A call in another event loop, as of a second asyncio.run, makes another connection."""

    def __init__(self, target: str, *, options: list[tuple[str, int]], credentials: Any) -> None:
        self._settings = target, options, credentials
        self._loop: Any = None
        self._channel: Any = None
        self._calls: WeakSet[AsyncioCall] = WeakSet()
        self._closed = False

    def call(self, path: str, request: bytes, *, metadata: Metadata, timeout_s: float | None) -> "AsyncioCall":
        if self._closed:
            raise Cancelled("the client is closed")
        if (loop := asyncio.get_running_loop()) is not self._loop:
            # Here, because grpc.aio takes the running event loop.
            self._loop, self._channel = loop, _connect(grpc.aio, *self._settings)
        responses = self._channel.unary_stream(path)(request, timeout=timeout_s, metadata=metadata)
        call = AsyncioCall(responses)
        self._calls.add(call)
        return call

    async def close(self) -> None:
        self._closed = True
        for call in tuple(self._calls):
            call.cancel()
        if (channel := self._channel) is not None:
            self._channel = None  # so that the last one is freed on its own loop's thread
            await channel.close()


class AsyncioCall:
    """See `BlockingCall`; `read` raises Cancelled after `cancel`. A call that is no longer referenced is cancelled."""

    def __init__(self, responses: Any) -> None:
        self._responses = responses
        self._loop = asyncio.get_running_loop()
        self._cancelled = False

    async def read(self) -> bytes | None:
        before = _cancellations()
        try:
            data = await self._responses.read()
        except asyncio.CancelledError as exc:
            # grpc.aio raises the same for a cancelled call and a cancelled task, and cancels the call in both cases.
            if self._cancelled and _cancellations() == before:
                raise Cancelled("the request was cancelled") from exc
            self._cancelled = True
            raise
        if data is grpc.aio.EOF:
            return None
        assert isinstance(data, bytes), "no deserializer was given"
        return data

    async def end(self) -> None:
        timer = self._loop.call_later(END_S, self.cancel)
        try:
            await self._responses.code()
        finally:
            timer.cancel()

    def cancel(self) -> None:
        self._cancelled = True
        self._responses.cancel()

    def __del__(self) -> None:
        # Without this the call would run on, because grpc.aio keeps a callback for its end, which refers to the call.
        if not self._responses.done():
            with suppress(RuntimeError):  # the loop is closed, and its connections too
                self._loop.call_soon_threadsafe(self._responses.cancel)


def _cancellations() -> int:
    """Number of times that the current task was asked to end. Python 3.10 does not count them."""
    task = asyncio.current_task()
    return task.cancelling() if task is not None and hasattr(task, "cancelling") else 0


GrpcCall = BlockingCall | AsyncioCall
GrpcChannel = BlockingChannel | AsyncioChannel
