"""The send queue: which request is served next, and what delivery knows of each, steps that nobody has taken too."""

import heapq
import math
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import chain, count
from weakref import ref

from deepseek_backend.active_request import ActiveRequest, RequestState
from deepseek_backend.engines.base import Step

MAX_STEPS = 32
"""Most steps of one sequence that wait for the request's turn, or for the end of an answer that is not streamed."""


@dataclass(slots=True, eq=False)
class PendingSteps:
    """Steps of one sequence, in order. The step queue appends to `steps`; whoever holds `lock` takes them out."""

    index: int
    """Number of the sequence within its request."""
    is_watched: bool
    """A stop string may end the answer, so every step is taken at once and by itself."""
    is_eager: bool
    """Every step is looked at: a stop string may end the answer, or how much waits decides when it is sent."""
    steps: list[Step] = field(default_factory=list)
    is_noted: bool = False
    """Whoever serves the request next finds `steps`. Further ones need no look, as long as they are few."""
    first_s: float = 0.0
    """Time at which the sequence's first step came, by time.monotonic()."""
    last_s: float = 0.0
    """Time at which the sequence's last step so far came, by time.monotonic()."""
    taken_s: float = 0.0
    """Time at which the last step that has been taken came; 0 while none has been taken."""
    last_token_s: float | None = None
    """Time at which the last tokens that have been taken came. None: there were none."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while steps are taken and given to the request, so that they stay in order."""

    def take(self) -> list[tuple[float, Step]]:
        """Take out what waits, each step with the time at which it came.

        Steps are joined where that changes nothing; the sequence's first step stays by itself, because its time is
        measured. Steps that came together share the time between them.
        """
        self.is_noted = False  # first: a step that comes from now on is looked at
        steps = self.steps[:]
        del self.steps[: len(steps)]  # steps that the step queue has appended meanwhile stay
        if self.taken_s and steps and not self.is_watched and steps[-1].error is None:  # nearly always
            self.taken_s = self.last_s
            return [(self.last_s, joined(steps)[0])]
        first = [] if self.taken_s else steps[:1]
        taken = [(self.first_s, step) for step in first]
        rest, since_s = steps[len(first) :], self.taken_s or self.first_s
        if not self.is_watched:  # joined, a step after the one with the stop string would count as well
            rest = joined(rest)
        share = (self.last_s - since_s) / len(rest) if rest else 0.0
        taken += [(since_s + number * share, step) for number, step in enumerate(rest, start=1)]
        if taken:
            self.taken_s = taken[-1][0]
        return taken


def joined(steps: list[Step]) -> list[Step]:
    """Return one step that says what `steps` say one after the other; an error stays a step of its own."""
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
            handover=last.handover,
        )
    ]


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
            # Nearly always there is one sequence, and this is asked for each response.
            is_one = len(self.pending) == 1
            has_steps = self.pending[0].steps if is_one else any(pending.steps for pending in self.pending)
            return Urgency.RUNNING if has_steps else Urgency.NONE
        if not active.has_sent:
            return Urgency.URGENT
        if not self.wants_few_chunks or active.has_unsent_end or now >= self.due_s:
            return Urgency.RUNNING
        interval = active.parsed.stream_interval
        return Urgency.HELD if interval is None or active.num_tokens_waiting < interval else Urgency.RUNNING

    def must_take(self, pending: PendingSteps) -> bool:
        """Whether the sequence's steps have to be taken now; otherwise the thread that serves the request next will."""
        waiting = pending.steps[-1:]
        if not waiting:  # another thread was quicker
            return False
        last = waiting[0]
        if last.finish_reason is not None or last.error is not None or pending.is_watched or not self.has_tokens:
            return True
        return len(pending.steps) >= MAX_STEPS or (self.wants_few_chunks and not self.queue_state.in_line)


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
        while self._held and (self._held[0][0] <= now or self.stopping):  # held back long enough
            held = heapq.heappop(self._held)[2]()
            if held is not None:
                held.is_listed = False
                if held.queue_state is QueueState.HELD:
                    held.queue_state = QueueState.IDLE
                    self.put(held, math.inf if self.stopping else now)
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


def _drop_stale(queue: deque[QueueEntry], state: QueueState) -> None:
    while queue and queue[0].queue_state is not state:
        queue.popleft()
