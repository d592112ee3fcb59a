"""Triton's generate extension over HTTP.

Also the answer of `generate` is streamed here and put together again: Triton notices a client that has gone while it
writes a stream, but not while /generate waits for its one response.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import quote

import httpx

from deepseek_triton_client._errors import (
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
from deepseek_triton_client._models import Chunk, ModelMetadata, TensorMetadata
from deepseek_triton_client._sse import SseDecoder
from deepseek_triton_client._timeouts import Timeouts
from deepseek_triton_client._wire import GenerateRequest, decode_json, encode_json, json_object

_EVENT_STREAM = "text/event-stream"


class HttpTransport:
    """`base_url` is the server's, such as "http://localhost:8000"; `timeouts.connect` limits everything but `open`."""

    def __init__(self, base_url: str, *, model_name: str, model_version: str, timeouts: Timeouts) -> None:
        self._path = f"/v2/models/{quote(model_name, safe='')}"
        if model_version:
            self._path += f"/versions/{quote(model_version, safe='')}"
        # The server decides how many requests are too many, and says so; a pool that queues here would hide it.
        unlimited = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        with httpx_errors():
            self._client = httpx.Client(base_url=base_url, timeout=timeouts.connect, limits=unlimited)

    def open(self, request: GenerateRequest) -> HttpResponseStream:
        timeouts = request.timeouts
        # Triton sends its headers together with the first response, so reading them is waiting for the first token.
        limits = httpx.Timeout(timeouts.total, connect=timeouts.connect, read=timeouts.until_first_token(), pool=None)
        with httpx_errors():
            http_request = self._client.build_request(
                "POST",
                f"{self._path}/generate_stream",
                content=encode_json(request),
                headers={"content-type": "application/json", "accept": _EVENT_STREAM},
                timeout=limits,
            )
            response = self._client.send(http_request, stream=True)
        # The first-token limit has done its work; the transport looks here again for each read of the body. What
        # remains is a backstop: the watchdog knows better, but leaves when the last chunk is there.
        http_request.extensions["timeout"]["read"] = timeouts.total
        stream = HttpResponseStream(response)
        try:
            stream.check()
        except BaseException:
            stream.close()
            raise
        return stream

    def is_ready(self) -> bool:
        with httpx_errors():
            return self._client.get(f"{self._path}/ready").status_code == 200

    def metadata(self) -> ModelMetadata:
        with httpx_errors():
            response = self._client.get(self._path)
        if response.status_code != 200:
            raise _error_from_response(response)
        return _metadata(json_object(response.content))

    def close(self) -> None:
        self._client.close()


class HttpResponseStream:
    """Server-sent events of one response, decoded."""

    def __init__(self, response: httpx.Response) -> None:
        self._response = response

    def check(self) -> None:
        """Raises the error that the answer is, if it is one."""
        if self._response.status_code != 200:
            with httpx_errors():
                self._response.read()
            raise _error_from_response(self._response)
        content_type = self._response.headers.get("content-type", "")
        if not content_type.startswith(_EVENT_STREAM):
            raise ProtocolError(f"expected {_EVENT_STREAM}, got {content_type!r}")

    def __iter__(self) -> Iterator[Chunk]:
        decoder = SseDecoder()
        with httpx_errors():
            for received in self._response.iter_bytes():
                for data in decoder.feed(received):
                    yield decode_json(data)

    def interrupt(self) -> None:
        # Closing a socket does not wake a thread that reads from it; shutting it down does.
        with suppress(OSError):  # already disconnected: the read has ended by itself
            self._response.extensions["network_stream"].get_extra_info("socket").shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with httpx_errors():
            self._response.close()


def _error_from_response(response: httpx.Response) -> DeepseekTritonError:
    return error_from_server(_error_text(response), otherwise=error_from_status(response.status_code))


def _error_text(response: httpx.Response) -> str:
    """Triton's words, or what else came, such as a proxy's page.

    When a model's first response is an error, the status is an error's and the body is one server-sent event.
    """
    is_event = response.headers.get("content-type", "").startswith(_EVENT_STREAM)
    data = b"".join(SseDecoder().feed(response.content)) if is_event else response.content
    try:
        return str(json_object(data)["error"])
    except (ProtocolError, KeyError):
        return f"HTTP {response.status_code}: {response.text[:200]!r}"


def error_from_status(status: int) -> type[DeepseekTritonError]:
    """For errors whose message holds no code."""
    if status in _BY_STATUS:
        return _BY_STATUS[status]
    if status >= 500:
        return ServerError
    return InvalidRequest if status >= 400 else ProtocolError


_BY_STATUS: dict[int, type[DeepseekTritonError]] = {
    404: ModelNotFound,
    408: DeadlineExceeded,
    429: Overloaded,
    499: Cancelled,
    502: ServerUnavailable,
    503: ServerUnavailable,
    504: DeadlineExceeded,
}

HTTPX_ERRORS: dict[type[Exception], type[DeepseekTritonError]] = {
    httpx.ConnectTimeout: ServerUnavailable,
    httpx.TimeoutException: DeadlineExceeded,
    httpx.NetworkError: ServerUnavailable,
    httpx.ProxyError: ServerUnavailable,
    httpx.UnsupportedProtocol: InvalidRequest,
    httpx.InvalidURL: InvalidRequest,
    httpx.LocalProtocolError: InvalidRequest,
    httpx.StreamError: Cancelled,  # read after it was closed
    httpx.HTTPError: ProtocolError,
    httpx.CookieConflict: ProtocolError,
}
"""The nearest class above an exception's own decides."""


@contextmanager
def httpx_errors() -> Iterator[None]:
    """The border: httpx's exceptions go in, ours come out."""
    try:
        yield
    except tuple(HTTPX_ERRORS) as exc:
        raise error_from_httpx(exc)(_describe(exc)) from exc


def error_from_httpx(exc: Exception) -> type[DeepseekTritonError]:
    if isinstance(exc, httpx.RemoteProtocolError) and _was_cut_off(exc):
        return ServerUnavailable
    return next(HTTPX_ERRORS[kind] for kind in type(exc).__mro__ if kind in HTTPX_ERRORS)


def _was_cut_off(exc: httpx.RemoteProtocolError) -> bool:
    # httpx has one class for a peer that hangs up and for one that talks nonsense, and only its words tell them apart.
    return "disconnected" in str(exc) or "closed connection" in str(exc)


def _describe(exc: Exception) -> str:
    text = str(exc) or type(exc).__name__
    if not isinstance(exc, httpx.RequestError):
        return text
    if isinstance(exc, httpx.TimeoutException):
        step = type(exc).__name__.removesuffix("Timeout").lower()
        text = f"no {step} within {exc.request.extensions['timeout'][step]:g} s"
    return f"{exc.request.method} {exc.request.url}: {text}"


def _metadata(values: dict[str, Any]) -> ModelMetadata:
    try:
        return ModelMetadata(
            name=values["name"],
            versions=tuple(values.get("versions", ())),
            platform=values["platform"],
            inputs=tuple(_tensor(tensor) for tensor in values["inputs"]),
            outputs=tuple(_tensor(tensor) for tensor in values["outputs"]),
        )
    except (KeyError, TypeError) as exc:
        raise ProtocolError(f"expected a model's metadata, got {values!r}") from exc


def _tensor(values: dict[str, Any]) -> TensorMetadata:
    return TensorMetadata(values["name"], values["datatype"], tuple(values["shape"]))
