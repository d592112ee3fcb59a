"""Triton's generate extension over HTTP.

Whole answers are streamed too and put together again: Triton notices a client that has left while it writes a stream,
but not while /generate waits for its one response.

This uses h11 and the client's own sockets instead of httpx, whose pool takes longer with every active request.
"""

import ssl
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from typing import Any
from urllib.parse import quote, urlsplit
from weakref import WeakSet

from deepseek_triton_client._core.client_settings import Endpoint, Settings
from deepseek_triton_client._core.exceptions import (
    AccessDenied,
    Cancelled,
    InvalidRequest,
    ModelNotReady,
    ProtocolError,
    ServerUnavailable,
)
from deepseek_triton_client._core.interfaces import Input, Outputs
from deepseek_triton_client._core.results import ModelMetadata, TensorMetadata
from deepseek_triton_client._core.wire import decode_json, encode_json, json_object
from deepseek_triton_client._http.http_connection import Answer, Headers, HttpConnection, HttpRequest, Pool, Socket
from deepseek_triton_client._http.http_errors import EVENT_STREAM, is_tritons, query_error, repeatable, status_error
from deepseek_triton_client._http.sse import SseDecoder

METRICS_PORT = "as Triton's metrics port gives (8002 by default)"
_DEFAULT_PORTS = {"http": 80, "https": 443}

PATH_CHARACTERS = "/%:@!$&'()*+,;=~"
"""Characters of a path besides letters, digits and what was quoted already."""

_OWN_HEADERS = frozenset({"accept", "accept-encoding", "content-length", "content-type", "transfer-encoding"})

NewSocket = Callable[[str, int, "ssl.SSLContext | None"], Socket]
NewRequest = Callable[[], HttpRequest]
Decode = Callable[[bytes], Outputs | None]
"""Reads an event, and returns None for the one that ends the stream."""


