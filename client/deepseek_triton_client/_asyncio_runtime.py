"""The runtime of the asynchronous client: sleep, events, sockets and time limits on an asyncio event loop."""

import asyncio
import math
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

from deepseek_triton_client._core.client_settings import Endpoint, Settings
from deepseek_triton_client._core.interfaces import (
    NEVER,
    NO_WATCHDOG,
    Deadlines,
    Due,
    LimitWatchdog,
    Transport,
    Watchdog,
)

if TYPE_CHECKING:
    import ssl

_READ_AHEAD_BYTES = 2**18
"""Number of received bytes kept here for the reader; beyond that the socket is not read."""

# Seconds to handle what arrived while other code blocked the event loop, before a limit counts as run out.
_GRACE_S = 0.02


class AsyncioRuntime:
    """See `Runtime`."""

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def event(self) -> "_AsyncioEvent":
        return _AsyncioEvent()

    def watchdog(self, deadlines: Deadlines, interrupt: Callable[[], None]) -> Watchdog:
        if not deadlines.any:
            return NO_WATCHDOG
        return LoopWatchdog(deadlines, interrupt, asyncio.get_running_loop())

    def transport(self, endpoint: Endpoint, settings: Settings) -> Transport:
        if endpoint.is_grpc:
            from deepseek_triton_client._grpc.grpc_transport import GrpcTransport  # needs the extra grpc

            return GrpcTransport(endpoint, settings, self.transport, is_asyncio=True)
        from deepseek_triton_client._http.openai_transport import http_transport

        return http_transport(endpoint, settings, AsyncioSocket)


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


class AsyncioSocket(asyncio.Protocol):
    """See `Socket`. With `tls` None it is plain TCP. It belongs to the running event loop.

    This is no asyncio.StreamReader, because that one does not tell whether bytes have arrived that nobody asked for. An
    idle connection that received such bytes, for example a proxy's 408, must not serve the next request.
    """

    def __init__(self, host: str, port: int, tls: "ssl.SSLContext | None") -> None:
        self._address = host, port
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._received: list[bytes] = []
        self._num_received = 0
        self._reading_paused = False
        self._writing_paused = False
        self._ended = False
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._interrupted = False

    async def connect(self, timeout_s: float | None) -> None:
        host, port = self._address
        name = None if self._tls is None else host
        opening = self._loop.create_connection(lambda: self, host, port, ssl=self._tls, server_hostname=name)
        try:
            await _within(opening, timeout_s)
            if self._interrupted:
                raise ConnectionAbortedError("interrupted")
        except BaseException:
            self._abort()
            raise

    async def write(self, data: bytes, timeout_s: float | None) -> None:
        """Send the data. `read` tells if the connection closes meanwhile: an answer may have come before."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)
        while self._writing_paused and not self._ended:
            await self._wait(timeout_s)

    async def read(self, timeout_s: float | None) -> bytes:
        while not self._received:
            if self._error is not None:
                raise ConnectionResetError(str(self._error)) from self._error
            if self._ended:
                return b""
            await self._wait(timeout_s)
        data = self._received[0] if len(self._received) == 1 else b"".join(self._received)
        self._received = []
        self._num_received = 0
        if self._reading_paused and self._transport is not None:
            self._reading_paused = False
            self._transport.resume_reading()
        return data

    @property
    def is_quiet(self) -> bool:
        if self._interrupted or self._ended or self._loop is not asyncio.get_running_loop():
            return False
        return not self._received

    def interrupt(self) -> None:
        self._interrupted = True
        with suppress(RuntimeError):  # the loop is closed, and nothing waits any more
            self._loop.call_soon_threadsafe(self._abort)

    async def close(self) -> None:
        self._abort()

    # Methods that asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def data_received(self, data: bytes) -> None:
        self._received.append(data)
        self._num_received += len(data)
        if self._num_received > _READ_AHEAD_BYTES and self._transport is not None and not self._reading_paused:
            self._transport.pause_reading()
            self._reading_paused = True
        self._wake()

    def eof_received(self) -> None:
        self._ended = True
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None  # unusable from here on; some of its methods would fail
        self._ended = True
        self._error = exc
        self._wake()

    def pause_writing(self) -> None:
        self._writing_paused = True

    def resume_writing(self) -> None:
        self._writing_paused = False
        self._wake()

    def _abort(self) -> None:
        """Close at once. A proper end of the TLS session would wait for a peer that may be gone."""
        if self._transport is not None:
            with suppress(RuntimeError):  # the loop is closed, and the connection with it
                self._transport.abort()

    async def _wait(self, timeout_s: float | None) -> None:
        self._waiter = self._loop.create_future()
        try:
            await _within(self._waiter, timeout_s)
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


async def _within(waiting: Any, timeout_s: float | None) -> Any:
    """Wait at most `timeout_s` seconds. Raises TimeoutError. Without a limit no task and no timer are created. This is
    not asyncio.wait_for, which loses a cancellation that comes together with the result before Python 3.12."""
    if timeout_s is None:
        return await waiting
    task = asyncio.ensure_future(waiting)
    try:
        done, _ = await asyncio.wait({task}, timeout=timeout_s)
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # marks the error as seen, if nobody waits for it any more
    if not done:
        raise TimeoutError(f"not within {timeout_s:g} s")
    return task.result()


class LoopWatchdog(LimitWatchdog):
    """Calls `interrupt` once when a limit runs out. Everything here happens on the event loop's thread."""

    def __init__(self, deadlines: Deadlines, interrupt: Callable[[], None], loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(deadlines, interrupt)
        self._loop = loop
        self._due = NEVER
        self._overdue: Due | None = None
        self._wakes_at = math.inf
        self._timer: asyncio.TimerHandle | None = None
        self._set(self._first)

    def stop(self) -> None:
        self._wakes_at = -math.inf  # so that no timer is set again
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set(self, due: Due) -> None:
        self._due = due
        if due[0] < self._wakes_at:  # the timer finds a later moment when it fires, so most tokens do not move it
            self._arm(due[0])

    def _arm(self, moment: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._wakes_at = moment
        # Relative, because the loop has a clock of its own.
        self._timer = self._loop.call_later(max(0.0, moment - time.monotonic()), self._fire)

    def _fire(self) -> None:
        self._timer = None
        self._wakes_at = math.inf
        now = time.monotonic()
        if self._due[0] > now:
            self._set(self._due)
            return
        if self._due != self._overdue:  # The token may have arrived already, delayed by what delayed this timer
            self._overdue = self._due
            self._arm(now + _GRACE_S)
            return
        self.expired = self._due[1]
        self._wakes_at = -math.inf  # interrupts only once
        self._interrupt()
