"""The sender: the threads that carry what engines made to the clients.

Engines never wait for it. What one request gained since its last response leaves together in the next one (a lot in
pieces, `sequence`), so chunks grow with the load and an idle server sends each token by itself, the moment it is made.
Triton takes responses faster than a slow client does and keeps them, so such a client costs the text of its stream.

The order is by age: the stream whose text has waited longest goes next. First texts and ends go before all others, but
for one of those in URGENT_IN_A_ROW. Streams that are under way share RESPONSES_PER_S: past that, more and smaller
chunks say nothing sooner. They take the processor from whoever makes the tokens and from Triton's front end, which
queues what it can't pass on in time.

Cost, as processor time of the whole path from `Service.on_steps` to the reply (tests/bench/path.py): 20 microseconds
for a token that leaves by itself, most of it the response; 1.7 for each of 20 that leave together; 22 for a final
response. Triton's own part of sending comes on top, some 20 microseconds in this process.
"""

from __future__ import annotations

import heapq
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from itertools import count
from typing import Protocol
from weakref import ref

from deepseek_backend.answer.active_request import ActiveRequest, QueueState, Urgency
from deepseek_backend.errors import EngineError, one_line

logger = logging.getLogger(__name__)

NUM_THREADS = 2
"""A response is a message to the server and its answer, which one thread waits for: two send 1.7 times as many."""
RESPONSES_PER_S = 10_000
"""Of streams under way, all together. First texts and ends come on top."""
URGENT_IN_A_ROW = 8
_BURST_S = 0.05
"""Of the allowance that a lull has saved up."""
_REST_S = 0.002
"""A thread that waits for its allowance sleeps no shorter."""


class StepSource(Protocol):
    """Where news come from."""

    @property
    def pending(self) -> bool:
        """There is something to collect."""

    def collect(self) -> list[ActiveRequest]:
        """Sort it in; the exchanges that may have something to send now. Safe from any thread."""

    def catch_up(self, exchange: ActiveRequest) -> None:
        """Give it what has waited for its turn."""


