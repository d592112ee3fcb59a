"""Batches: many requests, answered in order, with a limit on the number of active ones.

The blocking client's run on an event loop in a background thread: a task costs less than a thread, and it can be
cancelled.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Generator, Iterable, Iterator
from typing import Any

from deepseek_triton_client._asyncio_runtime import AsyncioRuntime
from deepseek_triton_client._core.calls import Calls
from deepseek_triton_client._core.checked_request import Request
from deepseek_triton_client._core.client_settings import Settings
from deepseek_triton_client._core.exceptions import DeepseekTritonError
from deepseek_triton_client._core.results import Completion

_MAX_KEPT_FACTOR = 8
"""Most answers kept for an earlier one, as a multiple of the concurrency; beyond it no request is started."""

_END: Any = object()
"""Stands where the next item or answer would, at the end."""

MakeRequest = Callable[[Any], Request]


async def answers_in_order(
    calls: Calls,
    requests: Iterable[Any] | AsyncIterable[Any],
    make_request: MakeRequest,
    *,
    concurrency: int,
    return_errors: bool,
) -> AsyncGenerator[Completion | DeepseekTritonError, None]:
    """Yield the answers in the order of `requests`. The first error is raised, or with `return_errors` yielded."""
    window = _Window(calls, _asynchronous(requests), make_request, concurrency)
    try:
        while (answer := await window.next()) is not None:
            if isinstance(answer, DeepseekTritonError) and not return_errors:
                raise answer
            yield answer
    finally:
        await window.close()


class _Window:
    """The requests that were started and whose answers were not yet taken."""

    def __init__(self, calls: Calls, requests: AsyncIterator[Any], make_request: MakeRequest, concurrency: int) -> None:
        self._calls = calls
        self._requests = requests
        self._make_request = make_request
        self._concurrency = concurrency
        self._answers: deque[asyncio.Task[Completion | DeepseekTritonError]] = deque()
        self._next_item: asyncio.Future[Any] | None = None
        self._exhausted = False

    async def next(self) -> Completion | DeepseekTritonError | None:
        """Return the oldest answer as soon as it is there; None after the last one."""
        while not (self._answers and self._answers[0].done()):
            running = {answer for answer in self._answers if not answer.done()}
            has_room = len(running) < self._concurrency and len(self._answers) < self._concurrency * _MAX_KEPT_FACTOR
            if self._next_item is None and not self._exhausted and has_room:
                self._next_item = asyncio.ensure_future(anext(self._requests, _END))
            waited_for: set[asyncio.Future[Any]] = {*running, *([self._next_item] if self._next_item else [])}
            if not waited_for:
                return None
            await asyncio.wait(waited_for, return_when=asyncio.FIRST_COMPLETED)
            if self._next_item is not None and self._next_item.done():
                item, self._next_item = self._next_item.result(), None
                if item is _END:
                    self._exhausted = True
                else:
                    self._answers.append(asyncio.ensure_future(self._answer(item)))
        return self._answers.popleft().result()

    async def _answer(self, item: Any) -> Completion | DeepseekTritonError:
        try:
            return await self._calls.generate(self._make_request(item))
        except DeepseekTritonError as error:
            return error

    async def close(self) -> None:
        """Cancel the active requests and wait until they have ended."""
        left = [*self._answers, *([self._next_item] if self._next_item else [])]
        for each in left:
            each.cancel()
        await asyncio.gather(*left, return_exceptions=True)


async def _asynchronous(requests: Iterable[Any] | AsyncIterable[Any]) -> AsyncIterator[Any]:
    if isinstance(requests, AsyncIterable):
        async for request in requests:
            yield request
    else:
        for request in requests:
            yield request


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
