"""The intake: what engines have made and nobody has looked at yet.

An engine leaves its steps here and goes on. The sender's threads sort them in, and look at them when the stream's turn
has come: what several iterations made of one sequence is joined before it goes through the split of thinking and into a
response, so that the work for a token falls with the load. Ends, first tokens, answers that a stop string may end and
streams that ask for few chunks are looked at as they come.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TypeAlias

from deepseek_backend.answer.active_request import ActiveRequest
from deepseek_backend.engines.base import Step
from deepseek_backend.engines.generate_request import GenerateRequest
from deepseek_backend.errors import EngineError, one_line

logger = logging.getLogger(__name__)

Steps: TypeAlias = Sequence[tuple[GenerateRequest, Step]]
"""Of one engine iteration."""
TakeStep: TypeAlias = Callable[[ActiveRequest, int, Step, float], bool]
"""Gives the exchange a step of its sequence, at a time.monotonic(); true when there may be something to send."""

NUM_BEHIND = 8
"""Iterations that wait where the sender's threads can't get at Python's lock, for an engine that computes in Python."""
MAX_ITERATIONS = 256
"""More than that may not wait: an engine so far ahead of everybody takes them itself."""
MAX_STEPS = 32
"""Of one sequence that may wait for its stream's turn, or for the end of an answer that is no stream."""


@dataclass(slots=True, eq=False)
class PendingSteps:
    """The steps of one sequence that nobody has looked at."""

    exchange: ActiveRequest
    index: int
    is_watched: bool
    """A stop string may end the answer, so every step is looked at, and at once."""
    steps: list[Step] = field(default_factory=list)
    first_s: float = 0.0
    """By time.monotonic(): when its first step came."""
    last_s: float = 0.0
    """And its last one so far."""
    taken_s: float = 0.0
    """When the last one came that has been taken; 0 while there is none."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while steps are taken, for their order."""

    def take(self) -> list[tuple[float, Step]]:
        """What waits, joined where that changes nothing, and when it came. The first step stays by itself."""
        steps = self.steps[:]
        del self.steps[: len(steps)]  # what came meanwhile stays
        first = [] if self.taken_s else steps[:1]
        taken = [(self.first_s, step) for step in first]
        rest, since_s = steps[len(first) :], self.taken_s or self.first_s
        if not self.is_watched:  # or a step that comes after the stop string would count
            rest = joined(rest)
        share = (self.last_s - since_s) / len(rest) if rest else 0.0
        taken += [(since_s + number * share, step) for number, step in enumerate(rest, start=1)]
        if taken:
            self.taken_s = taken[-1][0]
        return taken

    @property
    def is_due(self) -> bool:
        """Somebody has to look now; otherwise whoever serves the stream next will."""
        exchange, waiting = self.exchange, self.steps[-1:]
        if not waiting:  # another thread was quicker
            return False
        last = waiting[0]
        if last.finish_reason is not None or last.error is not None or self.is_watched or not exchange.has_tokens:
            return True
        return len(self.steps) >= MAX_STEPS or (exchange.may_wait and not exchange.place.in_line)


