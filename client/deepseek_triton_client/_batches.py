"""Batches: many requests, answered in order, with a limit on the number of active ones.

The blocking client's run on an event loop in a background thread: a task costs less than a thread, and it can be
cancelled.
"""

import asyncio
import os
import queue
import threading
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Generator, Iterable, Iterator
from concurrent.futures import Future
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

    async def answer(item: Any) -> Completion | DeepseekTritonError:
        try:
            return await calls.generate(make_request(item))
        except DeepseekTritonError as error:
            return error

    items = aiter(requests) if isinstance(requests, AsyncIterable) else _asynchronous(requests)
    answers: deque[asyncio.Task[Completion | DeepseekTritonError]] = deque()
    next_item: asyncio.Future[Any] | None = None
    is_exhausted = False
    try:
        while True:
            if answers and answers[0].done():
                oldest = answers.popleft().result()
                if isinstance(oldest, DeepseekTritonError) and not return_errors:
                    raise oldest
                yield oldest
                continue
            waited_for: set[asyncio.Future[Any]] = {each for each in answers if not each.done()}
            has_room = len(waited_for) < concurrency and len(answers) < concurrency * _MAX_KEPT_FACTOR
            if next_item is None and not is_exhausted and has_room:
                next_item = asyncio.ensure_future(anext(items, _END))
            if next_item is not None:
                waited_for.add(next_item)
            if not waited_for:
                return
            await asyncio.wait(waited_for, return_when=asyncio.FIRST_COMPLETED)
            if next_item is not None and next_item.done():
                item, next_item = next_item.result(), None
                if item is _END:
                    is_exhausted = True
                else:
                    answers.append(asyncio.ensure_future(answer(item)))
    finally:
        left = [*answers, *([next_item] if next_item else [])]
        for each in left:
            each.cancel()
        await asyncio.gather(*left, return_exceptions=True)


async def _asynchronous(requests: Iterable[Any]) -> AsyncIterator[Any]:
    for request in requests:
        yield request


def answers_in_background(
    settings: Settings, requests: Iterable[Any], make_request: MakeRequest, *, concurrency: int, return_errors: bool
) -> Generator[Completion | DeepseekTritonError, None, None]:
    """Yield the answers in order. `requests` is read on a thread of its own: a slow iterable holds up nothing else."""
    loop = _background_loop()
    reader = _BatchReader(requests)
    calls = Calls(settings, AsyncioRuntime())
    answers = answers_in_order(
        calls, reader.items(), make_request, concurrency=concurrency, return_errors=return_errors
    )
    running: asyncio.Task[Any] | None = None

    async def next_answer() -> Any:
        nonlocal running
        running = asyncio.current_task()
        return await anext(answers, _END)

    async def end() -> None:
        if running is not None and not running.done():
            running.cancel()  # KeyboardInterrupt has left it waiting for the next answer
            await asyncio.wait({running})
        await answers.aclose()
        await calls.close()

    try:
        while (answer := asyncio.run_coroutine_threadsafe(next_answer(), loop).result()) is not _END:
            yield answer
    finally:
        reader.stop()
        ended = asyncio.run_coroutine_threadsafe(end(), loop)
        # The garbage collector can end a batch on that very thread, which must not wait for itself.
        if asyncio._get_running_loop() is not loop:
            ended.result()


_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
# Process id of the process that runs `_loop`: a forked child has no copy of its thread.
_owner = 0


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


class _BatchReader:
    """Reads an iterable on a thread of its own, one item each time one is asked for. Nothing waits for this thread: the
    iterable may block for ever, as a queue or a terminal does."""

    def __init__(self, iterable: Iterable[Any]) -> None:
        self._iterable = iterable
        self._asked: queue.SimpleQueue[Future[Any] | None] = queue.SimpleQueue()

    async def items(self) -> AsyncIterator[Any]:
        threading.Thread(target=self._read, name="deepseek-triton-requests", daemon=True).start()
        while True:
            future: Future[Any] = Future()
            self._asked.put(future)
            item = await asyncio.wrap_future(future)
            if item is _END:
                return
            yield item

    def stop(self) -> None:
        """End the thread, after the item that it may be reading now."""
        self._asked.put(None)

    def _read(self) -> None:
        items: Iterator[Any] | None = None
        while (future := self._asked.get()) is not None:
            if not future.set_running_or_notify_cancel():
                continue  # the batch has ended meanwhile
            try:
                items = iter(self._iterable) if items is None else items
                future.set_result(next(items, _END))
            except BaseException as exc:  # the caller gets it, whatever it is
                future.set_exception(exc)
