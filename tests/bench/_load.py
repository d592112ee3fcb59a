"""Requests over HTTP and gRPC for the scripts here, and what each one's client saw of its end.

HTTP is httpx on /generate and /generate_stream. gRPC is a stream for each request over one channel, with the messages
of tritonclient: its own clients don't show the final flag of a stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import grpc  # type: ignore[import-untyped]
import httpx
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import serialize_byte_tensor

from deepseek_backend.contract import INPUTS, Dtype
from deepseek_backend.errors import describe

MODEL = "tensorrt_llm"
PATIENCE_S = 120.0
"""A request without an end for so long counts as unanswered."""

LEFT = "left"
NO_END = "no end"
SEVERAL_ENDS = "several ends"
TOO_LATE = f"none in {PATIENCE_S:.0f} s"
LOST = "connection lost"
UNANSWERED = (NO_END, SEVERAL_ENDS, TOO_LATE, LOST)

Fields: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Request:
    """Fields are those of a /generate body; over gRPC they are tensors or parameters, as Triton itself maps them."""

    fields: Fields
    kind: str = ""
    request_id: str = ""
    num_sequences: int = 1
    timeout_us: int = 0
    """Of Triton's own protocol; gRPC only."""
    leave_after_chunks: int | None = None
    leave_after_s: float | None = None
    patience_s: float = PATIENCE_S

    @property
    def streaming(self) -> bool:
        return bool(self.fields.get("streaming"))


@dataclass(frozen=True)
class Response:
    """One response: why sequences ended in it, or the error; `final` where the protocol tells."""

    reasons: Sequence[str] = ()
    error: str = ""
    final: bool | None = None
    text: str = ""


@dataclass(kw_only=True)
class Answer:
    """What the client saw. Times are by time.monotonic(), which all processes of the machine share."""

    kind: str
    protocol: str
    streaming: bool
    outcome: str = ""
    """A finish reason, an error code, LEFT, or one of UNANSWERED."""
    began_s: float = 0.0
    first_s: float | None = None
    ended_s: float = 0.0
    num_responses: int = 0
    num_chars: int = 0
    detail: str = ""
    """The first error's text."""
    reasons: list[str] = field(default_factory=list)
    num_errors: int = 0
    num_finals: int | None = None
    """gRPC only."""

    @property
    def unanswered(self) -> bool:
        return self.outcome in UNANSWERED

    def add(self, response: Response) -> None:
        self.num_responses += 1
        self.num_chars += len(response.text)
        self.reasons += response.reasons
        if response.error:
            self.num_errors += 1
            self.detail = self.detail or response.error
        if response.final is not None:
            self.num_finals = (self.num_finals or 0) + response.final

    def judge(self, num_sequences: int) -> str:
        """The outcome of an answer that was read to the end of its stream."""
        if self.num_errors + len(self.reasons) == 0:
            return NO_END
        ends = self.num_errors if self.num_errors else len(self.reasons) / num_sequences
        if ends < 1 or self.num_finals == 0:
            return NO_END
        if ends > 1 or (self.num_finals or 1) > 1 or (self.num_errors and len(self.reasons) == num_sequences):
            return SEVERAL_ENDS
        return error_code(self.detail) if self.num_errors else self.reasons[0]

    def as_json(self) -> str:
        return json.dumps(vars(self))


class Connection(Protocol):
    """One protocol to one server; requests may run at the same time."""

    protocol: str

    def responses(self, request: Request) -> AsyncGenerator[Response, None]:
        """Ends with the stream; closing it early is the client's cancellation."""
        ...

    async def close(self) -> None: ...


def error_code(message: str) -> str:
    found = re.match(r"\[(E_\w+)\]", message)
    return found[1] if found else "an error without code"


def why_lost(error: Exception) -> str:
    """In one line, cut: gRPC's errors have all that its core knew."""
    return describe(error)[:300]


async def ask(connection: Connection, request: Request, *, on_first: Callable[[], object] | None = None) -> Answer:
    """Send the request and read its answer, or leave it as it says. `on_first` runs after the first response."""
    answer = Answer(kind=request.kind, protocol=connection.protocol, streaming=request.streaming)
    answer.began_s = time.monotonic()
    leaves = request.leave_after_s is not None
    try:
        reading = _read(connection, request, answer, on_first)
        answer.outcome = await asyncio.wait_for(reading, request.leave_after_s if leaves else request.patience_s)
    except asyncio.TimeoutError:
        answer.outcome = LEFT if leaves else TOO_LATE
    except (httpx.TransportError, grpc.aio.AioRpcError) as error:
        answer.outcome, answer.detail = LOST, why_lost(error)
    answer.ended_s = time.monotonic()
    return answer


async def _read(connection: Connection, request: Request, answer: Answer, on_first: Callable[[], object] | None) -> str:
    async with contextlib.aclosing(connection.responses(request)) as responses:
        async for response in responses:
            answer.add(response)
            if answer.first_s is None:
                answer.first_s = time.monotonic()
                if on_first:
                    on_first()
            if answer.num_responses == request.leave_after_chunks and not answer.reasons and not answer.num_errors:
                return LEFT
    return answer.judge(request.num_sequences)