class StepQueue:
    """Engine iterations in the order in which they came."""

    def __init__(self, take: TakeStep, fail: Callable[[ActiveRequest, EngineError], None]) -> None:
        """`fail`: end an exchange that could not take its step."""
        self._take = take
        self._fail = fail
        self._inflows: dict[GenerateRequest, PendingSteps] = {}
        self._unbegun: dict[GenerateRequest, PendingSteps] = {}
        """Those without a step so far."""
        self._appends: dict[GenerateRequest, Callable[[Step], None]] = {}
        """Where a request's steps go: looked up for each token."""
        self._iterations: deque[tuple[float, Steps]] = deque()
        """With the time.monotonic() at which they came."""
        self._collecting = threading.Lock()

    def expect(self, exchange: ActiveRequest) -> None:
        """There will be steps for its requests."""
        exchange.inflows = [
            PendingSteps(exchange, index, bool(request.sampling.stop))
            for index, request in enumerate(exchange.requests)
        ]
        for request, inflow in zip(exchange.requests, exchange.inflows, strict=True):
            self._inflows[request] = self._unbegun[request] = inflow
            self._appends[request] = inflow.steps.append

    def forget(self, exchange: ActiveRequest) -> None:
        """Whatever still comes for its requests is dropped."""
        for request in exchange.requests:
            for table in (self._inflows, self._unbegun, self._appends):
                table.pop(request, None)
        exchange.inflows = ()  # they point back; no request is to wait for the garbage collector

    def put(self, steps: Steps) -> None:
        """Leave the steps of one iteration."""
        self._iterations.append((time.monotonic(), steps))

    @property
    def pending(self) -> bool:
        """There is something to collect, and nobody is at it."""
        return bool(self._iterations) and not self._collecting.locked()

    @property
    def is_behind(self) -> bool:
        """Nobody has come for them for some iterations."""
        return len(self._iterations) >= NUM_BEHIND

    @property
    def is_full(self) -> bool:
        return len(self._iterations) > MAX_ITERATIONS

    def collect(self, *, wait: bool = False) -> list[ActiveRequest]:
        """Sort in everything that waits; the exchanges that may have something to send now.

        One thread at a time, for the order of the steps. Another one gets nothing; with `wait`, what is left then.
        """
        if not self._collecting.acquire(blocking=wait):
            return []
        try:
            moved = self._sort_in()
        finally:
            self._collecting.release()
        return [inflow.exchange for inflow in moved if self._has_news(inflow)]

    def catch_up(self, exchange: ActiveRequest) -> None:
        """Take the steps that wait for its turn."""
        for inflow in exchange.inflows:
            if inflow.steps:
                self._give(inflow)

    def settle(self, exchange: ActiveRequest) -> None:
        """Take everything that has been made of it so far, also what another thread is about to take."""
        for inflow in exchange.inflows:
            self._give(inflow)

    def _has_news(self, inflow: PendingSteps) -> bool:
        """There may be something to send of what has been sorted in."""
        if inflow.is_due:
            return self._give(inflow)
        exchange = inflow.exchange
        return exchange.call.streaming and not exchange.may_wait and not exchange.place.in_line

    def _sort_in(self) -> list[PendingSteps]:
        """The iterations to their sequences; those that moved."""
        moved: dict[GenerateRequest, None] = {}
        appends, came_s = self._appends, 0.0
        for _ in range(len(self._iterations)):
            came_s, steps = self._iterations.popleft()
            if self._unbegun:
                self._note_first(steps, came_s)
            for request, step in steps:
                try:
                    appends[request](step)
                except KeyError:  # it is over
                    continue
                moved[request] = None
        inflows = [inflow for request in moved if (inflow := self._inflows.get(request)) is not None]
        for inflow in inflows:
            inflow.last_s = came_s
        return inflows

    def _note_first(self, steps: Steps, came_s: float) -> None:
        for request, _ in steps:
            if inflow := self._unbegun.pop(request, None):
                inflow.first_s = inflow.last_s = came_s

    def _give(self, inflow: PendingSteps) -> bool:
        exchange = inflow.exchange
        try:
            with inflow.lock:
                news = False
                for at_s, step in inflow.take():
                    news = self._take(exchange, inflow.index, step, at_s) or news
        except Exception as error:  # of this request alone: the others have their steps to get
            logger.exception("request %r", exchange.client_id)
            self._fail(exchange, EngineError(f"a step could not be taken: {one_line(error)}"))
            return False
        return news


def joined(steps: list[Step]) -> list[Step]:
    """One step that says what these say one after the other; an error stays by itself."""
    if len(steps) < 2:
        return steps
    first, last = steps[0], steps[-1]
    if last.error is not None:
        return [*joined(steps[:-1]), last]
    return [
        Step(
            text="".join([step.text for step in steps]),
            token_ids=list(chain.from_iterable([step.token_ids for step in steps])),
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
            num_input_tokens=last.num_input_tokens or first.num_input_tokens,
            logprobs=list(chain.from_iterable([step.logprobs for step in steps])),
            prompt_logprobs=first.prompt_logprobs,
            num_cached_tokens=last.num_cached_tokens or first.num_cached_tokens,
            perf_metrics=last.perf_metrics,
        )
    ]
