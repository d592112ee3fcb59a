"""Batches of the blocking client: `_batch.in_order` on an event loop in another thread.

Tasks cost less than a thread each, and can be cancelled.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterable, Iterator
from typing import Any

from deepseek_triton_client._asyncio_runtime import AsyncioRuntime
from deepseek_triton_client._core.calls import Calls
from deepseek_triton_client._core.client_settings import Settings
from deepseek_triton_client._core.exceptions import DeepseekTritonError
from deepseek_triton_client._core.ordered_batch import Make, in_order
from deepseek_triton_client._core.results import Completion

Answers = AsyncGenerator[Completion | DeepseekTritonError, None]


def in_background(
    settings: Settings, requests: Iterable[Any], make: Make, *, concurrency: int, return_errors: bool
) -> Generator[Completion | DeepseekTritonError, None, None]:
    """The answers in the order of `requests`, which is read on a thread of its own: a slow one must hold up nothing."""
    loop = _the_loop()
    reader = _BatchReader(requests)
    batch = _Batch(
        settings,
        lambda calls: in_order(calls, reader.items(), make, concurrency=concurrency, return_errors=return_errors),
    )
    try:
        while (answer := asyncio.run_coroutine_threadsafe(batch.next(), loop).result()) is not _NO_MORE:
            yield answer
    finally:
        reader.stop()
        ended = asyncio.run_coroutine_threadsafe(batch.end(), loop)
        if not _runs_here(loop):  # as where the garbage collector ends a batch on that very thread
            ended.result()


_NO_MORE: Any = object()

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_owner = 0
"""The process that `_loop` runs in: a fork leaves its thread behind."""


def _the_loop() -> asyncio.AbstractEventLoop:
    """One for the process and until its end: gRPC's poller is one for the process too, and calls loops that ended."""
    global _loop, _owner
    with _lock:
        if _loop is None or _owner != os.getpid():
            loop = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="deepseek-triton-batches", daemon=True).start()
            _loop, _owner = loop, os.getpid()
        return _loop


def _runs_here(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False


class _Batch:
    """What of it lives on the loop."""

    def __init__(self, settings: Settings, begin: Callable[[Calls], Answers]) -> None:
        self._settings = settings
        self._begin = begin
        self._calls: Calls | None = None
        self._answers: Answers | None = None
        self._running: asyncio.Task[Any] | None = None

    async def next(self) -> Any:
        self._running = asyncio.current_task()
        if self._answers is None:
            self._calls = Calls(self._settings, AsyncioRuntime())
            self._answers = self._begin(self._calls)
        try:
            return await self._answers.__anext__()
        except StopAsyncIteration:
            return _NO_MORE

    async def end(self) -> None:
        if self._running is not None and not self._running.done():
            self._running.cancel()  # an interrupt has left it waiting for the next answer
            await asyncio.wait({self._running})
        if self._answers is not None:
            await self._answers.aclose()
        if self._calls is not None:
            await self._calls.close()


class _BatchReader:
    """Reads an iterable as it is asked to. Its thread is waited for by nobody: an iterable may block for ever, as a
    queue or a terminal does."""

    def __init__(self, iterable: Iterable[Any]) -> None:
        self._iterable = iterable
        self._asked: queue.SimpleQueue[asyncio.Future[Any] | None] = queue.SimpleQueue()

    async def items(self) -> AsyncIterator[Any]:
        threading.Thread(target=self._read, name="deepseek-triton-requests", daemon=True).start()
        loop = asyncio.get_running_loop()
        while True:
            future: asyncio.Future[Any] = loop.create_future()
            self._asked.put(future)
            item = await future
            if item is _NO_MORE:
                return
            yield item

    def stop(self) -> None:
        """After the item that is being read, if one is."""
        self._asked.put(None)

    def _read(self) -> None:
        items: Iterator[Any] | None = None
        while (future := self._asked.get()) is not None:
            item, error = None, None
            try:
                items = iter(self._iterable) if items is None else items
                item = next(items, _NO_MORE)
            except BaseException as exc:  # whatever it is, it belongs to the caller
                error = exc
            future.get_loop().call_soon_threadsafe(_settle, future, item, error)


def _settle(future: asyncio.Future[Any], item: Any, error: BaseException | None) -> None:
    if future.done():  # nobody waits any more
        return
    if error is None:
        future.set_result(item)
    else:
        future.set_exception(error)
