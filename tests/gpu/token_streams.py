"""Many streams of tokens at once, from client processes that do little for a response, and the figures of what came.

The same messages go to every server: text_input or input_ids, stream, and sampling_parameters as JSON, which this
project's backend and Triton's vllm_backend both take. A client notes the time of each response and keeps its bytes;
they are read when all streams have ended.
"""

import asyncio
import gc
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal

import grpc
import numpy as np
from bench._harness import children, receive, send
from bench._load import infer_message, why_lost
from bench.streams_load.client import GrpcConnection, HttpConnection
from bench.streams_load.reading import Record

_AGREED_S = 0.2
"""From the last client's word that it is ready to the start."""
_PATIENCE_S = 900.0
"""For one stream: 64 answers of 8,000 tokens take DeepSeek-R1 on eight H200s six minutes."""
_HEARD_S = _PATIENCE_S + 60


@dataclass(frozen=True, kw_only=True)
class Load:
    """`streams` clients at once; each sends its next request when it has the whole answer to the one before."""

    streams: int
    requests: int
    """Of each client."""
    prompt_tokens: int
    output_tokens: int

    @property
    def name(self) -> str:
        return f"{self.streams} x {self.prompt_tokens}/{self.output_tokens}"


@dataclass(frozen=True)
class Prompt:
    """A text, or the token ids where there is none."""

    text: str = ""
    ids: tuple[int, ...] = ()

    def fields(self, num_tokens: int) -> dict[str, Any]:
        sampling = {"max_tokens": num_tokens, "temperature": 0.0, "ignore_eos": True}
        fields = {"text_input": self.text, "stream": True, "sampling_parameters": json.dumps(sampling)}
        return fields | ({"input_ids": list(self.ids)} if self.ids else {})


