"""Triton's gRPC protocol, one ModelStreamInfer call for each request.

Each request has a call of its own, because gRPC can cancel only whole calls: so ending one request ends nothing else.
The call is made with one request and many responses. Triton declares a stream of requests; on the wire this is such a
stream, ended after the first request, and it takes no thread or task to feed it.

Triton 2.51 crashes on cancelled streams now and then, whatever the client does. Of streams cancelled around their end,
64 at once: 3 crashes in 258,000 made this way, 10 in 219,000 with a second step that ends the requests, 4 in 166,000
where that came after the final response (one more never ended), 5 in 79,000 that never ended them.

This uses the messages that tritonclient generates from Triton's protocol files, but not its client: that one works with
numpy arrays, runs one stream for each client object and reports through a callback.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from deepseek_triton_client._core.client_settings import Endpoint, Settings
from deepseek_triton_client._core.exceptions import (
    Cancelled,
    DeepseekTritonError,
    InvalidRequest,
    ProtocolError,
    ServerError,
    ServerUnavailable,
    error_from_server,
)
from deepseek_triton_client._core.interfaces import Input, Outputs, Transport
from deepseek_triton_client._core.results import ModelMetadata, TensorMetadata
from deepseek_triton_client._core.wire import decode_tensors, encode

try:
    import grpc  # type: ignore[import-untyped]
    from google.protobuf.message import DecodeError
    from tritonclient.grpc import service_pb2 as pb
except (ImportError, RuntimeError) as exc:  # tritonclient without its grpc extra raises RuntimeError
    raise InvalidRequest("url: grpc:// needs the extra grpc: pip install '.[grpc]' or 'tritonclient[grpc]'") from exc

from deepseek_triton_client._grpc import grpc_channel

_SERVICE = "/inference.GRPCInferenceService/"


class GrpcTransport:
    """See `Transport`."""

    always_streams = False

    def __init__(
        self,
        endpoint: Endpoint,
        settings: Settings,
        new_transport: Callable[[Endpoint, Settings], Transport],
        *,
        is_asyncio: bool,
    ) -> None:
        """`new_transport` makes the transport of an endpoint with HTTP, for the metrics.

        :raises InvalidRequest: for settings that gRPC can't have.
        """
        grpc_channel.check_headers(tuple(settings.headers))
        new_channel: type[grpc_channel.GrpcChannel] = (
            grpc_channel.AsyncioChannel if is_asyncio else grpc_channel.BlockingChannel
        )
        self._channel = new_channel(
            f"dns:///{endpoint.address}",  # with its scheme, or gRPC would look for one in the host's name
            options=grpc_channel.options(settings),
            credentials=grpc_channel.credentials(settings.tls) if endpoint.is_tls else None,
        )
        self._endpoint = endpoint
        self._new_transport = new_transport
        self._settings = settings
        self._model = {"name": settings.model_name, "version": settings.model_version}
        self.connected = False
        """Whether something has answered, and the connection has not failed since, as far as is known."""

    def open(
        self, request_id: str, inputs: Sequence[Input], *, connect_s: float | None, headers: Mapping[str, str] = {}
    ) -> "GrpcStream":
        """`headers` are added to those of the settings."""
        message = pb.ModelInferRequest(
            model_name=self._model["name"], model_version=self._model["version"], id=request_id
        )
        for each in inputs:
            message.inputs.add(name=each.name, datatype=each.datatype, shape=(len(each.values),))
            message.raw_input_contents.append(encode(each.datatype, each.values))
        # Without this parameter, a model that ends with an empty final response seems never to end.
        message.parameters["triton_enable_empty_final_response"].bool_param = True
        return GrpcStream(self, message.SerializeToString(), connect_s, tuple(headers.items()))

    async def server_ready(self, timeout_s: float | None) -> bool:
        return bool((await self._ask("ServerReady", pb.ServerReadyRequest(), pb.ServerReadyResponse, timeout_s)).ready)

    async def model_ready(self, timeout_s: float | None) -> bool:
        request = pb.ModelReadyRequest(**self._model)
        return bool((await self._ask("ModelReady", request, pb.ModelReadyResponse, timeout_s)).ready)

    async def metadata(self, timeout_s: float | None) -> ModelMetadata:
        request = pb.ModelMetadataRequest(**self._model)
        answer = await self._ask("ModelMetadata", request, pb.ModelMetadataResponse, timeout_s)
        return ModelMetadata(
            name=answer.name,
            versions=tuple(answer.versions),
            platform=answer.platform,
            inputs=tuple(TensorMetadata(each.name, each.datatype, tuple(each.shape)) for each in answer.inputs),
            outputs=tuple(TensorMetadata(each.name, each.datatype, tuple(each.shape)) for each in answer.outputs),
        )

    async def index(self, timeout_s: float | None) -> list[dict[str, str]]:
        answer = await self._ask("RepositoryIndex", pb.RepositoryIndexRequest(), pb.RepositoryIndexResponse, timeout_s)
        return [{"name": each.name, "version": each.version, "state": each.state} for each in answer.models]

    async def metrics(self, url: str, timeout_s: float | None) -> str:
        """See `Transport`. Triton serves metrics only over HTTP."""
        # The HTTP transport decides by this endpoint whether a host may get the token.
        endpoint = replace(self._endpoint, scheme="https" if self._endpoint.is_tls else "http")
        http = self._new_transport(endpoint, self._settings)
        try:
            return await http.metrics(url, timeout_s)
        finally:
            await http.close()

    async def close(self) -> None:
        await self._channel.close()

    def call(
        self, method: str, request: bytes, timeout_s: float | None = None, headers: grpc_channel.Metadata = ()
    ) -> grpc_channel.GrpcCall:
        metadata = [*self._settings.request_headers(), *headers]
        return self._channel.call(_SERVICE + method, request, metadata=metadata, timeout_s=timeout_s)

    def failure(self, error: grpc.RpcError, *, is_query: bool = False) -> DeepseekTritonError:
        """Return the error, and note what it says about the connection."""
        if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
            self.connected = error.code() is not grpc.StatusCode.UNAVAILABLE
        return grpc_channel.from_rpc_error(error, is_query=is_query)

    async def answer(self, call: grpc_channel.GrpcCall, timeout_s: float | None) -> bytes:
        """Return the response of a call with one response, which generates nothing and has this limit."""
        try:
            data = await call.read()
            if data is not None:
                await call.read()  # waits for the end
        except grpc.RpcError as exc:
            if exc.code() is grpc.StatusCode.DEADLINE_EXCEEDED and timeout_s is not None:
                what = "answer" if self.connected else "connection"
                raise ServerUnavailable(f"no {what} within {timeout_s:g} s", unprocessed=True) from exc
            raise self.failure(exc, is_query=True) from exc
        self.connected = True
        if data is None:
            raise ProtocolError("expected a response, got the end of the call")
        return data

    async def _ask(self, method: str, request: Any, response: Any, timeout_s: float | None) -> Any:
        data = await self.answer(self.call(method, request.SerializeToString(), timeout_s), timeout_s)
        return _parsed(response, data)


class GrpcStream:
    """See `ResponseStream`."""

    def __init__(
        self, transport: GrpcTransport, request: bytes, connect_s: float | None, headers: grpc_channel.Metadata
    ) -> None:
        self._transport = transport
        self._request = request
        self._connect_s = connect_s
        self._headers = headers
        self._call: grpc_channel.GrpcCall | None = None
        self._responses: grpc_channel.GrpcCall | None = None
        self._num_received = 0
        self._final = False
        """Whether the server has said that no response follows; it ends the stream at once then."""
        self._ended = False
        self._cancelled = False

    async def receive(self) -> Outputs | None:
        if self._ended:
            return None
        try:
            outputs = await self._next()
        except grpc.RpcError as exc:
            self._ended = True
            raise self._for_this_request(self._transport.failure(exc)) from exc
        except DeepseekTritonError as exc:
            self._ended = True
            raise self._for_this_request(exc) from exc.__cause__
        if outputs is None:
            self._ended = True
        else:
            self._num_received += 1
        return outputs

    def interrupt(self) -> None:
        self._cancelled = True
        if self._call is not None:
            self._call.cancel()

    async def close(self) -> None:
        try:
            if self._final and not self._ended and self._responses is not None:
                self._ended = True
                await self._responses.end()
        finally:
            self.interrupt()

    async def _next(self) -> Outputs | None:
        if self._responses is None:
            await self._connect()
            self._responses = self._remember(
                self._transport.call("ModelStreamInfer", self._request, headers=self._headers)
            )
        # The client waits for an announced end. Leaving before it is a cancellation, and in the moment of the last
        # response that can leave Triton unable to exit. 500 streams left at their last chunk did so every time.
        while not self._final and (data := await self._responses.read()) is not None:
            answer = _parsed(pb.ModelStreamInferResponse, data)
            if answer.error_message:
                await self._responses.end()
                raise error_from_server(answer.error_message, otherwise=ServerError)
            outputs = _outputs(answer)
            self._final = _is_final(answer)
            if outputs:  # the final response may be empty
                return outputs
        if self._final:
            await self._responses.end()
        return None

    async def _connect(self) -> None:
        """Make sure that the connection stands, within `connect_s`.

        gRPC neither limits how long a call waits for its connection nor tells when the connection stands. So another
        call is made before the request, unless something has answered before; reading the model's metadata mostly has.
        """
        if self._transport.connected or self._connect_s is None:
            return
        call = self._remember(self._transport.call("ServerLive", b"", self._connect_s))
        try:
            await self._transport.answer(call, self._connect_s)
        except DeepseekTritonError:
            if self._cancelled or not self._transport.connected:
                raise

    def _remember(self, call: grpc_channel.GrpcCall) -> grpc_channel.GrpcCall:
        """Remember the call for `interrupt`, or cancel it if `interrupt` came before."""
        self._call = call
        if self._cancelled:
            call.cancel()
        return call

    def _for_this_request(self, error: DeepseekTritonError) -> DeepseekTritonError:
        if self._cancelled:
            return Cancelled("the request was cancelled")
        error.unprocessed = error.unprocessed and not self._num_received
        return error


def _outputs(answer: Any) -> Outputs:
    """Return the outputs of a response. Raises ProtocolError."""
    response = answer.infer_response
    outputs, contents = response.outputs, response.raw_output_contents
    if len(outputs) != len(contents):
        raise ProtocolError(f"expected raw contents for each of {len(outputs)} outputs, got {len(contents)}")
    return decode_tensors(
        [(output.name, output.datatype, content) for output, content in zip(outputs, contents, strict=True)]
    )


def _is_final(answer: Any) -> bool:
    parameters = answer.infer_response.parameters
    return "triton_final_response" in parameters and bool(parameters["triton_final_response"].bool_param)


def _parsed(message: Any, data: bytes) -> Any:
    try:
        return message.FromString(data)
    except DecodeError as exc:
        raise ProtocolError(f"expected a {message.DESCRIPTOR.full_name}, got {data[:64]!r}") from exc
