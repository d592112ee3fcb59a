"""A Triton server that makes a token for each stream at an even pace, and writes into it when that was.

    python -m bench.gateway_load.paced_triton PORT CHUNKS PERIOD_S GRPC_PORT

The text of each event is CLOCK_MONOTONIC in microseconds. With PERIOD_S 0 each stream is written as fast as it is read.
"""

import asyncio
import struct
import sys
import time
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import httptools
import uvloop
from tritonclient.grpc import service_pb2 as pb

_INFO = rb"{\"name\":\"paced\",\"checkpoint\":\"paced\",\"max_seq_len\":4096}"
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_BATCH = 50
"""Events that are written together where there is no pace."""


class PacedTriton(asyncio.Protocol):
    num_chunks = 100
    period_s = 0.01

    def __init__(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self._path = b""
        self._body = b""
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._path, self._body = url, b""

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        if not self._path.endswith(b"generate_stream"):
            status = b"200 OK" if b"ready" in self._path else b"404 Not Found"
            self._transport.write(b"HTTP/1.1 %b\r\nContent-Length: 0\r\n\r\n" % status)
        elif b'"describe"' in self._body:
            self._transport.write(_HEAD + _chunk(b'data: {"model_info":"%b"}\n\n' % _INFO) + b"0\r\n\r\n")
        else:
            self._transport.write(_HEAD)
            loop = asyncio.get_running_loop()
            loop.call_later(self.period_s, self._token, loop.time() + self.period_s, self.num_chunks)

    def _token(self, due_s: float, num_left: int) -> None:
        if self._transport.is_closing():
            return
        batch = 1 if self.period_s else min(_BATCH, num_left)
        us = time.monotonic_ns() // 1000
        counts = b'"num_output_tokens":1,' if b'"return_num_output_tokens":true' in self._body else b""
        event = _chunk(b'data: {"model_name":"m","model_version":"1",%b"text_output":"%d "}\n\n' % (counts, us))
        self._transport.write(event * batch)
        num_left -= batch
        if num_left:
            asyncio.get_running_loop().call_at(due_s + self.period_s, self._token, due_s + self.period_s, num_left)
        else:
            last = b'data: {"text_output":"","finish_reason":"length","num_input_tokens":8,"num_output_tokens":%d}\n\n'
            self._transport.write(_chunk(last % (0 if counts else self.num_chunks)) + b"0\r\n\r\n")


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class PacedGrpc(grpc.GenericRpcHandler):
    """The same over gRPC."""

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        name = details.method.rpartition("/")[2]
        if name == "ModelStreamInfer":
            return grpc.stream_stream_rpc_method_handler(self._stream)
        return grpc.unary_unary_rpc_method_handler(self._ready)

    async def _ready(self, request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        return b"\x08\x01"

    async def _stream(self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        async for request in requests:
            if b"describe" in request:
                await context.write(_response(model_info=_INFO.replace(b"\\", b"")))
                return
            num_left, due_s = PacedTriton.num_chunks, time.monotonic()
            while num_left:
                due_s += PacedTriton.period_s
                if PacedTriton.period_s:
                    await asyncio.sleep(due_s - time.monotonic())
                await context.write(_response(text_output=b"%d " % (time.monotonic_ns() // 1000)))
                num_left -= 1
            ends = {"finish_reason": b"length", "num_input_tokens": 8, "num_output_tokens": PacedTriton.num_chunks}
            await context.write(_response(**ends))


def _response(**outputs: bytes | int) -> bytes:
    message = pb.ModelStreamInferResponse()
    for name, value in outputs.items():
        is_text = isinstance(value, bytes)
        message.infer_response.outputs.add(name=name, datatype="BYTES" if is_text else "INT32", shape=[1])
        length = len(value) if is_text else value
        message.infer_response.raw_output_contents.append(struct.pack("<i", length) + (value if is_text else b""))
    return message.SerializeToString()


async def _serve(port: int, grpc_port: int) -> None:
    over_grpc = grpc.aio.server(handlers=[PacedGrpc()])
    over_grpc.add_insecure_port(f"127.0.0.1:{grpc_port}")
    await over_grpc.start()
    server = await asyncio.get_running_loop().create_server(PacedTriton, "127.0.0.1", port, backlog=2048)
    print("ready", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    PacedTriton.num_chunks, PacedTriton.period_s = int(sys.argv[2]), float(sys.argv[3])
    uvloop.run(_serve(int(sys.argv[1]), int(sys.argv[4])))