class Sender:
    """Delivers exchanges, each by one thread at a time."""

    def __init__(
        self, source: StepSource, on_closed: Callable[[ActiveRequest], None], on_broken: Callable[[ActiveRequest], None]
    ) -> None:
        """`on_closed` follows every final response; `on_broken` a response that could not be sent."""
        self._source = source
        self._on_closed = on_closed
        self._on_broken = on_broken
        self._wakeup = threading.Condition()
        # All below under its lock. An exchange that has moved on may leave an entry behind, which is passed over.
        self._urgent: deque[ActiveRequest] = deque()
        self._running: deque[ActiveRequest] = deque()
        self._held: list[tuple[float, int, ref[ActiveRequest]]] = []
        """A heap by when they are due, with one entry of an exchange, whether or not it is still held. Weak: a request
        that is over is not kept for as long as its text might have waited."""
        self._numbers = count()
        self._num_urgent_in_a_row = 0
        self._allowed_s = 0.0
        """When the next response of a stream under way may leave."""
        self._num_resting = 0
        self._stopping = False
        self._threads = [
            threading.Thread(target=self._run, name=f"sender-{number}", daemon=True) for number in range(NUM_THREADS)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def wake(self) -> None:
        """The source has something. Returns at once; safe from any thread."""
        if self._num_resting:
            with self._wakeup:
                self._wakeup.notify()

    def notify(self, exchanges: Iterable[ActiveRequest]) -> None:
        """These may have something to send. Returns at once; safe from any thread."""
        now = time.monotonic()
        with self._wakeup:
            for exchange in exchanges:
                self._put(exchange, now)
            if self._num_resting:
                self._wakeup.notify()

    def stop(self) -> None:
        """Send what is queued, then end the threads."""
        with self._wakeup:
            self._stopping = True
            self._wakeup.notify_all()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()

    def deliver_next(self) -> bool:
        """Send what the first in line has; False when there was none. The sender's threads only, or with none."""
        self._collect()
        with self._wakeup:
            exchange = self._pick(time.monotonic())
        if exchange is None:
            return False
        self._deliver(exchange)
        return True

    def _run(self) -> None:
        while True:
            try:
                served = self.deliver_next()
            except Exception:  # every stream depends on this thread
                logger.exception("the sender goes on after")
                continue
            if not served and not self._rest():
                return

    def _collect(self) -> None:
        if self._source.pending and (exchanges := self._source.collect()):
            self.notify(exchanges)

    def _rest(self) -> bool:
        """Wait until there may be something to do; False when there never will be."""
        with self._wakeup:
            self._num_resting += 1
            now = time.monotonic()
            idle = not self._has_work(now)
            if idle and not self._stopping:
                self._wakeup.wait(self._idle_for(now))
                idle = False
            self._num_resting -= 1
            return not idle

    def _has_work(self, now: float) -> bool:
        if self._source.pending or self._urgent:
            return True
        return bool(self._running and self._may_run(now)) or bool(self._held and self._stopping)

    def _idle_for(self, now: float) -> float | None:
        """Seconds until something that is here already may leave."""
        times = [self._held[0][0]] if self._held else []
        if self._running:
            times.append(self._allowed_s)
        return max(_REST_S, min(times) - now) if times else None

    def _may_run(self, now: float) -> bool:
        return now >= self._allowed_s or self._stopping

    def _put(self, exchange: ActiveRequest, now: float) -> None:
        """Into the queue it belongs in by now. The thread that serves it looks again by itself."""
        if exchange.place is QueueState.SENDING:
            return
        turn = exchange.turn(now)
        if turn is Urgency.URGENT and exchange.place is not QueueState.URGENT:
            exchange.place = QueueState.URGENT
            self._urgent.append(exchange)
        elif turn is Urgency.RUNNING and exchange.place in (QueueState.IDLE, QueueState.HELD):
            exchange.place = QueueState.RUNNING
            self._running.append(exchange)
        elif turn is Urgency.HELD and exchange.place is QueueState.IDLE:
            exchange.place = QueueState.HELD
            if exchange.due_s < math.inf and not exchange.is_listed:
                exchange.is_listed = True
                heapq.heappush(self._held, (exchange.due_s, next(self._numbers), ref(exchange)))

    def _pick(self, now: float) -> ActiveRequest | None:
        """The next to be served, taken out of its queue."""
        self._let_go(now)
        _drop_left(self._urgent, QueueState.URGENT)
        _drop_left(self._running, QueueState.RUNNING)
        queue = self._urgent
        if self._running and self._may_run(now) and (not queue or self._num_urgent_in_a_row >= URGENT_IN_A_ROW):
            queue = self._running
        if not queue:
            return None
        if queue is self._urgent:
            self._num_urgent_in_a_row += 1
        else:
            self._num_urgent_in_a_row = 0
            self._allowed_s = max(self._allowed_s, now - _BURST_S) + 1 / RESPONSES_PER_S
        exchange = queue.popleft()
        exchange.place = QueueState.SENDING
        return exchange

    def _let_go(self, now: float) -> None:
        """Into the queues with what has been held back long enough."""
        while self._held and (self._held[0][0] <= now or self._stopping):
            exchange = heapq.heappop(self._held)[2]()
            if exchange is None:
                continue
            exchange.is_listed = False
            if exchange.place is QueueState.HELD:
                exchange.place = QueueState.IDLE
                self._put(exchange, math.inf if self._stopping else now)

    def _deliver(self, exchange: ActiveRequest) -> None:
        try:
            self._source.catch_up(exchange)
            closed = exchange.deliver()
        except Exception as error:
            # Triton refuses a response in many ways and none of them has a type of its own. The request is given up,
            # the thread goes on: every other stream depends on it.
            logger.exception("a response could not be sent; request %r is given up", exchange.client_id)
            self._give_up(exchange, EngineError(f"a response could not be sent: {one_line(error)}"))
            return
        if closed:
            self._on_closed(exchange)
            return
        # In this order: what others left for this thread because it was here they had left before it says it is gone.
        exchange.place = QueueState.IDLE
        if exchange.may_wait:
            self._source.catch_up(exchange)  # how much there is decides whether it is due
        now = time.monotonic()
        if exchange.turn(now) is not Urgency.NONE:
            with self._wakeup:
                self._put(exchange, now)

    def _give_up(self, exchange: ActiveRequest, error: EngineError) -> None:
        try:
            exchange.give_up(error)
        except Exception:
            logger.exception("nor could the error: request %r stays unanswered", exchange.client_id)
        self._on_broken(exchange)


def _drop_left(queue: deque[ActiveRequest], place: QueueState) -> None:
    while queue and queue[0].place is not place:
        queue.popleft()