class HttpTransport:
    """See `Transport`. Raises InvalidRequest for settings that HTTP can't have."""

    always_streams = True

    def __init__(self, endpoint: Endpoint, settings: Settings, new_socket: NewSocket) -> None:
        for name in settings.headers:
            if name.lower() in _OWN_HEADERS:
                raise InvalidRequest(
                    f"headers: expected only headers that the client does not set itself, got {name!r}"
                )
        self._settings = settings
        self._new_socket = new_socket
        self._server = _Target(endpoint)
        prefix = quote(endpoint.path, safe=PATH_CHARACTERS)
        self._model_path = f"{prefix}/v2/models/{quote(settings.model_name, safe='')}"
        if settings.model_version:
            self._model_path += f"/versions/{quote(settings.model_version, safe='')}"
        self._health_path = f"{prefix}/v2/health/ready"
        self._generate_target = f"{self._model_path}/generate_stream".encode()
        self.max_message_bytes = settings.connection.max_message_bytes
        self.pool = Pool(settings.connection.keepalive_s)
        self._streams: WeakSet[HttpResponseStream] = WeakSet()  # weak, so that a stream that is dropped ends
        self._streams_lock = threading.Lock()

    def open(self, request_id: str, inputs: Sequence[Input], *, connect_s: float | None) -> "HttpResponseStream":
        request = partial(self.generate_request, self._generate_target, encode_json(request_id, inputs))
        return self.stream(request, decode_json, connect_s)

    def stream(self, request: NewRequest, decode: Decode, connect_s: float | None) -> "HttpResponseStream":
        stream = HttpResponseStream(self, request, decode, connect_s)
        with self._streams_lock:
            self._streams.add(stream)
        if self.pool.closed:
            stream.interrupt()
        return stream

    async def server_ready(self, timeout_s: float | None) -> bool:
        return await self._is_ready(self._health_path, timeout_s)

    async def model_ready(self, timeout_s: float | None) -> bool:
        return await self._is_ready(f"{self._model_path}/ready", timeout_s)

    async def metadata(self, timeout_s: float | None) -> ModelMetadata:
        status, headers, body = await self._get(self._model_path, timeout_s)
        error = query_error(str(self._server.endpoint), status, headers, body)
        if error is not None:
            raise repeatable(error)
        if not body:
            raise ProtocolError(f"{self._server.endpoint}: expected metadata, got an empty answer, {METRICS_PORT}")
        return _metadata(json_object(body))

    async def index(self, timeout_s: float | None) -> list[dict[str, str]]:
        path = self._health_path.replace("health/ready", "repository/index")
        _, _, body = await self._get(path, timeout_s, "POST")  # an error has no rows
        rows = json_object(b'{"rows":%b}' % body)["rows"]
        return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []

    async def metrics(self, url: str, timeout_s: float | None) -> str:
        """See `Transport`. The metrics are read on a connection of their own. The token and the user's headers are not
        sent to another host, nor without TLS if the server itself is reached with TLS."""
        parts = urlsplit(url)  # `Settings` has checked it
        path = quote((parts.path or "/metrics") + (parts.query and f"?{parts.query}"), safe=PATH_CHARACTERS + "?")
        endpoint = Endpoint(parts.scheme, parts.hostname or "", parts.port or _DEFAULT_PORTS[parts.scheme])
        own = self._server.endpoint
        trusted = endpoint.host == own.host and (endpoint.is_tls or not own.is_tls)
        target = _Target(endpoint)
        headers = self.headers(target) if trusted else [(b"host", target.host_header)]
        request = _get_request(path, [*headers, (b"connection", b"close")])
        connection = self._connect_to(target)
        try:
            status, answered, body = await connection.fetch(request, timeout_s, self.max_message_bytes)
        finally:
            await connection.close()
        if status != 200:
            raise repeatable(status_error(status, answered, body))
        try:
            return body.decode()
        except UnicodeDecodeError as exc:
            raise ProtocolError(f"GET {target.endpoint}: expected text, got {body[:200]!r}") from exc

    async def close(self) -> None:
        await self.pool.close()
        with self._streams_lock:
            streams = list(self._streams)
        for stream in streams:
            stream.interrupt()

    # Used by HttpResponseStream.

    async def connection(self) -> HttpConnection:
        """Return a connection to the server; a new one connects when it sends its first request."""
        return await self.pool.take() or self._connect_to(self._server)

    def generate_request(self, target: bytes, body: bytes, defaults: Mapping[bytes, bytes] = {}) -> HttpRequest:
        """`defaults`: headers that the user's may replace."""
        headers = [
            *{**defaults, **dict(self.headers(self._server))}.items(),
            (b"content-type", b"application/json"),
            (b"accept", EVENT_STREAM.encode()),
            (b"accept-encoding", b"identity"),
            (b"content-length", str(len(body)).encode()),
        ]
        return HttpRequest("POST", target, headers, body)

    def headers(self, target: "_Target") -> Headers:
        """The user's headers, which may replace host and user-agent, the client's own."""
        headers = {b"host": target.host_header, b"user-agent": b"deepseek-triton-client"}
        headers.update((name.encode(), value.encode()) for name, value in self._settings.request_headers())
        return list(headers.items())

    # Requests that are not streamed.

    async def _is_ready(self, path: str, timeout_s: float | None) -> bool:
        status, headers, body = await self._get(path, timeout_s)
        error = query_error(str(self._server.endpoint), status, headers, body)
        if isinstance(error, (AccessDenied, ProtocolError)):  # waiting does not help
            raise error
        if error is not None and not is_tritons(status, body):  # a proxy, with nobody behind it
            raise error
        if error is not None and path == self._health_path and b'"error"' in body:  # a gateway says why
            raise ModelNotReady(error.message)
        return error is None

    async def _get(self, path: str, timeout_s: float | None, method: str = "GET") -> Answer:
        request = _get_request(path, self.headers(self._server))._replace(method=method)
        idle = await self.pool.take()
        if idle is not None:
            with suppress(ServerUnavailable):  # the server may have closed it a moment ago; a new connection tells
                return await self._get_on(idle, request, timeout_s)
        return await self._get_on(self._connect_to(self._server), request, timeout_s)

    async def _get_on(self, connection: HttpConnection, request: HttpRequest, timeout_s: float | None) -> Answer:
        try:
            answer = await connection.fetch(request, timeout_s, self.max_message_bytes)
        except BaseException:
            await connection.close()
            raise
        await self.pool.give_back(connection)
        return answer

    def _connect_to(self, target: "_Target") -> HttpConnection:
        endpoint = target.endpoint
        tls = self._tls if endpoint.is_tls else None
        return HttpConnection(self._new_socket(target.host, endpoint.port, tls), endpoint)

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        return self._settings.tls.context()


