"""Translate failed connections, broken responses and error statuses into errors of this package."""

import re
import ssl
from collections.abc import Mapping
from contextlib import suppress
from urllib.parse import urlsplit

import h11

from deepseek_triton_client._core.exceptions import (
    AccessDenied,
    Cancelled,
    DeepseekTritonError,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    ProtocolError,
    ServerError,
    ServerUnavailable,
    error_from_server,
)
from deepseek_triton_client._core.wire import error_text, json_object
from deepseek_triton_client._http.sse import SseDecoder

EVENT_STREAM = "text/event-stream"

_QUOTED = 200
"""Number of characters quoted from an answer that is not Triton's."""

# Errors while connecting: nothing of the request was sent.


def connect_error(exc: OSError, url: str, timeout_s: float | None) -> DeepseekTritonError:
    """Return the error for a connection that could not be made within `timeout_s`."""
    if _is_refused_certificate(exc):
        return AccessDenied(f"{url}: the server refused the client's certificate: {exc}")
    if isinstance(exc, ssl.SSLCertVerificationError):
        text = f"the server's certificate can't be trusted: {exc.verify_message}; tls.ca (--ca) names its signer"
    elif isinstance(exc, ssl.SSLError):
        text = f"the TLS handshake failed: {exc}; a port without TLS has http:// or grpc://"
    elif isinstance(exc, TimeoutError) and exc.errno is None and timeout_s is not None:
        text = f"no connection within {timeout_s:g} s"
    else:
        text = f"can't connect: {exc}"
    return ServerUnavailable(f"{url}: {text}", unprocessed=True)


def _is_refused_certificate(exc: BaseException | None) -> bool:
    if not isinstance(exc, ssl.SSLError):
        return False
    reason = getattr(exc, "reason", None) or ""  # only errors of the TLS library have a reason
    return "ALERT" in reason and any(word in reason for word in ("CERTIFICATE", "UNKNOWN_CA", "ACCESS_DENIED"))


# Errors between the first byte sent and the last one received.

EXCHANGE_ERRORS = (OSError, h11.ProtocolError)


def exchange_error(exc: Exception, what: str, timeout_s: float | None) -> DeepseekTritonError:
    """Return the error for the broken request `what` ("POST http://host:port/path"); each step had `timeout_s`."""
    if isinstance(exc, h11.LocalProtocolError):
        # The text of the error may quote a header, and a header may be a secret.
        return InvalidRequest(f"{what}: the headers can't be sent as HTTP")
    if isinstance(exc, h11.ProtocolError):
        return ProtocolError(f"{what}: the answer is not HTTP/1.1: {exc}")
    if isinstance(exc, TimeoutError) and exc.errno is None and timeout_s is not None:
        return ServerUnavailable(f"{what}: no answer within {timeout_s:g} s")
    # TLS 1.3 reports this after the handshake.
    if _is_refused_certificate(exc) or _is_refused_certificate(exc.__cause__):
        return AccessDenied(f"{what}: the server refused the client's certificate: {exc}")
    return ServerUnavailable(f"{what}: the connection was lost: {str(exc) or type(exc).__name__}")


# Error statuses.

_BY_STATUS: dict[int, type[DeepseekTritonError]] = {
    **dict.fromkeys((401, 403, 407), AccessDenied),
    **dict.fromkeys((408, 502, 503, 504), ServerUnavailable),
    404: ModelNotFound,
    429: Overloaded,
    499: Cancelled,
}

_UNPROCESSED = frozenset({429, 503})


def status_error(status: int, headers: Mapping[str, str], body: bytes) -> DeepseekTritonError:
    """Return the error for a status other than 200; `body` may be only the beginning of the body."""
    if 300 <= status < 400:
        # Only the host is shown: the rest of a Location may hold a secret.
        host = ""
        with suppress(ValueError):
            host = urlsplit(headers.get("location", "")).hostname or ""
        return ProtocolError(f"HTTP {status}: a redirect" + (f" to {host}" if host else "") + ", which is not followed")
    unknown = ServerError if status >= 500 else InvalidRequest if status >= 400 else ProtocolError
    text = _error_text(status, headers, body)
    error = error_from_server(text, otherwise=_BY_STATUS.get(status, unknown), unprocessed=status in _UNPROCESSED)
    after = headers.get("retry-after", "")
    error.retry_after_s = float(after) if re.fullmatch("[1-5]?[0-9]|60", after) else 0.0
    return error


def query_error(url: str, status: int, headers: Mapping[str, str], body: bytes) -> DeepseekTritonError | None:
    """Return the error for the answer to a question about the server or its model; None where there is none."""
    error = None if status == 200 else status_error(status, headers, body)
    if status == 404 and re.match(rb'\s*\{\s*"error"\s*:\s*\{', body):
        return ModelNotFound(f"{url}: this is an OpenAI API, not Triton: write {url.partition('/v1/')[0]}/v1")
    if isinstance(error, (AccessDenied, Overloaded, ProtocolError, ServerUnavailable)) or is_tritons(status, body):
        return error
    got = f"HTTP {status}: {body.decode(errors='replace')[:_QUOTED]!r}"
    return ProtocolError(f"{url}: this is not Triton's HTTP port (8000 by default), it answers {got}")


def repeatable(error: DeepseekTritonError) -> DeepseekTritonError:
    """Mark the error of a request that generates nothing: sending it again is safe, and may help."""
    error.unprocessed = isinstance(error, (ServerUnavailable, Overloaded))
    return error


def is_tritons(status: int, body: bytes) -> bool:
    """Whether Triton may have answered so, not another web server or a proxy: it sends JSON, or nothing."""
    try:
        found = json_object(body) if body else {}
    except ProtocolError:
        return False
    return status != 404 or isinstance(found.get("error"), str)


def _error_text(status: int, headers: Mapping[str, str], body: bytes) -> str:
    """Return Triton's message, or the text that came instead, such as a proxy's page. If a model's first response is an
    error, the status is that of an error and the body is one server-sent event."""
    is_event = headers.get("content-type", "").startswith(EVENT_STREAM)
    try:
        return error_text(json_object(b"".join(SseDecoder().feed(body)) if is_event else body)["error"])
    except (ProtocolError, KeyError):
        return f"HTTP {status}: {body.decode(errors='replace')[:_QUOTED]!r}"