class Http:
    protocol = "HTTP"

    def __init__(self, host_and_port: str) -> None:
        self._url = f"http://{host_and_port}/v2/models/{MODEL}"
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._client = httpx.AsyncClient(timeout=None, limits=limits, trust_env=False)

    async def responses(self, request: Request) -> AsyncGenerator[Response, None]:
        verb = "generate_stream" if request.streaming else "generate"
        body = dict(request.fields)
        if request.request_id:
            body["id"] = request.request_id
        async with self._client.stream("POST", f"{self._url}/{verb}", json=body) as response:
            if response.status_code != httpx.codes.OK or not request.streaming:
                await response.aread()
                yield _from_json(response.text)
                return
            async for line in response.aiter_lines():
                if line:
                    yield _from_json(line)

    async def close(self) -> None:
        await self._client.aclose()


def _from_json(text: str) -> Response:
    """Of a whole body or an event; an error that is a stream's first response is an event in a body without events."""
    try:
        document = json.loads(text.removeprefix("data: "))
    except ValueError:
        return Response(error=f"no JSON: {text[:200]!r}")
    if "error" in document:
        return Response(error=document["error"])
    return Response(_reasons(document.get("finish_reason", [])), text="".join(_listed(document["text_output"])))


def _listed(value: Any) -> list[str]:
    """Triton writes a tensor of one value as the value alone."""
    return value if isinstance(value, list) else [value]


def _reasons(value: Any) -> list[str]:
    return [reason for reason in _listed(value) if reason != "None"]


class Grpc:
    """To be made in the event loop that it is used in; in another it waits for ever."""

    protocol = "gRPC"

    def __init__(self, host_and_port: str) -> None:
        options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        self._channel = grpc.aio.insecure_channel(host_and_port, options=options)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    async def responses(self, request: Request) -> AsyncGenerator[Response, None]:
        call = self._stub.ModelStreamInfer()
        try:
            await call.write(_call_message(request))
            await call.done_writing()
            async for response in call:
                yield _from_message(response)
        finally:
            call.cancel()

    async def close(self) -> None:
        await self._channel.close()


def _from_message(message: Any) -> Response:
    response = message.infer_response
    if message.error_message:
        return Response(error=message.error_message, final=True)
    outputs = {output.name: raw for output, raw in zip(response.outputs, response.raw_output_contents, strict=True)}
    text = b"".join(_strings(outputs.get("text_output", b""))).decode()
    reasons = _reasons([value.decode() for value in _strings(outputs.get("finish_reason", b""))])
    return Response(reasons, final=response.parameters["triton_final_response"].bool_param, text=text)


def _strings(raw: bytes) -> list[bytes]:
    """Of a BYTES tensor: each has its length before it."""
    values, at = [], 0
    while at < len(raw):
        size = int.from_bytes(raw[at : at + 4], "little")
        values.append(raw[at + 4 : at + 4 + size])
        at += 4 + size
    return values


_DTYPES = {
    Dtype.BOOL: ("BOOL", np.bool_),
    Dtype.INT32: ("INT32", np.int32),
    Dtype.INT64: ("INT64", np.int64),
    Dtype.UINT64: ("UINT64", np.uint64),
    Dtype.FP32: ("FP32", np.float32),
}
_INPUT_DTYPES = {tensor.name: tensor.dtype for tensor in INPUTS}


def _call_message(request: Request) -> Any:
    message = infer_message(MODEL, request.fields)
    message.id = request.request_id
    message.parameters["triton_enable_empty_final_response"].bool_param = True
    if request.timeout_us:
        message.parameters["timeout"].int64_param = request.timeout_us
    return message


def infer_message(model: str, fields: Fields) -> Any:
    """A ModelInferRequest with nothing but these."""
    message = service_pb2.ModelInferRequest(model_name=model)
    for name, value in fields.items():
        if name in _INPUT_DTYPES:
            _add_tensor(message, name, value if isinstance(value, list) else [value])
        else:
            _set_parameter(message.parameters[name], value)
    return message


def _add_tensor(message: Any, name: str, values: list[Any]) -> None:
    tensor = message.inputs.add(name=name, shape=[len(values)])
    dtype = _INPUT_DTYPES[name]
    if dtype is Dtype.STRING:
        tensor.datatype = "BYTES"
        array = serialize_byte_tensor(np.array([value.encode() for value in values], dtype=np.object_))
        message.raw_input_contents.append(array.item())
        return
    tensor.datatype, numpy_type = _DTYPES[dtype]
    message.raw_input_contents.append(np.array(values, dtype=numpy_type).tobytes())


def _set_parameter(parameter: Any, value: bool | int | float | str) -> None:
    kinds = ((bool, "bool_param"), (int, "int64_param"), (float, "double_param"), (str, "string_param"))
    setattr(parameter, next(name for kind, name in kinds if isinstance(value, kind)), value)
