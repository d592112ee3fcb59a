"""The runtime of the blocking client: coroutines that never wait, and threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from deepseek_triton_client._core.client_settings import Endpoint, Settings
from deepseek_triton_client._core.runtime import Deadlines, Watchdog
from deepseek_triton_client._core.transport import Transport
from deepseek_triton_client._core.watchdog import NO_WATCHDOG, ThreadWatchdog

T = TypeVar("T")


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that blocks instead of waiting."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    coroutine.close()
    raise RuntimeError("a blocking transport waited for an event loop")


class BlockingRuntime:
    """See `Runtime`."""

    async def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def event(self) -> _BlockingEvent:
        return _BlockingEvent()

    def watchdog(self, deadlines: Deadlines, interrupt: Callable[[], None]) -> Watchdog:
        return ThreadWatchdog(deadlines, interrupt) if deadlines.any else NO_WATCHDOG

    def transport(self, endpoint: Endpoint, settings: Settings) -> Transport:
        if endpoint.is_grpc:
            from deepseek_triton_client._grpc.grpc_transport import (
                blocking_transport,  # here, because it needs the grpc extra
            )

            return blocking_transport(endpoint, settings)
        from deepseek_triton_client._http.http_transport import blocking_transport as http_transport

        return http_transport(endpoint, settings)


class _BlockingEvent:
    """See `Event`. threading's is written in Python: an interrupt inside it can leave it locked for ever."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiting: list[threading.Lock] = []  # one lock each, which its owner waits to get a second time

    def set(self) -> None:
        self._is_set = True
        while self._waiting:
            self._waiting.pop().release()

    async def wait(self, timeout_s: float | None) -> bool:
        own = threading.Lock()
        own.acquire()
        self._waiting.append(own)
        if not self._is_set:  # asked after `set` can know of the lock
            own.acquire(timeout=-1 if timeout_s is None else min(timeout_s, threading.TIMEOUT_MAX))
        return self._is_set
