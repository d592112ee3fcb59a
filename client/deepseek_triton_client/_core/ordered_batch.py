"""Batches: many requests, answered in order, with a limit on the number of active ones."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterable
from typing import Any

from deepseek_triton_client._core.calls import Calls
from deepseek_triton_client._core.checked_request import Request
from deepseek_triton_client._core.exceptions import DeepseekTritonError
from deepseek_triton_client._core.results import Completion

_MAX_KEPT_FACTOR = 8
"""Most answers kept for an earlier one, as a multiple of the concurrency; beyond it no request is started."""

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
            if self._next_item is None and not self._exhausted and self._has_room(len(running)):
                self._next_item = asyncio.ensure_future(_next(self._requests))
            waited_for: set[asyncio.Future[Any]] = {*running, *([self._next_item] if self._next_item else [])}
            if not waited_for:
                return None
            await asyncio.wait(waited_for, return_when=asyncio.FIRST_COMPLETED)
            self._start_next_request()
        return self._answers.popleft().result()

    def _has_room(self, num_running: int) -> bool:
        return num_running < self._concurrency and len(self._answers) < self._concurrency * _MAX_KEPT_FACTOR

    def _start_next_request(self) -> None:
        if self._next_item is None or not self._next_item.done():
            return
        item = self._next_item.result()
        self._next_item = None
        if item is _END:
            self._exhausted = True
        else:
            self._answers.append(asyncio.ensure_future(self._answer(item)))

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


_END = object()


async def _next(requests: AsyncIterator[Any]) -> Any:
    try:
        return await requests.__anext__()
    except StopAsyncIteration:
        return _END


async def _asynchronous(requests: Iterable[Any] | AsyncIterable[Any]) -> AsyncIterator[Any]:
    if isinstance(requests, AsyncIterable):
        async for request in requests:
            yield request
    else:
        for request in requests:
            yield request
