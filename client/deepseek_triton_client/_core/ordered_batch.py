"""Many requests, in order, with a bound on how many are under way."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterable
from typing import Any

from deepseek_triton_client._core.calls import Calls
from deepseek_triton_client._core.checked_request import Request
from deepseek_triton_client._core.exceptions import DeepseekTritonError, InvalidRequest
from deepseek_triton_client._core.results import Completion

_AHEAD = 8
"""Answers that wait for an earlier one are kept, up to so many times the concurrency; then no request is started."""

Make = Callable[[Any], Request]


async def in_order(
    calls: Calls,
    requests: Iterable[Any] | AsyncIterable[Any],
    make: Make,
    *,
    concurrency: int,
    return_errors: bool,
) -> AsyncGenerator[Completion | DeepseekTritonError, None]:
    """The answers in the order of `requests`. Raises the first error unless they are to be returned."""
    if isinstance(concurrency, bool) or not isinstance(concurrency, int) or concurrency < 1:
        raise InvalidRequest(f"concurrency: expected an integer of at least 1, got {concurrency!r}")
    window = _Window(calls, _asynchronous(requests), make, concurrency)
    try:
        while (answer := await window.next()) is not None:
            if isinstance(answer, DeepseekTritonError) and not return_errors:
                raise answer
            yield answer
    finally:
        await window.close()


class _Window:
    """The requests that have been read and whose answers have not left."""

    def __init__(self, calls: Calls, requests: AsyncIterator[Any], make: Make, concurrency: int) -> None:
        self._calls = calls
        self._requests = requests
        self._make = make
        self._concurrency = concurrency
        self._answers: deque[asyncio.Task[Completion | DeepseekTritonError]] = deque()
        self._reading: asyncio.Future[Any] | None = None
        self._exhausted = False

    async def next(self) -> Completion | DeepseekTritonError | None:
        """The oldest answer, as soon as it is there; None after the last one."""
        while not (self._answers and self._answers[0].done()):
            running = {answer for answer in self._answers if not answer.done()}
            if self._reading is None and not self._exhausted and self._has_room(len(running)):
                self._reading = asyncio.ensure_future(_next(self._requests))
            waited_for: set[asyncio.Future[Any]] = {*running, *([self._reading] if self._reading else [])}
            if not waited_for:
                return None
            await asyncio.wait(waited_for, return_when=asyncio.FIRST_COMPLETED)
            self._start_what_was_read()
        return self._answers.popleft().result()

    def _has_room(self, num_running: int) -> bool:
        return num_running < self._concurrency and len(self._answers) < self._concurrency * _AHEAD

    def _start_what_was_read(self) -> None:
        if self._reading is None or not self._reading.done():
            return
        found = self._reading.result()
        self._reading = None
        if found is _NO_MORE:
            self._exhausted = True
        else:
            self._answers.append(asyncio.ensure_future(self._answer(found)))

    async def _answer(self, item: Any) -> Completion | DeepseekTritonError:
        try:
            return await self._calls.generate(self._make(item))
        except DeepseekTritonError as error:
            return error

    async def close(self) -> None:
        """Cancels what is under way, and waits until it is."""
        left = [*self._answers, *([self._reading] if self._reading else [])]
        for each in left:
            each.cancel()
        await asyncio.gather(*left, return_exceptions=True)


_NO_MORE = object()


async def _next(requests: AsyncIterator[Any]) -> Any:
    try:
        return await requests.__anext__()
    except StopAsyncIteration:
        return _NO_MORE


async def _asynchronous(requests: Iterable[Any] | AsyncIterable[Any]) -> AsyncIterator[Any]:
    if isinstance(requests, AsyncIterable):
        async for request in requests:
            yield request
    else:
        for request in requests:
            yield request
