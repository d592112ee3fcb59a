"""Who is compared. Each asks as its own documentation shows, with the same prompt and fields.

A contender is a context manager over one open client. It gives a function that does one request for so many tokens, and
returns how many chunks with text came: a plain one for threads and greenlets, a coroutine function for asyncio. Its
library is imported here and not above, for each runs in a process that knows no other.
"""

from __future__ import annotations

import itertools
import json
import queue
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from bench.client_load.cases import (
    OURS_GRPC,
    OURS_GRPC_SYNC,
    OURS_HTTP,
    OURS_HTTP_SYNC,
    RAW_GRPC,
    RAW_GRPC_SYNC,
    RAW_HTTP,
    RAW_HTTP_SYNC,
    TRITON_HTTP,
    TRITON_HTTP_AIO,
    TWIN,
    Verb,
)

PROMPT = "Prove that the square root of two is irrational, in one paragraph."

Driver = Literal["asyncio", "threads", "greenlets"]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is asked, and whom."""

    verb: Verb
    model: str
    concurrency: int
    http: str
    """host:port"""
    grpc: str

    @property
    def streaming(self) -> bool:
        return self.verb == "stream"

    @property
    def generate_url(self) -> str:
        path = "generate_stream" if self.streaming else "generate"
        return f"http://{self.http}/v2/models/{self.model}/{path}"

    def body(self, num_tokens: int) -> dict[str, Any]:
        return {
            "text_input": PROMPT,
            "streaming": self.streaming,
            "stream_mode": "delta",
            "sampling_param_max_tokens": num_tokens,
        }


Ask = Callable[[int], int]
"""Of the number of tokens."""
AsyncAsk = Callable[[int], Awaitable[int]]
Opened = AbstractContextManager[Ask] | AbstractAsyncContextManager[AsyncAsk]


def _ours_async(scheme: str) -> Callable[[Asked], Opened]:
    @asynccontextmanager
    async def opened(asked: Asked) -> AsyncIterator[AsyncAsk]:
        from deepseek_triton_client import AsyncClient

        async with AsyncClient(f"{scheme}://{getattr(asked, scheme)}", model_name=asked.model) as client:

            async def stream(num_tokens: int) -> int:
                num_chunks = 0
                async with client.stream(PROMPT, max_tokens=num_tokens) as chunks:
                    async for chunk in chunks:
                        num_chunks += chunk.text != ""
                return num_chunks

            async def generate(num_tokens: int) -> int:
                return int((await client.generate(PROMPT, max_tokens=num_tokens)).text != "")

            yield stream if asked.streaming else generate

    return opened


def _ours(scheme: str) -> Callable[[Asked], Opened]:
    @contextmanager
    def opened(asked: Asked) -> Iterator[Ask]:
        from deepseek_triton_client import Client

        with Client(f"{scheme}://{getattr(asked, scheme)}", model_name=asked.model) as client:

            def stream(num_tokens: int) -> int:
                with client.stream(PROMPT, max_tokens=num_tokens) as chunks:
                    return sum(chunk.text != "" for chunk in chunks)

            def generate(num_tokens: int) -> int:
                return int(client.generate(PROMPT, max_tokens=num_tokens).text != "")

            yield stream if asked.streaming else generate

    return opened


@asynccontextmanager
async def _httpx_async(asked: Asked) -> AsyncIterator[AsyncAsk]:
    import httpx

    async with httpx.AsyncClient(timeout=None) as client:

        async def stream(num_tokens: int) -> int:
            num_chunks = 0
            async with client.stream("POST", asked.generate_url, json=asked.body(num_tokens)) as response:
                response.raise_for_status()
                async for line in response.aiter_lines():
                    num_chunks += _has_text(line)
            return num_chunks

        async def generate(num_tokens: int) -> int:
            response = await client.post(asked.generate_url, json=asked.body(num_tokens))
            return int(response.raise_for_status().json()["text_output"] != "")

        yield stream if asked.streaming else generate


@contextmanager
def _httpx(asked: Asked) -> Iterator[Ask]:
    import httpx

    with httpx.Client(timeout=None) as client:

        def stream(num_tokens: int) -> int:
            with client.stream("POST", asked.generate_url, json=asked.body(num_tokens)) as response:
                response.raise_for_status()
                return sum(_has_text(line) for line in response.iter_lines())

        def generate(num_tokens: int) -> int:
            response = client.post(asked.generate_url, json=asked.body(num_tokens))
            return int(response.raise_for_status().json()["text_output"] != "")

        yield stream if asked.streaming else generate


def _has_text(line: str) -> bool:
    if not line.startswith("data:"):
        return False
    event = json.loads(line[5:])
    if "error" in event:
        raise RuntimeError(event["error"])
    return bool(event["text_output"] != "")


@asynccontextmanager
async def _tritonclient_grpc_aio(asked: Asked) -> AsyncIterator[AsyncAsk]:
    import tritonclient.grpc.aio as triton

    numbers = itertools.count()
    async with triton.InferenceServerClient(asked.grpc) as client:

        async def ask(num_tokens: int) -> int:
            async def requests() -> AsyncIterator[dict[str, Any]]:
                yield {
                    "model_name": asked.model,
                    "inputs": _inputs(triton, asked, num_tokens),
                    "request_id": str(next(numbers)),
                    "enable_empty_final_response": True,
                }

            num_chunks = 0
            async for result, error in client.stream_infer(requests()):
                if error is not None:
                    raise error
                num_chunks += _text_of(result) != ""
            return num_chunks

        yield ask


@contextmanager
def _tritonclient_grpc(asked: Asked) -> Iterator[Ask]:
    """A client object has one stream, so each thread has a client, and keeps its stream open."""
    import tritonclient.grpc as triton

    own = threading.local()
    clients = []

    def connect() -> None:
        own.client = triton.InferenceServerClient(asked.grpc)
        own.results = queue.SimpleQueue()
        results = own.results
        own.client.start_stream(callback=lambda result, error: results.put((result, error)))
        own.numbers = itertools.count()
        clients.append(own.client)

    def ask(num_tokens: int) -> int:
        if not hasattr(own, "client"):
            connect()
        own.client.async_stream_infer(
            asked.model,
            _inputs(triton, asked, num_tokens),
            request_id=str(next(own.numbers)),
            enable_empty_final_response=True,
        )
        num_chunks = 0
        while True:
            result, error = own.results.get()
            if error is not None:
                raise error
            num_chunks += _text_of(result) != ""
            if result.get_response().parameters["triton_final_response"].bool_param:
                return num_chunks

    yield ask
    for client in clients:
        client.stop_stream()
        client.close()


def _text_of(result: Any) -> str:
    """Empty for the final response, which has no outputs."""
    texts = result.as_numpy("text_output")
    return "" if texts is None else str(texts[0].decode())


@contextmanager
def _tritonclient_http(asked: Asked) -> Iterator[Ask]:
    """It waits in greenlets, so that one client serves all."""
    import tritonclient.http as triton

    with triton.InferenceServerClient(asked.http, concurrency=asked.concurrency) as client:

        def ask(num_tokens: int) -> int:
            result = client.infer(TWIN, _inputs(triton, asked, num_tokens, only=_OF_TWIN))
            return int(_text_of(result) != "")

        yield ask


@asynccontextmanager
async def _tritonclient_http_aio(asked: Asked) -> AsyncIterator[AsyncAsk]:
    import tritonclient.http.aio as triton

    async with triton.InferenceServerClient(asked.http, conn_limit=asked.concurrency) as client:

        async def ask(num_tokens: int) -> int:
            result = await client.infer(TWIN, _inputs(triton, asked, num_tokens, only=_OF_TWIN))
            return int(_text_of(result) != "")

        yield ask


_OF_TWIN = ("text_input", "sampling_param_max_tokens")


def _inputs(triton: Any, asked: Asked, num_tokens: int, only: tuple[str, ...] | None = None) -> list[Any]:
    import numpy as np

    arrays: dict[str, tuple[str, Any]] = {
        "text_input": ("BYTES", np.array([PROMPT.encode()], dtype=np.object_)),
        "streaming": ("BOOL", np.array([asked.streaming])),
        "stream_mode": ("BYTES", np.array([b"delta"], dtype=np.object_)),
        "sampling_param_max_tokens": ("INT32", np.array([num_tokens], dtype=np.int32)),
    }
    inputs = []
    for name, (datatype, array) in arrays.items():
        if only is None or name in only:
            inputs.append(triton.InferInput(name, [1], datatype))
            inputs[-1].set_data_from_numpy(array)
    return inputs


CONTENDERS: dict[str, tuple[Driver, Callable[[Asked], Opened]]] = {
    OURS_GRPC: ("asyncio", _ours_async("grpc")),
    RAW_GRPC: ("asyncio", _tritonclient_grpc_aio),
    OURS_HTTP: ("asyncio", _ours_async("http")),
    RAW_HTTP: ("asyncio", _httpx_async),
    OURS_GRPC_SYNC: ("threads", _ours("grpc")),
    RAW_GRPC_SYNC: ("threads", _tritonclient_grpc),
    OURS_HTTP_SYNC: ("threads", _ours("http")),
    RAW_HTTP_SYNC: ("threads", _httpx),
    TRITON_HTTP: ("greenlets", _tritonclient_http),
    TRITON_HTTP_AIO: ("asyncio", _tritonclient_http_aio),
}
"""By name: what it waits on, and itself."""