class HttpResponseStream:
    """See `ResponseStream`."""

    def __init__(self, transport: HttpTransport, request: NewRequest, decode: Decode, connect_s: float | None) -> None:
        self._transport = transport
        self._request = request
        self._decode = decode
        self._connect_s = connect_s
        self._connection: HttpConnection | None = None
        self._decoder = SseDecoder(transport.max_message_bytes)
        self._events: deque[bytes] = deque()
        self._ended = False
        self._interrupted = False

    async def receive(self) -> Outputs | None:
        try:
            while not self._events:
                if self._ended:
                    return None
                connection = self._connection or await self._begin()
                data = await connection.read()
                if data:
                    self._events.extend(self._decoder.feed(data))
                else:
                    self._ended = True
                    if self._decoder.pending:
                        raise ProtocolError(f"{connection.what}: the response ends in the middle of an event")
            return self._decode(self._events.popleft())
        except ServerUnavailable as exc:
            if self._interrupted:
                raise Cancelled("the request was cancelled, or the client was closed") from exc
            raise

    def __del__(self) -> None:
        # A stream that was dropped without being closed: an event loop would keep its connection for ever.
        if self._connection is not None:
            self.interrupt()

    def interrupt(self) -> None:
        self._interrupted = True
        if self._connection is not None:
            self._connection.interrupt()

    async def close(self) -> None:
        self._interrupted = True  # another thread may be reading
        connection, self._connection = self._connection, None
        if connection is None:
            return
        # The connection goes back only here: until now an interrupt is meant for this request. A connection whose
        # response was not read to its end is closed by that, which is how the server sees that its client has left.
        await self._transport.pool.give_back(connection)

    async def _begin(self) -> HttpConnection:
        request = self._request()
        self._connection = connection = await self._transport.connection()
        # Checked once `interrupt` can see the connection: either it was interrupted, or the flag is seen here.
        if self._interrupted:
            connection.interrupt()
        status, headers = await connection.send(request, connect_s=self._connect_s)
        if status != 200:
            raise status_error(status, headers, await connection.read_error())
        found = headers.get("content-type", "")
        if not found.lower().startswith(EVENT_STREAM):
            raise ProtocolError(f"{connection.what}: expected {EVENT_STREAM}, got {found[:200]!r}")
        return connection


class _Target:
    """The address of a server, as it is connected to and as it is named in requests."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        try:
            host = endpoint.host.encode("idna")
        except UnicodeError as exc:
            raise InvalidRequest(f"url: expected the name of a host, got {endpoint.host!r}: {exc}") from exc
        self.host = host.decode()
        self.host_header = b"[%s]" % host if b":" in host else host
        if endpoint.port != _DEFAULT_PORTS[endpoint.scheme]:
            self.host_header += b":%d" % endpoint.port


def _get_request(path: str, headers: Headers) -> HttpRequest:
    return HttpRequest("GET", path.encode(), [*headers, (b"accept", b"*/*"), (b"accept-encoding", b"identity")])


def _metadata(values: Mapping[str, Any]) -> ModelMetadata:
    try:
        return ModelMetadata(
            name=values["name"],
            versions=tuple(values.get("versions", ())),
            platform=values["platform"],
            inputs=tuple(_tensor(tensor) for tensor in values["inputs"]),
            outputs=tuple(_tensor(tensor) for tensor in values["outputs"]),
        )
    except (KeyError, TypeError) as exc:
        raise ProtocolError(f"expected a model's metadata, got {values!r:.200}") from exc


def _tensor(values: Mapping[str, Any]) -> TensorMetadata:
    return TensorMetadata(values["name"], values["datatype"], tuple(values["shape"]))
