"""The border: gRPC's statuses go in, this package's errors come out."""

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
    grpc.StatusCode.OK: ProtocolError,  # an error whose status says that all is well
}

# gRPC tells a connection that never stood from one that was lost only by its words. These it says when it looks for a
# connection to send a request on, so the request has not been sent; of a lost one it says "Stream removed (...)" or
# "Socket closed". The first three are those of 1.85, the others of earlier versions.
_NOT_CONNECTED = re.compile(
    r"failed to connect to all addresses|errors resolving |empty address list"
    r"|DNS resolution failed|Name resolution failure|connections to all backends failing"
)

# An answer from what stands before the server, in plain HTTP: it is full, or has no server to pass the request on to.
_TURNED_AWAY = re.compile(r"Received http2 header with status: (429|503)$")

# The library says the same at both ends; at the server's, where our request is what is too large, with "SERVER: ".
_TOO_LARGE = re.compile(r"(SERVER: )?(?:Received|Decompressed) message larger than max")


def from_rpc_error(error: grpc.RpcError, *, only_asked: bool) -> DeepseekTritonError:
    """`only_asked`: nothing is ever generated for such a call."""
    status: grpc.StatusCode = error.code()
    details: str = error.details() or status.name
    kind = BY_STATUS_CODE[status]
    too_large = _TOO_LARGE.search(details) if status is grpc.StatusCode.RESOURCE_EXHAUSTED else None
    if too_large and too_large[1]:
        return InvalidRequest(f"the request is larger than the server takes: {details}")
    if too_large:
        return ProtocolError(f"a response is larger than connection.max_message_bytes: {details}")
    unprocessed = only_asked and kind in (Overloaded, ServerUnavailable, DeadlineExceeded)
    return error_from_server(details, otherwise=kind, unprocessed=unprocessed or _was_refused(status, details))


def _was_refused(status: grpc.StatusCode, details: str) -> bool:
    """Whether the request surely has not been worked on. In doubt, it has."""
    if status is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return "RST_STREAM" not in details  # a stream that was cut off, not a request that was turned away
    if status is grpc.StatusCode.UNAVAILABLE:
        return bool(_NOT_CONNECTED.match(details) or _TURNED_AWAY.search(details))
    return False
