"""The runtime of the asynchronous client: sleep and events on asyncio, and the choice of watchdog and transport."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from deepseek_triton_client._core.client_settings import Endpoint, Settings
from deepseek_triton_client._core.runtime import Deadlines, Watchdog
from deepseek_triton_client._core.transport import Transport
from deepseek_triton_client._core.watchdog import NO_WATCHDOG, LoopWatchdog


class AsyncioRuntime:
    """See `Runtime`."""

    def __init__(self) -> None:
        self._started: set[asyncio.Task[None]] = set()  # because an event loop does not keep its tasks

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def event(self) -> _AsyncioEvent:
        return _AsyncioEvent()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._started.add(task)
        task.add_done_callback(self._started.discard)

    def watchdog(self, deadlines: Deadlines, interrupt: Callable[[], None]) -> Watchdog:
        if not deadlines.any:
            return NO_WATCHDOG
        return LoopWatchdog(deadlines, interrupt, asyncio.get_running_loop())

    def transport(self, endpoint: Endpoint, settings: Settings) -> Transport:
        if endpoint.is_grpc:
            # Imported here because it needs the grpc extra.
            from deepseek_triton_client._grpc.grpc_transport import asyncio_transport

            return asyncio_transport(endpoint, settings)
        from deepseek_triton_client._http.asyncio_socket import AsyncioSocket
        from deepseek_triton_client._http.http_transport import HttpTransport

        return HttpTransport(endpoint, settings, AsyncioSocket)


class _AsyncioEvent:
    """See `RuntimeEvent`. It belongs to the running event loop."""

    def __init__(self) -> None:
        self._happened: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def set(self) -> None:
        if not self._happened.done():
            self._happened.set_result(None)

    async def wait(self, timeout_s: float | None) -> bool:
        await asyncio.wait({self._happened}, timeout=timeout_s)  # asyncio.wait_for would cancel the future
        return self._happened.done()
