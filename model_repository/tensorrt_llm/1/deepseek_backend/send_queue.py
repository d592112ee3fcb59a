"""The send queue: which request is served next, and what delivery knows of each."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from enum import Enum, auto
from itertools import count
from weakref import ref

from deepseek_backend.active_request import ActiveRequest
from deepseek_backend.pending_steps import MAX_STEPS, PendingSteps
from deepseek_backend.states import RequestState


class Urgency(Enum):
    """How soon a request has to be served."""

    NONE = auto()
    """There is nothing to send."""
    HELD = auto()
    """The waiting text may wait for more, until `QueueEntry.due_s`: the request asks for few chunks."""
    RUNNING = auto()
    """There is something to send of a stream that has begun."""
    URGENT = auto()
    """There is a first text or an end: somebody looks at an empty screen, or holds resources for nothing."""


class QueueState(Enum):
    """Where the send queue has a request."""

    IDLE = auto()
    HELD = auto()
    RUNNING = auto()
    URGENT = auto()
    SENDING = auto()
    """One of delivery's threads is serving it."""

    def __init__(self, number: int) -> None:
        self.in_line = self.name not in ("IDLE", "HELD")
        """The request will be served without anybody putting it into a queue."""


class QueueEntry:
    """One active request in delivery.

    Threads: delivery's lock guards `queue_state` and `is_listed`, with one exception: the thread that has served a
    request sets `queue_state` from SENDING to IDLE without it. `pending` is the step queue's.
    """

    __slots__ = ("__weakref__", "active", "has_tokens", "is_listed", "pending", "queue_state", "wants_few_chunks")

    def __init__(self, active: ActiveRequest) -> None:
        self.active = active
        self.queue_state = QueueState.IDLE
        self.is_listed = False
        """The entry is in the send queue's heap of held requests, whether or not it is still held."""
        self.wants_few_chunks = active.parsed.wants_few_chunks
        self.has_tokens = False
        """The request's first token has been taken."""
        is_watched = bool(active.parsed.sampling.stop)
        self.pending: Sequence[PendingSteps] = [
            PendingSteps(index, is_watched, is_watched or self.wants_few_chunks)
            for index, request in enumerate(active.requests)
        ]
        """The steps of each sequence that wait to be taken."""

    @property
    def due_s(self) -> float:
        """Time until which text may be held back, by time.monotonic(). Infinite: nothing waits, or no time is set."""
        interval_ms = self.active.parsed.stream_interval_ms
        return math.inf if interval_ms is None else self.active.waiting_since_s + interval_ms / 1e3

    def urgency(self, now: float) -> Urgency:
        """How soon the request has to be served.

        It is read without the request's lock: a thread that changes something of the request asks again afterwards.
        """
        active = self.active
        state = active.state
        if state is RequestState.CLOSED:
            return Urgency.NONE
        if state is RequestState.ENDED:
            return Urgency.RUNNING if active.has_sent and active.is_cut() else Urgency.URGENT
        if not active.parsed.streaming:
            return Urgency.NONE
        if not active.has_news():
            return Urgency.RUNNING if self._has_steps() else Urgency.NONE
        if not active.has_sent:
            return Urgency.URGENT
        return Urgency.HELD if self._is_held(now) else Urgency.RUNNING

    def must_take(self, pending: PendingSteps) -> bool:
        """Whether the sequence's steps have to be taken now; otherwise the thread that serves the request next will."""
        waiting = pending.steps[-1:]
        if not waiting:  # another thread was quicker
            return False
        last = waiting[0]
        if last.finish_reason is not None or last.error is not None or pending.is_watched or not self.has_tokens:
            return True
        return len(pending.steps) >= MAX_STEPS or (self.wants_few_chunks and not self.queue_state.in_line)

    def _has_steps(self) -> bool:
        if len(self.pending) == 1:  # nearly always
            return bool(self.pending[0].steps)
        return any(pending.steps for pending in self.pending)

    def _is_held(self, now: float) -> bool:
        active = self.active
        if not self.wants_few_chunks or active.has_unsent_end or now >= self.due_s:
            return False
        interval = active.parsed.stream_interval
        return interval is None or active.num_tokens_waiting < interval


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
