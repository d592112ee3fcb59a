"""All four kinds of client, blocking and asyncio, over HTTP and gRPC, with one interface that blocks.

The helpers decide nothing themselves, so that tests through them test the client.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest

from deepseek_triton_client import AsyncClient, AsyncStream, Client, Completion
from deepseek_triton_tools.server.server_process import ServerProcess
from support.servers import url

T = TypeVar("T")

STYLES = ("sync", "async")
SCHEMES = ("http", "grpc")

_PATIENCE_S = 120
"""Seconds, more than anything here takes, after which a test that hangs fails."""


def call(client: Any, verb: str, content: Any = "x", **fields: Any) -> Any:
    """The completion of whichever of generate, stream, chat and stream_chat."""
    if not verb.startswith("stream"):
        return getattr(client, verb)(content, **fields)
    with getattr(client, verb)(content, **fields) as stream:
        return stream.completion()


class Loop:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="async-clients")

    def __enter__(self) -> Loop:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.run(self._loop.shutdown_asyncgens())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start the coroutine as a task. Cancelling the future cancels the task."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.start(coroutine).result(_PATIENCE_S)


@dataclass(frozen=True)
class ClientKind:
    """One kind of client: a protocol, and blocking or asyncio."""

    scheme: str
    style: str
    """Either "sync" or "async"."""
    loop: Loop

    def __str__(self) -> str:
        return f"{self.scheme} {self.style}"

    def url(self, server: ServerProcess) -> str:
        return url(server, self.scheme)

    def client(self, server: ServerProcess | str | Iterable[str], **settings: Any) -> Any:
        """A `Client`, or an AsyncClient whose methods block; use it in a `with` block. `server` may be one URL or
        several."""
        urls = self.url(server) if isinstance(server, ServerProcess) else server
        urls = urls if isinstance(urls, str) else tuple(urls)
        if self.style == "sync":
            return Client(urls, **settings)
        return BlockingView(AsyncClient(urls, **settings), self.loop)


class BlockingView:
    """An AsyncClient whose methods block."""

    def __init__(self, client: AsyncClient, loop: Loop) -> None:
        self.client = client
        self._loop = loop

    def __enter__(self) -> BlockingView:
        return self

    def __exit__(self, *exc: Any) -> None:
        self._loop.run(self.client.__aexit__(*exc))

    def __repr__(self) -> str:
        return repr(self.client)

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self.client, name)
        if not asyncio.iscoroutinefunction(attribute):
            return attribute
        return lambda *args, **kwargs: self._loop.run(attribute(*args, **kwargs))

    def stream(self, *args: Any, **kwargs: Any) -> BlockingStreamView:
        return BlockingStreamView(self.client.stream(*args, **kwargs), self._loop)

    def stream_chat(self, *args: Any, **kwargs: Any) -> BlockingStreamView:
        return BlockingStreamView(self.client.stream_chat(*args, **kwargs), self._loop)

    def generate_many(self, *args: Any, **kwargs: Any) -> Iterator[Completion]:
        answers = self.client.generate_many(*args, **kwargs)
        return self._blocking(answers)

    def _blocking(self, answers: Any) -> Iterator[Completion]:
        try:
            while (answer := self._loop.run(_next(answers))) is not _END:
                yield answer
        finally:
            self._loop.run(answers.aclose())


class BlockingStreamView:
    """An AsyncStream whose methods block."""

    def __init__(self, stream: AsyncStream, loop: Loop) -> None:
        self._stream = stream
        self._loop = loop

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._stream, name)
        if not asyncio.iscoroutinefunction(attribute):
            return attribute
        return lambda: self._loop.run(attribute())

    def __enter__(self) -> BlockingStreamView:
        self._loop.run(self._stream.__aenter__())
        return self

    def __exit__(self, *exc: Any) -> None:
        self._loop.run(self._stream.__aexit__(*exc))

    def __iter__(self) -> BlockingStreamView:
        return self

    def __next__(self) -> Any:
        chunk = self._loop.run(_next(self._stream))
        if chunk is _END:
            raise StopIteration
        return chunk


_END = object()


async def _next(iterator: Any) -> Any:
    return await anext(iterator, _END)


@pytest.fixture(scope="session")
def client_loop() -> Iterator[Loop]:
    with Loop() as loop:
        yield loop


@pytest.fixture(params=[(scheme, face) for scheme in SCHEMES for face in STYLES], ids=" ".join)
def client_kind(request: pytest.FixtureRequest, client_loop: Loop) -> ClientKind:
    return ClientKind(*request.param, client_loop)
