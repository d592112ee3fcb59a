"""Batches of the blocking client, which run on an event loop in a background thread.

A task costs less than a thread, and it can be cancelled.
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
from deepseek_triton_client._core.ordered_batch import MakeRequest, answers_in_order
from deepseek_triton_client._core.results import Completion

Answers = AsyncGenerator[Completion | DeepseekTritonError, None]


def answers_in_background(
    settings: Settings, requests: Iterable[Any], make_request: MakeRequest, *, concurrency: int, return_errors: bool
) -> Generator[Completion | DeepseekTritonError, None, None]:
    """Yield the answers in order. `requests` is read on a thread of its own: a slow iterable holds up nothing else."""
    loop = _background_loop()
    reader = _BatchReader(requests)
    batch = _Batch(
        settings,
        lambda calls: answers_in_order(
            calls, reader.items(), make_request, concurrency=concurrency, return_errors=return_errors
        ),
    )
    try:
        while (answer := asyncio.run_coroutine_threadsafe(batch.next(), loop).result()) is not _END:
            yield answer
    finally:
        reader.stop()
        ended = asyncio.run_coroutine_threadsafe(batch.end(), loop)
        # The garbage collector can end a batch on that very thread, which must not wait for itself.
        if not _is_running_here(loop):
            ended.result()


_END: Any = object()

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_owner = 0
"""Process id of the process that runs `_loop`: a forked child has no copy of its thread."""


def _background_loop() -> asyncio.AbstractEventLoop:
    """The event loop of this process, started if need be; it runs until the process ends. It must never end before:
    gRPC has one poller for the process too, and that calls the loops it once knew."""
    global _loop, _owner
    with _lock:
        if _loop is None or _owner != os.getpid():
            loop = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="deepseek-triton-batches", daemon=True).start()
            _loop, _owner = loop, os.getpid()
        return _loop


def _is_running_here(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False


class _Batch:
    """The part of a batch that lives on the event loop; all its methods run there."""

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
            return _END

    async def end(self) -> None:
        if self._running is not None and not self._running.done():
            self._running.cancel()  # KeyboardInterrupt has left it waiting for the next answer
            await asyncio.wait({self._running})
        if self._answers is not None:
            await self._answers.aclose()
        if self._calls is not None:
            await self._calls.close()


class _BatchReader:
    """Reads an iterable on a thread of its own, one item each time one is asked for. Nothing waits for this thread: the
    iterable may block for ever, as a queue or a terminal does."""

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
            if item is _END:
                return
            yield item

    def stop(self) -> None:
        """End the thread, after the item that it may be reading now."""
        self._asked.put(None)

    def _read(self) -> None:
        items: Iterator[Any] | None = None
        while (future := self._asked.get()) is not None:
            item, error = None, None
            try:
                items = iter(self._iterable) if items is None else items
                item = next(items, _END)
            except BaseException as exc:  # the caller gets it, whatever it is
                error = exc
            future.get_loop().call_soon_threadsafe(_settle, future, item, error)


def _settle(future: asyncio.Future[Any], item: Any, error: BaseException | None) -> None:
    if future.done():  # the batch has ended meanwhile
        return
    if error is None:
        future.set_result(item)
    else:
        future.set_exception(error)
