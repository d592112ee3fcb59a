"""One client process: its share of the streams, over one gRPC channel or a connection for each.

What it does for a response is to note the time and keep the bytes.
"""

import asyncio
import gc
import json
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from bench._load import Fields, infer_message, why_lost
from bench.streams_load.reading import (
    OUTCOMES,
    GrpcDecoder,
    HttpDecoder,
    Record,
    StreamSample,
    is_cumulative,
    sample_of,
)

_INFER = "/inference.GRPCInferenceService/ModelStreamInfer"
_WARM_UP_TOKENS = 24
"""Several responses, also where one has ten."""
_LAST_CHUNK = b"0\r\n\r\n"


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one client process does: the streams first, first + step, and so on below num_streams."""

    protocol: str
    host: str
    port: int
    model: str
    prompt: str
    streaming: bool
    first: int
    step: int
    num_streams: int
    num_tokens: int
    chars_per_token: int
    open_s: float
    patience_s: float
    """From the start; a stream that has not ended then is lost."""
    samples: Path

    def fields(self, num_tokens: int) -> Fields:
        """Of one request."""
        return {"text_input": self.prompt, "streaming": self.streaming, "sampling_param_max_tokens": num_tokens}


def client_process(share: Share, parent: Any) -> None:
    """`parent` is a pipe, with a word each way by turns.

    Ready; the agreed start by time.monotonic_ns(). CPU seconds when the streams have ended; those of all clients have.
    Samples written.
    """
    asyncio.run(_run(share, parent))


async def _run(share: Share, parent: Any) -> None:
    connection = GrpcConnection(share) if share.protocol == "gRPC" else HttpConnection(share)
    cumulative = await _warm_up(connection)
    request = connection.request(share.num_tokens)
    numbers = range(share.first, share.num_streams, share.step)
    records = [Record(connection.make_decoder, cumulative=cumulative) for _ in numbers]
    # Millions of small objects are kept: looking through them again and again would be most of the work.
    gc.collect()
    gc.disable()
    parent.send("ready")
    start_s = parent.recv() / 1e9
    begun_cpu_s = time.process_time()
    spacing_s = share.open_s / share.num_streams
    streams = [
        asyncio.create_task(_stream(connection, request, record, start_s + number * spacing_s))
        for number, record in zip(numbers, records, strict=True)
    ]
    _, pending = await asyncio.wait(streams, timeout=start_s + share.patience_s - time.monotonic())
    for task in pending:
        task.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
    parent.send(time.process_time() - begun_cpu_s)
    await connection.close()
    parent.recv()  # reading takes the processor, which others may still need to receive
    read = partial(sample_of, num_tokens=share.num_tokens, chars_per_token=share.chars_per_token)
    _save(share.samples, [read(record) for record in records])
    parent.send("saved")


async def _warm_up(connection: "GrpcConnection | HttpConnection") -> bool:
    """One short stream; whether its responses are cumulative."""
    record = Record(connection.make_decoder, cumulative=False)
    await connection.stream(connection.request(_WARM_UP_TOKENS), record)
    chunks = [chunk for _, chunk in record.chunks()]
    errors = [chunk.error for chunk in chunks if chunk.error]
    if record.lost or errors or not chunks:
        raise RuntimeError(f"the first stream failed: {record.lost or errors or 'no response'}")
    return is_cumulative([chunk.text for chunk in chunks if chunk.text])


async def _stream(connection: "GrpcConnection | HttpConnection", request: bytes, record: Record, due_s: float) -> None:
    await asyncio.sleep(due_s - time.monotonic())
    record.opened_ns = time.monotonic_ns()
    try:
        await connection.stream(request, record)
    except asyncio.CancelledError:
        record.lost = "no end"
    except (OSError, grpc.aio.AioRpcError) as error:
        record.lost = why_lost(error)
    record.ended_ns = time.monotonic_ns()


class GrpcConnection:
    make_decoder = GrpcDecoder

    def __init__(self, share: Share) -> None:
        self._share = share
        options = [("grpc.max_receive_message_length", -1)]
        self._channel = grpc.aio.insecure_channel(f"{share.host}:{share.port}", options=options)
        # One request and then no more: on the wire the same as a stream of one, and one batch of work less.
        self._call = self._channel.unary_stream(_INFER)

    def request(self, num_tokens: int) -> bytes:
        message = infer_message(self._share.model, self._share.fields(num_tokens))
        serialized: bytes = message.SerializeToString()
        return serialized

    async def stream(self, request: bytes, record: Record) -> None:
        arrived = record.arrived
        async for message in self._call(request):
            arrived(message)

    async def close(self) -> None:
        await self._channel.close()


class HttpConnection:
    make_decoder = HttpDecoder

    def __init__(self, share: Share) -> None:
        self._share = share

    def request(self, num_tokens: int) -> bytes:
        path = f"/v2/models/{self._share.model}/generate_stream"
        body = json.dumps(self._share.fields(num_tokens)).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: {self._share.host}\r\nContent-Length: {len(body)}\r\n"
        return head.encode() + b"Content-Type: application/json\r\nConnection: close\r\n\r\n" + body

    async def stream(self, request: bytes, record: Record) -> None:
        loop = asyncio.get_running_loop()
        make_answer = partial(_Answer, request, record)
        transport, protocol = await loop.create_connection(make_answer, self._share.host, self._share.port)
        try:
            await protocol.ended
        finally:
            transport.abort()

    async def close(self) -> None:
        """Each stream has closed its own."""


class _Answer(asyncio.Protocol):
    def __init__(self, request: bytes, record: Record) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request = request
        self._record = record
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._record.arrived(data)
        # JSON escapes line ends, so that this stands nowhere else.
        self._tail = (self._tail + data)[-len(_LAST_CHUNK) :]
        if self._tail == _LAST_CHUNK:
            self._end(None)

    def connection_lost(self, error: Exception | None) -> None:
        self._end(error)

    def _end(self, error: Exception | None) -> None:
        if self.ended.done():
            return
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)


def _save(path: Path, samples: list[StreamSample]) -> None:
    """Arrays of streams, of chunks and of stamps, in the streams' order."""
    np.savez_compressed(
        path,
        outcome=np.array([OUTCOMES.index(sample.outcome) for sample in samples], dtype=np.int8),
        detail=np.array([sample.detail for sample in samples], dtype=np.str_),
        opened_us=np.array([sample.opened_us for sample in samples], dtype=np.int64),
        ended_us=np.array([sample.ended_us for sample in samples], dtype=np.int64),
        num_chunks=np.array([len(sample.chunk_us) for sample in samples], dtype=np.int64),
        num_stamps=np.array([len(sample.stamp_us) for sample in samples], dtype=np.int64),
        **{
            name: np.concatenate([getattr(sample, name) for sample in samples])
            for name in ("chunk_us", "chunk_tokens", "stamp_us", "stamp_arrival_us")
        },
    )
