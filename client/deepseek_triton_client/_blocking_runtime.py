"""The runtime of the blocking client: sleep and events that block, and the choice of watchdog and transport."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from deepseek_triton_client._core.client_settings import Endpoint, Settings
from deepseek_triton_client._core.runtime import Deadlines, Watchdog
from deepseek_triton_client._core.transport import Transport
from deepseek_triton_client._core.watchdog import NO_WATCHDOG, ThreadWatchdog

T = TypeVar("T")


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that blocks where others would wait for an event loop, and return its result."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    coroutine.close()
    raise RuntimeError("expected a coroutine that blocks, and it waited for an event loop")


class BlockingRuntime:
    """See `Runtime`."""

    async def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def event(self) -> _BlockingEvent:
        return _BlockingEvent()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        threading.Thread(target=run, args=(work,), name="deepseek-triton-client").start()

    def watchdog(self, deadlines: Deadlines, interrupt: Callable[[], None]) -> Watchdog:
        return ThreadWatchdog(deadlines, interrupt) if deadlines.any else NO_WATCHDOG

    def transport(self, endpoint: Endpoint, settings: Settings) -> Transport:
        if endpoint.is_grpc:
            # Imported here because it needs the grpc extra.
            from deepseek_triton_client._grpc.grpc_transport import blocking_transport

            return blocking_transport(endpoint, settings)
        from deepseek_triton_client._http.blocking_socket import BlockingSocket
        from deepseek_triton_client._http.http_transport import HttpTransport

        return HttpTransport(endpoint, settings, BlockingSocket)


class _BlockingEvent:
    """See `RuntimeEvent`. threading.Event is written in Python: an exception such as KeyboardInterrupt that lands
    inside it can leave its lock held for ever."""

    def __init__(self) -> None:
        self._is_set = False
        # One lock for each waiting thread, which waits by acquiring its lock a second time.
        self._waiting_locks: list[threading.Lock] = []

    def set(self) -> None:
        self._is_set = True
        with suppress(IndexError):  # none is left; checked before, another thread could take the last one
            while True:
                self._waiting_locks.pop().release()

    async def wait(self, timeout_s: float | None) -> bool:
        lock = threading.Lock()
        lock.acquire()
        self._waiting_locks.append(lock)
        if not self._is_set:  # checked once `set` can see the lock
            lock.acquire(timeout=-1 if timeout_s is None else min(timeout_s, threading.TIMEOUT_MAX))
        return self._is_set