@dataclass(frozen=True, kw_only=True)
class Target:
    """A model on a server."""

    protocol: Literal["grpc", "http"]
    port: int
    model: str
    host: str = "127.0.0.1"

    def request(self, fields: dict[str, Any]) -> bytes:
        """The message, or the whole HTTP request."""
        if self.protocol == "grpc":
            serialized: bytes = infer_message(self.model, fields).SerializeToString()
            return serialized
        body = json.dumps(fields).encode()
        head = (
            f"POST /v2/models/{self.model}/generate_stream HTTP/1.1\r\nHost: {self.host}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        return head.encode() + body


@dataclass(frozen=True)
class StreamTimes:
    """One request, by time.monotonic_ns(), which all processes of a machine share."""

    began_ns: int
    arrivals_ns: tuple[int, ...]
    """Of the responses that had text."""
    num_tokens: int
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Of one load. Times are milliseconds, quantiles by their percent. An inter-token latency (ITL) is the gap between
    two responses of a stream; TPOT is a stream's time after the first response over its tokens after the first."""

    tokens_per_second: float
    ttft_ms: dict[str, float]
    itl_ms: dict[str, float]
    tpot_ms: dict[str, float]
    responses_per_token: float
    tokens: int
    seconds: float
    errors: tuple[str, ...]


def figures(samples: Sequence[StreamTimes]) -> Figures:
    """A stream whose tokens all came in one response counts, but has no gap between responses and no TPOT.

    :raises ValueError: when no stream had two responses.
    """
    good = [sample for sample in samples if not sample.error and sample.arrivals_ns]
    several = [sample for sample in good if len(sample.arrivals_ns) > 1]
    errors = tuple(sorted({one.error or "no response" for one in samples if one.error or not one.arrivals_ns}))
    if not several:
        raise ValueError(f"no stream had two responses: {errors}")
    seconds = (max(one.arrivals_ns[-1] for one in good) - min(one.began_ns for one in good)) / 1e9
    tokens = sum(one.num_tokens for one in good)
    return Figures(
        tokens_per_second=tokens / seconds,
        ttft_ms=_quantiles([one.arrivals_ns[0] - one.began_ns for one in good]),
        itl_ms=_quantiles(np.concatenate([np.diff(one.arrivals_ns) for one in several])),
        tpot_ms=_quantiles(
            [(one.arrivals_ns[-1] - one.arrivals_ns[0]) / max(1, one.num_tokens - 1) for one in several]
        ),
        responses_per_token=sum(len(one.arrivals_ns) for one in good) / tokens,
        tokens=tokens,
        seconds=seconds,
        errors=errors,
    )


def _quantiles(nanoseconds: Any) -> dict[str, float]:
    percents = (50, 90, 99, 100)
    found = np.percentile(np.asarray(nanoseconds, dtype=np.float64) / 1e6, percents)
    return {f"p{percent}": float(value) for percent, value in zip(percents, found, strict=True)}


class Clients:
    """Client processes that stay for all loads."""

    def __init__(self, pipes: Sequence[Connection]) -> None:
        self._pipes = pipes
        self.cpu_seconds = 0.0
        """Of all client processes, during the last load."""

    def run(self, target: Target, load: Load, prompts: Sequence[Prompt]) -> list[StreamTimes]:
        """Each request has the next of the prompts."""
        turns = [
            [prompts[(turn * load.streams + stream) % len(prompts)] for turn in range(load.requests)]
            for stream in range(load.streams)
        ]
        pipes = self._pipes[: load.streams]
        for index, pipe in enumerate(pipes):
            pipe.send((target, load.output_tokens, turns[index :: len(pipes)]))
        receive(pipes, _HEARD_S)
        send(pipes, time.monotonic_ns() + int(_AGREED_S * 1e9))
        self.cpu_seconds = sum(receive(pipes, _HEARD_S))
        send(pipes, "all have ended")  # reading takes processors, which others may still need to receive
        return [sample for samples in receive(pipes, _HEARD_S) for sample in samples]


@contextmanager
def client_processes(count: int) -> Iterator[Clients]:
    with children(_client, range(count)) as pipes:
        yield Clients(pipes)


def _client(number: int, parent: Connection) -> None:
    asyncio.run(_serve(parent))


async def _serve(parent: Connection) -> None:
    connections: dict[Target, Any] = {}
    while True:
        target, num_tokens, turns = parent.recv()
        if target not in connections:
            connections[target] = (GrpcConnection if target.protocol == "grpc" else HttpConnection)(target)
        requests = [[target.request(prompt.fields(num_tokens)) for prompt in prompts] for prompts in turns]
        gc.collect()
        gc.disable()  # millions of small objects are kept, and looking through them would be most of the work
        parent.send("ready")
        start_s = parent.recv() / 1e9
        cpu_s = time.process_time()
        streams = [_client_stream(connections[target], each, start_s) for each in requests]
        records = [record for each in await asyncio.gather(*streams) for record in each]
        parent.send(time.process_time() - cpu_s)
        parent.recv()
        parent.send([_times(record, num_tokens) for record in records])
        gc.enable()


async def _client_stream(connection: Any, requests: Sequence[bytes], start_s: float) -> list[Record]:
    records = [Record(connection.make_decoder, cumulative=False) for _ in requests]
    await asyncio.sleep(start_s - time.monotonic())
    for request, record in zip(requests, records, strict=True):
        record.opened_ns = time.monotonic_ns()
        try:
            await asyncio.wait_for(connection.stream(request, record), _PATIENCE_S)
        except asyncio.TimeoutError:
            record.lost = f"no end in {_PATIENCE_S:.0f} s"
        except (OSError, grpc.aio.AioRpcError) as error:
            record.lost = why_lost(error)
    return records


def _times(record: Record, num_tokens: int) -> StreamTimes:
    chunks = record.chunks()
    error = record.lost or next((chunk.error for _, chunk in chunks if chunk.error), "")
    arrivals = tuple(arrived_ns for arrived_ns, chunk in chunks if chunk.text)
    return StreamTimes(record.opened_ns, arrivals, num_tokens, error)


def count_tokens(target: Target, prompt: Prompt, num_tokens: int) -> tuple[int, int]:
    """Ask once, over gRPC, and return the prompt's and the answer's number of tokens by the server's own outputs."""
    from tritonclient.grpc import service_pb2_grpc

    message = infer_message(
        target.model, prompt.fields(num_tokens) | {"return_num_input_tokens": True, "return_num_output_tokens": True}
    )
    num_prompt = num_output = 0
    with grpc.insecure_channel(f"{target.host}:{target.port}") as channel:
        for answer in service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(iter([message])):
            if answer.error_message:
                raise RuntimeError(answer.error_message)
            response = answer.infer_response
            for output, raw in zip(response.outputs, response.raw_output_contents, strict=True):
                if output.name == "num_input_tokens":
                    num_prompt = int.from_bytes(raw[:4], "little")
                if output.name == "num_output_tokens":
                    num_output += int.from_bytes(raw[:4], "little")
    return num_prompt, num_output
