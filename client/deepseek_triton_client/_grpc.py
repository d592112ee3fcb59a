"""Triton's gRPC protocol, one ModelStreamInfer stream per request.

One stream each, because a stream's cancellation is the only one gRPC has: ending one request ends nothing else.

Uses the messages that tritonclient generates from Triton's protocol files, not its client: that one works in numpy
arrays, runs one stream per client object and reports through a callback.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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
from deepseek_triton_client._timeouts import Timeouts
from deepseek_triton_client._wire import GenerateRequest, decode_tensors, encode_tensors

try:
    import grpc  # type: ignore[import-untyped]
    from tritonclient.grpc import service_pb2, service_pb2_grpc
except (ImportError, RuntimeError) as exc:  # tritonclient without its grpc extra raises RuntimeError
    raise ImportError("grpc:// URLs need more packages: pip install deepseek-triton[grpc]") from exc


class GrpcTransport:
    """`target` is "host:port"; `timeouts.connect` limits everything but the streams."""

    def __init__(self, target: str, *, model_name: str, model_version: str, timeouts: Timeouts) -> None:
        self._model = {"name": model_name, "version": model_version}
        self._timeouts = timeouts
        self._channel = grpc.insecure_channel(target, options=_channel_options(timeouts))
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def open(self, request: GenerateRequest) -> GrpcResponseStream:
        message = _message(request, self._model)
        call = self._stub.ModelStreamInfer(iter([message]), timeout=request.timeouts.total)
        return GrpcResponseStream(call)

    def is_ready(self) -> bool:
        with grpc_errors():
            answer = self._stub.ModelReady(service_pb2.ModelReadyRequest(**self._model), timeout=self._timeouts.connect)
        return bool(answer.ready)

    def metadata(self) -> ModelMetadata:
        with grpc_errors():
            answer = self._stub.ModelMetadata(
                service_pb2.ModelMetadataRequest(**self._model), timeout=self._timeouts.connect
            )
        return ModelMetadata(
            name=answer.name,
            versions=tuple(answer.versions),
            platform=answer.platform,
            inputs=tuple(TensorMetadata(each.name, each.datatype, tuple(each.shape)) for each in answer.inputs),
            outputs=tuple(TensorMetadata(each.name, each.datatype, tuple(each.shape)) for each in answer.outputs),
        )

    def close(self) -> None:
        self._channel.close()


class GrpcResponseStream:
    """The responses of one ModelStreamInfer call, decoded."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def __iter__(self) -> Iterator[Chunk]:
        # Read on after the final response, to the end of the stream: closing before it would be a cancellation.
        with grpc_errors():
            for answer in self._call:
                if answer.error_message:
                    raise error_from_server(answer.error_message, otherwise=ServerError)
                if answer.infer_response.outputs:  # the final response may be an empty one
                    yield _chunk(answer.infer_response)

    def interrupt(self) -> None:
        self._call.cancel()

    def close(self) -> None:
        self._call.cancel()


def _channel_options(timeouts: Timeouts) -> list[tuple[str, int]]:
    options = [
        ("grpc.max_send_message_length", -1),
        ("grpc.max_receive_message_length", -1),
        # Finds a peer that vanished without a word. Not more often: by default Triton ends the connection of a client
        # that pings again within 5 minutes without data in between, as a long prefill has none.
        ("grpc.keepalive_time_ms", 310_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.http2.max_pings_without_data", 0),
        # After a failed attempt every call fails for this long, up to two minutes by default. A server that comes back
        # after an hour of loading should be seen at once.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        # Connections of its own: otherwise all clients of a process share one for each target, and its fate.
        ("grpc.use_local_subchannel_pool", 1),
    ]
    if timeouts.connect is not None:
        # The name says otherwise, but this is how long one attempt to connect may take.
        options.append(("grpc.min_reconnect_backoff_ms", max(1, round(timeouts.connect * 1000))))
    return options


def _message(request: GenerateRequest, model: dict[str, str]) -> Any:
    message = service_pb2.ModelInferRequest(
        model_name=model["name"], model_version=model["version"], id=request.request_id
    )
    for tensor in encode_tensors(request):
        message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=[tensor.num_elements])
        message.raw_input_contents.append(tensor.data)
    # Otherwise a model that ends with an empty final response looks like one that never ends.
    message.parameters["triton_enable_empty_final_response"].bool_param = True
    return message


def _chunk(response: Any) -> Chunk:
    outputs, contents = response.outputs, response.raw_output_contents
    if len(outputs) != len(contents):
        raise ProtocolError(f"expected raw contents for each of {len(outputs)} outputs, got {len(contents)}")
    pairs = zip(outputs, contents, strict=True)
    return decode_tensors({output.name: (output.datatype, data) for output, data in pairs})


@contextmanager
def grpc_errors() -> Iterator[None]:
    """The border: grpc's exceptions go in, ours come out."""
    try:
        yield
    except grpc.RpcError as exc:
        text = exc.details() or exc.code().name
        raise error_from_server(text, otherwise=BY_STATUS_CODE[exc.code()]) from exc


BY_STATUS_CODE: dict[grpc.StatusCode, type[DeepseekTritonError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.FAILED_PRECONDITION: InvalidRequest,
    grpc.StatusCode.OUT_OF_RANGE: InvalidRequest,
    grpc.StatusCode.ALREADY_EXISTS: InvalidRequest,
    grpc.StatusCode.UNAUTHENTICATED: InvalidRequest,
    grpc.StatusCode.PERMISSION_DENIED: InvalidRequest,
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
