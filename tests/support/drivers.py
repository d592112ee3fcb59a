"""Two ways to run the same coroutines: blocking, and in an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from deepseek_triton_client._blocking_runtime import run
from deepseek_triton_client._core.client_settings import Endpoint, Settings
from deepseek_triton_client._http.asyncio_socket import AsyncioSocket
from deepseek_triton_client._http.blocking_socket import BlockingSocket
from deepseek_triton_client._http.http_transport import HttpTransport

T = TypeVar("T")

_PATIENCE_S = 60
"""Seconds, more than anything here takes, after which a test that hangs fails."""


class Driver:
    """`run` runs a coroutine to its end; `start` does so in the background."""

    is_asyncio = False

    def __init__(self) -> None:
        self._transports: list[HttpTransport] = []

    def transport(self, url: str, *, model_name: str = "tensorrt_llm", **settings: Any) -> HttpTransport:
        """A transport, which is closed with the driver."""
        endpoint = Endpoint.parse(url)
        made = self._make(endpoint, Settings(endpoints=(endpoint,), model_name=model_name, **settings))
        self._transports.append(made)
        return made

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.start(coroutine).result(_PATIENCE_S)

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        raise NotImplementedError

    def close(self) -> None:
        for each in self._transports:
            self.run(each.close())

    def _make(self, endpoint: Endpoint, settings: Settings) -> HttpTransport:
        raise NotImplementedError


class BlockingDriver(Driver):
    def __init__(self) -> None:
        super().__init__()
        self._threads = ThreadPoolExecutor(64)

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        return self._threads.submit(run, coroutine)

    def close(self) -> None:
        super().close()
        self._threads.shutdown()

    def _make(self, endpoint: Endpoint, settings: Settings) -> HttpTransport:
        return HttpTransport(endpoint, settings, BlockingSocket)


class AsyncioDriver(Driver):
    is_asyncio = True

    def __init__(self) -> None:
        super().__init__()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self) -> None:
        super().close()
        self.run(self._loop.shutdown_asyncgens())
        self.run(self._loop.shutdown_default_executor())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _make(self, endpoint: Endpoint, settings: Settings) -> HttpTransport:
        return HttpTransport(endpoint, settings, AsyncioSocket)


DRIVERS = {"blocking": BlockingDriver, "asyncio": AsyncioDriver}
