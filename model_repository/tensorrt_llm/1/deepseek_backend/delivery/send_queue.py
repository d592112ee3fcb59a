"""The send queue: which request is served next.

What one request gained since its last response leaves together in the next one (a lot of text in pieces, see
`answer.sequence_buffer`), so chunks grow with the load and an idle server sends each token by itself, the moment it is
made.

The order is by age: the stream whose text has waited longest goes next. First texts and ends go before all others,
except that after URGENT_IN_A_ROW of them one of the others is served. Streams that have begun share RESPONSES_PER_S:
beyond that, more and smaller chunks tell a reader nothing sooner. They take the processor from the engine and from
Triton's front end, which queues what it can't pass on in time.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from itertools import count
from weakref import ref

from deepseek_backend.delivery.queue_entry import QueueEntry, QueueState, Urgency

RESPONSES_PER_S = 10_000
"""Most responses a second of all streams that have begun together. First texts and ends come on top."""
URGENT_IN_A_ROW = 8
_BURST_S = 0.05
"""Seconds of the allowance that a lull can save up."""
_REST_S = 0.002
"""A thread that waits for the allowance sleeps no shorter than this."""


class SendQueue:
    """Entries that have something to send. Not thread-safe: delivery's lock is held around every call.

    An entry that has moved on may leave its old place in a queue behind; such places are passed over.
    """

    def __init__(self) -> None:
        self.stopping = False
        """Everything leaves now, whatever it may wait for."""
        self._urgent: deque[QueueEntry] = deque()
        self._running: deque[QueueEntry] = deque()
        self._held: list[tuple[float, int, ref[QueueEntry]]] = []
        """A heap by due time, with at most one item for an entry. The references are weak: a request that is over is
        not kept for as long as its text might have waited."""
        self._numbers = count()
        self._num_urgent_in_a_row = 0
        self._allowed_s = 0.0
        """Time at which the next response of a stream that has begun may leave, by time.monotonic()."""

    def put(self, entry: QueueEntry, now: float) -> None:
        """Put the entry where it belongs by now. While a thread serves it nothing is done: that thread looks again."""
        if entry.queue_state is QueueState.SENDING:
            return
        urgency = entry.urgency(now)
        if urgency is Urgency.URGENT and entry.queue_state is not QueueState.URGENT:
            entry.queue_state = QueueState.URGENT
            self._urgent.append(entry)
        elif urgency is Urgency.RUNNING and entry.queue_state in (QueueState.IDLE, QueueState.HELD):
            entry.queue_state = QueueState.RUNNING
            self._running.append(entry)
        elif urgency is Urgency.HELD and entry.queue_state is QueueState.IDLE:
            entry.queue_state = QueueState.HELD
            due_s = entry.due_s
            if due_s < math.inf and not entry.is_listed:
                entry.is_listed = True
                heapq.heappush(self._held, (due_s, next(self._numbers), ref(entry)))

    def pick(self, now: float) -> QueueEntry | None:
        """Take out the entry to be served next; None where none may be served now."""
        self._queue_due(now)
        _drop_stale(self._urgent, QueueState.URGENT)
        _drop_stale(self._running, QueueState.RUNNING)
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
        entry = queue.popleft()
        entry.queue_state = QueueState.SENDING
        return entry

    def has_work(self, now: float) -> bool:
        """Whether `pick` may find something."""
        if self._urgent:
            return True
        return bool(self._running and self._may_run(now)) or bool(self._held and self.stopping)

    def idle_for(self, now: float) -> float | None:
        """Seconds until something that is queued may leave. None: nothing is queued."""
        times = [self._held[0][0]] if self._held else []
        if self._running:
            times.append(self._allowed_s)
        return max(_REST_S, min(times) - now) if times else None

    def _may_run(self, now: float) -> bool:
        return now >= self._allowed_s or self.stopping

    def _queue_due(self, now: float) -> None:
        """Queue the entries that have been held back long enough."""
        while self._held and (self._held[0][0] <= now or self.stopping):
            entry = heapq.heappop(self._held)[2]()
            if entry is None:
                continue
            entry.is_listed = False
            if entry.queue_state is QueueState.HELD:
                entry.queue_state = QueueState.IDLE
                self.put(entry, math.inf if self.stopping else now)


def _drop_stale(queue: deque[QueueEntry], state: QueueState) -> None:
    while queue and queue[0].queue_state is not state:
        queue.popleft()
