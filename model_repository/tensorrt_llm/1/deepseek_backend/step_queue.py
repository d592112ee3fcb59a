"""The step queue: what engines have made and nobody has taken yet, by sequence."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeAlias

from deepseek_backend.engines.base import Step
from deepseek_backend.engines.generate_request import GenerateRequest
from deepseek_backend.errors import EngineError, describe
from deepseek_backend.pending_steps import MAX_STEPS, PendingSteps
from deepseek_backend.send_queue import QueueEntry

logger = logging.getLogger(__name__)

Steps: TypeAlias = Sequence[tuple[GenerateRequest, Step]]
"""The steps of one engine iteration."""
TakeStep: TypeAlias = Callable[[QueueEntry, PendingSteps, Step, float], bool]
"""Gives the request one step of a sequence and the time.monotonic() at which it came. True: there may be something to
send."""

NUM_BEHIND = 8
"""Iterations that wait before the engine's thread pauses: an engine that computes in Python may keep delivery's threads
from Python's lock."""
MAX_ITERATIONS = 256
"""Most iterations that wait. An engine that is further ahead sorts them in itself."""


class StepQueue:
    """Engine iterations in the order in which they came.

    Threads: the engine's thread puts; one thread at a time collects, the one that holds `_collecting`; the tables are
    changed by `expect` and `forget`, from any thread, one dictionary operation at a time.
    """

    def __init__(self, take: TakeStep, fail: Callable[[QueueEntry, EngineError], None]) -> None:
        """`fail` ends a request that could not take its step."""
        self._take = take
        self._fail = fail
        self._pending: dict[GenerateRequest, PendingSteps] = {}
        """Request -> its steps that wait. This is looked up for each token."""
        self._entries: dict[GenerateRequest, QueueEntry] = {}
        self._iterations: deque[tuple[float, Steps]] = deque()
        """(time.monotonic() at which the iteration came, its steps)"""
        self._collecting = threading.Lock()

    def expect(self, entry: QueueEntry) -> None:
        """Accept steps for the entry's requests from now on."""
        for request, pending in zip(entry.active.requests, entry.pending, strict=True):
            self._entries[request] = entry
            self._pending[request] = pending

    def forget(self, entry: QueueEntry) -> None:
        """Drop the steps that still come for the entry's requests."""
        for request in entry.active.requests:
            self._pending.pop(request, None)
            self._entries.pop(request, None)

    def put(self, steps: Steps) -> None:
        """Leave the steps of one iteration."""
        self._iterations.append((time.monotonic(), steps))

    @property
    def has_uncollected(self) -> bool:
        """There is something to collect, and no thread is at it."""
        return bool(self._iterations) and not self._collecting.locked()

    @property
    def is_behind(self) -> bool:
        """Nobody has collected for NUM_BEHIND iterations."""
        return len(self._iterations) >= NUM_BEHIND

    @property
    def is_full(self) -> bool:
        return len(self._iterations) > MAX_ITERATIONS

    def collect(self, *, wait: bool = False) -> list[QueueEntry]:
        """Sort in everything that waits, and return the entries that may have something to send now.

        One thread at a time collects, so that the steps stay in order. A second one gets an empty list; with `wait` it
        waits for the first and collects what is left then.
        """
        if not self._collecting.acquire(blocking=wait):
            return []
        try:
            moved = self._sort_in()
        finally:
            self._collecting.release()
        return [entry for entry, pending in moved if self._has_news(entry, pending)]

    def catch_up(self, entry: QueueEntry) -> None:
        """Take the entry's steps that wait for its turn."""
        for pending in entry.pending:
            if pending.steps:
                self._give(entry, pending)

    def settle(self, entry: QueueEntry) -> None:
        """Take the entry's steps, and wait for those that another thread is taking."""
        for pending in entry.pending:
            self._give(entry, pending)

    def _has_news(self, entry: QueueEntry, pending: PendingSteps) -> bool:
        """Whether what has been sorted in may give the entry something to send."""
        if entry.must_take(pending):
            return self._give(entry, pending)
        return entry.active.parsed.streaming and not entry.wants_few_chunks and not entry.queue_state.in_line

    def _sort_in(self) -> list[tuple[QueueEntry, PendingSteps]]:
        """Move the iterations' steps to their sequences, and return the sequences that somebody has to look at.

        Under load most steps join others that are waiting for their turn already, and cost no more than this loop.
        """
        moved: dict[GenerateRequest, PendingSteps] = {}
        pending_of = self._pending
        for _ in range(len(self._iterations)):
            came_s, steps = self._iterations.popleft()
            for request, step in steps:
                pending = pending_of.get(request)
                if pending is None:  # the request is over
                    continue
                pending.steps.append(step)
                pending.last_s = came_s
                if not pending.is_noted:
                    pending.is_noted = True
                    pending.first_s = pending.first_s or came_s
                elif (
                    step.finish_reason is None
                    and step.error is None
                    and not pending.is_eager
                    and len(pending.steps) < MAX_STEPS
                ):
                    continue
                moved[request] = pending
        return [
            (entry, pending) for request, pending in moved.items() if (entry := self._entries.get(request)) is not None
        ]

    def _give(self, entry: QueueEntry, pending: PendingSteps) -> bool:
        try:
            with pending.lock:
                news = False
                for at_s, step in pending.take():
                    news = self._take(entry, pending, step, at_s) or news
        except Exception as error:  # only this request fails: the others have their steps to get
            logger.exception("request %r", entry.active.client_id)
            self._fail(entry, EngineError(f"a step could not be taken: {describe(error)}"))
            return False
        return news
