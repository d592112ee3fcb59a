"""gRPC for the asynchronous client, over grpc.aio."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any
from weakref import WeakSet

import grpc  # type: ignore[import-untyped]
import grpc.aio  # type: ignore[import-untyped]

from deepseek_triton_client._core.exceptions import Cancelled
from deepseek_triton_client._grpc.grpc_channel import END_S, Metadata


class AsyncioChannel:
    """See `GrpcChannel`. It belongs to the event loop of its first call."""

    is_asyncio = True

    def __init__(self, target: str, *, options: list[tuple[str, int]], credentials: Any) -> None:
        self._target = target
        self._options = options
        self._credentials = credentials
        self._channel: Any = None
        self._calls: WeakSet[AsyncioCall] = WeakSet()
        self._closed = False

    def call(self, path: str, request: bytes, *, metadata: Metadata, timeout_s: float | None) -> AsyncioCall:
        if self._closed:
            raise Cancelled("the client is closed")
        if self._channel is None:  # created here, because grpc.aio takes the event loop that is running
            self._channel = self._create()
        responses = self._channel.unary_stream(path)(request, timeout=timeout_s, metadata=metadata)
        call = AsyncioCall(responses)
        self._calls.add(call)
        return call

    async def close(self) -> None:
        self._closed = True
        for call in tuple(self._calls):
            call.cancel()
        if self._channel is not None:
            await self._channel.close()

    def _create(self) -> Any:
        if self._credentials is None:
            return grpc.aio.insecure_channel(self._target, options=self._options)
        return grpc.aio.secure_channel(self._target, self._credentials, options=self._options)


class AsyncioCall:
    """See `GrpcCall`. A call that is no longer referenced is cancelled."""

    def __init__(self, responses: Any) -> None:
        self._responses = responses
        self._loop = asyncio.get_running_loop()
        self._cancelled = False

    async def read(self) -> bytes | None:
        before = _cancellations()
        try:
            data = await self._responses.read()
        except asyncio.CancelledError as exc:
            # grpc.aio raises the same for a cancelled call and a cancelled task, and cancels the call in both cases.
            if self._cancelled and _cancellations() == before:
                raise Cancelled("the request was cancelled") from exc
            raise
        if data is grpc.aio.EOF:
            return None
        assert isinstance(data, bytes), "no deserializer was given"
        return data

    async def end(self) -> None:
        timer = self._loop.call_later(END_S, self.cancel)
        try:
            await self._responses.code()
        finally:
            timer.cancel()

    def cancel(self) -> None:
        self._cancelled = True
        self._responses.cancel()

    def __del__(self) -> None:
        # Without this the call would run on, because grpc.aio keeps a callback for its end, which refers to the call.
        if not self._responses.done():
            with suppress(RuntimeError):  # the loop is closed, and its connections too
                self._loop.call_soon_threadsafe(self._responses.cancel)


def _cancellations() -> int:
    """Number of times that the current task was asked to end. Python 3.10 does not count them."""
    task = asyncio.current_task()
    return task.cancelling() if task is not None and hasattr(task, "cancelling") else 0
