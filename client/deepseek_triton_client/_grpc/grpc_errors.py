"""Translates the statuses of gRPC into errors of this package."""

from __future__ import annotations

import re

import grpc  # type: ignore[import-untyped]

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

# What a port says that speaks HTTP/1.1: Triton's hangs up, other web servers answer in their own protocol.
_NOT_GRPC = re.compile(r"Socket closed$|Failed parsing HTTP/2")

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
        details += "; it hangs up on gRPC: does this port speak HTTP (http://)?"
    unprocessed = is_query and kind in (Overloaded, ServerUnavailable, DeadlineExceeded)
    return error_from_server(details, otherwise=kind, unprocessed=unprocessed or _was_refused(status, details))


def _was_refused(status: grpc.StatusCode, details: str) -> bool:
    """Tell whether the request was surely not processed. In doubt it was."""
    if status is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return "RST_STREAM" not in details  # such a stream was cut off, not refused
    if status is grpc.StatusCode.UNAVAILABLE:
        return bool(_NOT_CONNECTED.match(details) or _REFUSED_BY_PROXY.search(details))
    return False
