"""Delivery's knowledge of one active request: where it is queued, how soon it has to be served, which steps wait."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum, auto

from deepseek_backend.answer.active_request import ActiveRequest
from deepseek_backend.answer.states import RequestState
from deepseek_backend.delivery.pending_steps import MAX_STEPS, PendingSteps


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
