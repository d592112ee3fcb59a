"""The way out: steps come in from engines, responses leave to clients.

    engine's thread            delivery's threads
    put_steps ──> StepQueue ──> take: ActiveRequest.add ──> SendQueue ──> ActiveRequest.deliver ──> reply

An answer that comes whole, and a token of one of few streams, leave from the engine's thread: another thread's turn
would cost as much again.

Engines never wait for a client. Triton takes responses faster than a slow client does and keeps them, so such a client
costs the text of its stream.

Cost, as processor time of the whole path from `Service.on_steps` to the reply (tests/bench/path.py): 20 microseconds
for a token that leaves by itself, most of it the response; 1.7 for each of 20 that leave together; 22 for a final
response. Triton's own part of sending comes on top, some 20 microseconds in this process.
"""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeAlias

from deepseek_backend.active_request import ActiveRequest, StepEffect
from deepseek_backend.backend_metrics import BackendMetrics
from deepseek_backend.engines.base import Step
from deepseek_backend.engines.generate_request import GenerateRequest
from deepseek_backend.errors import EngineError, describe
from deepseek_backend.send_queue import MAX_STEPS, PendingSteps, QueueEntry, QueueState, SendQueue, Urgency

logger = logging.getLogger(__name__)

Steps: TypeAlias = Sequence[tuple[GenerateRequest, Step]]
"""The steps of one engine iteration."""
TakeStep: TypeAlias = Callable[[QueueEntry, PendingSteps, Step, float], bool]
"""Gives the request one step of a sequence and the time.monotonic() at which it came. True: there may be something to
send."""

NUM_BEHIND = 8
"""Iterations that wait before the engine's thread pauses: an engine that computes in Python may keep delivery's threads
from Python's lock."""
FEW = 2
"""Steps of an iteration that the engine's thread sends itself."""
SELDOM_S = 0.001
"""It does so where iterations come no oftener: a response takes it 0.1 ms."""
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

    def find(self, request: GenerateRequest) -> tuple[QueueEntry, PendingSteps] | None:
        """Return where the request's steps go; None when it is over."""
        entry, pending = self._entries.get(request), self._pending.get(request)
        return None if entry is None or pending is None else (entry, pending)

    @property
    def is_empty(self) -> bool:
        return not self._iterations

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
        entries = []
        for entry, pending in moved:
            if entry.must_take(pending):
                has_news = self._give(entry, pending)
            else:
                has_news = (
                    entry.active.parsed.streaming and not entry.wants_few_chunks and not entry.queue_state.in_line
                )
            if has_news:
                entries.append(entry)
        return entries

    def catch_up(self, entry: QueueEntry) -> None:
        """Take the entry's steps that wait for its turn."""
        for pending in entry.pending:
            if pending.steps:
                self._give(entry, pending)

    def settle(self, entry: QueueEntry) -> None:
        """Take the entry's steps, and wait for those that another thread is taking."""
        for pending in entry.pending:
            self._give(entry, pending)

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
        except Exception as error:
            # Only this request fails: the others have their steps to get.
            logger.exception("request %r", entry.active.client_id)
            self._fail(entry, EngineError(f"a step could not be taken: {describe(error)}"))
            return False
        return news


logger = logging.getLogger(__name__)

NUM_THREADS = 4
"""A response is a message to the server and its answer, which one thread waits for: many streams need several threads.

Measured on two cores. Gap between two responses of a stream, 256 streams, vLLM at 6 ms an iteration: 100 ms at the
median and 500 ms at the 99th percentile with two threads, 62 and 200 ms with four, 50 and 125 ms with eight, at about
the same tokens a second. On an engine that is always ahead (case flat-200 of tests/bench/streams.py) two and four send
110,000 tokens a second, eight only 75,000. On 16 cores beside an H200, 256 streams: one sends 2,700 responses a second
with a gap of 276 ms at the 99th percentile, two 4,130 with 176 ms, three 3,720 with 168 ms, four 3,560 with 132 ms.
"""
# An engine that is ahead sleeps this long: about 60 microseconds in truth, the kernel's least. A sleep of 0 would be
# over before another thread is awake.
_YIELD_S = 1e-6


class DeliveryOwner(Protocol):
    """Delivery's reports, from its own threads or from within a call of `Delivery`."""

    def abort(self, requests: Sequence[GenerateRequest], *, cause: str) -> None:
        """These sequences have ended here and not in the engine."""

    def fail(self, active: ActiveRequest, error: EngineError) -> None:
        """A step of the request could not be taken, or a response not be sent."""

    def closed(self, active: ActiveRequest) -> None:
        """The request is over: its final response has been sent, or can't be. May come more than once."""


class Delivery:
    """Takes what engines make to the clients: put, flush, stop. Safe from any thread.

    Threads: four of its own serve the requests, each request one at a time. `_wakeup` guards the send queue, the state
    of every entry in it and `_num_resting`; `_entries_lock` guards `_entries` and what the step queue expects. Neither
    is held while a request is asked for more than its urgency, nor while the owner is told something.
    """

    def __init__(self, owner: DeliveryOwner, metrics: BackendMetrics) -> None:
        self._owner = owner
        self._metrics = metrics
        self._entries: dict[ActiveRequest, QueueEntry] = {}
        """Every request that has been put and is not closed."""
        self._entries_lock = threading.Lock()
        self._steps = StepQueue(self._take_step, lambda entry, error: owner.fail(entry.active, error))
        self._queue = SendQueue()
        self._wakeup = threading.Condition()
        self._last_put_s = 0.0
        """Time of the last iteration, by time.monotonic(). The engine's thread owns it."""
        self._num_resting = 0
        """Threads that wait for something to do."""
        self._threads = [
            threading.Thread(target=self._send_all, name=f"sender-{number}", daemon=True)
            for number in range(NUM_THREADS)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def put_steps(self, steps: Steps) -> None:
        """Take the steps of one engine iteration. The engine's thread calls this; it does not wait for a client."""
        is_few = len(steps) <= FEW and self._has_time()
        if is_few or any(step.generation_s is not None for _, step in steps):
            steps = [
                (request, step)
                for request, step in steps
                if (not is_few and step.generation_s is None) or not self._serve_now(request, step)
            ]
            if not steps:
                return
        self._steps.put(steps)
        if self._steps.is_full:
            self._queue_entries(self._steps.collect())
            return
        if self._num_resting:
            with self._wakeup:
                self._wakeup.notify()
        if self._steps.is_behind:
            time.sleep(_YIELD_S)

    def _has_time(self) -> bool:
        """Whether the engine's last iteration came long enough ago to send within this one, and nothing else waits."""
        before_s, self._last_put_s = self._last_put_s, time.monotonic()
        # In this order: a thread that takes iterations rests no more.
        return self._last_put_s - before_s > SELDOM_S and self._steps.is_empty and self._num_resting == NUM_THREADS

    def _serve_now(self, request: GenerateRequest, step: Step) -> bool:
        """Send in the engine's thread. False: the step has to wait, since another thread is at its request or the
        request wants few chunks."""
        found = self._steps.find(request)
        if found is None:
            return True
        entry, pending = found
        with self._wakeup:
            if entry.queue_state is not QueueState.IDLE or entry.wants_few_chunks or pending.steps:
                return False
            entry.queue_state = QueueState.SENDING
        pending.steps.append(step)
        pending.first_s = pending.last_s = time.monotonic()
        self._serve(entry)
        return True

    def put_request(self, active: ActiveRequest) -> None:
        """Take over a request that begins, before the engine gets it, or the news that it has ended or is closed."""
        with self._entries_lock:
            entry = self._entries.get(active)
            if entry is None and not active.closed:
                entry = self._entries[active] = QueueEntry(active)
                self._steps.expect(entry)
        if active.closed:
            self._close(active)
        elif active.ended and entry is not None:
            self._queue_entries([entry])

    def flush(self, active: ActiveRequest) -> None:
        """Give the request everything that has been made for it so far, also what another thread is about to give it.

        Called before a request is ended early, so that its answer has the text up to now.
        """
        self._queue_entries(self._steps.collect(wait=True))
        entry = self._entries.get(active)
        if entry is not None:
            self._steps.settle(entry)

    def stop(self) -> None:
        """Send what is queued, then end the threads."""
        with self._wakeup:
            self._queue.stopping = True
            self._wakeup.notify_all()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()

    def serve_next(self) -> bool:
        """Send what the first in line has. False: there was none.

        Delivery's own threads call this, and tests that start no threads.
        """
        if self._steps.has_uncollected and (entries := self._steps.collect()):
            self._queue_entries(entries)
        with self._wakeup:
            entry = self._queue.pick(time.monotonic())
        if entry is None:
            return False
        self._serve(entry)
        return True

    def _send_all(self) -> None:
        """Serve requests until delivery stops and nothing is left to send."""
        while True:
            try:
                if self.serve_next():
                    continue
            except Exception:
                # Every stream depends on this thread.
                logger.exception("a thread of delivery goes on after")
                continue
            with self._wakeup:
                self._num_resting += 1
                now = time.monotonic()
                is_idle = not self._steps.has_uncollected and not self._queue.has_work(now)
                if is_idle and not self._queue.stopping:
                    self._wakeup.wait(self._queue.idle_for(now))
                    is_idle = False
                self._num_resting -= 1
                if is_idle:
                    return

    def _queue_entries(self, entries: Iterable[QueueEntry]) -> None:
        """Queue the entries that have something to send, and wake a thread."""
        now = time.monotonic()
        with self._wakeup:
            for entry in entries:
                self._queue.put(entry, now)
            if self._num_resting:
                self._wakeup.notify()

    def _serve(self, entry: QueueEntry) -> None:
        try:
            self._steps.catch_up(entry)
            is_final = entry.active.deliver()
        except Exception as error:
            # Triton refuses a response in many ways and none of them has a type of its own. The request is given up,
            # the thread goes on: every other stream depends on it.
            active, failure = entry.active, EngineError(f"a response could not be sent: {describe(error)}")
            logger.exception("a response could not be sent; request %r is given up", active.client_id)
            try:
                active.give_up(failure)
            except Exception:
                logger.exception("nor could the error: request %r stays unanswered", active.client_id)
            self._owner.fail(active, failure)
            self._close(active)
            return
        if is_final:
            self._close(entry.active)
            return
        # First IDLE, then the look: what other threads left for this one while the entry was SENDING is seen here, and
        # what comes from now on they queue themselves.
        entry.queue_state = QueueState.IDLE
        if entry.wants_few_chunks:
            self._steps.catch_up(entry)  # how much there is decides whether it is due
        now = time.monotonic()
        if entry.urgency(now) is not Urgency.NONE:
            with self._wakeup:
                self._queue.put(entry, now)

    def _take_step(self, entry: QueueEntry, pending: PendingSteps, step: Step, at_s: float) -> bool:
        """Give the request a step; true when there may be something to send."""
        active = entry.active
        effect = active.add(pending.index, step, at_s)
        if step.generation_s is not None:
            self._count_whole_answer(entry, len(step.token_ids), at_s, step.generation_s)
        elif step.token_ids:
            before_s, pending.last_token_s = pending.last_token_s, at_s
            self._metrics.tokens(len(step.token_ids), None if before_s is None else at_s - before_s)
            if not entry.has_tokens:
                self._count_first(entry, at_s)
        if effect is StepEffect.NOTHING:
            return False
        if effect is not StepEffect.SEND:
            self._owner.abort([active.requests[pending.index]], cause="stop_string")
        elif step.error is not None and len(active.requests) > 1:
            self._owner.abort(active.requests, cause="error")
        return effect is not StepEffect.ABORT

    def _count_whole_answer(self, entry: QueueEntry, num_tokens: int, at_s: float, generation_s: float) -> None:
        """Count the tokens of an answer that came in one step at `at_s`. Times that are not known are left out."""
        self._metrics.tokens(min(num_tokens, 1), None)
        is_timed = not math.isnan(generation_s)
        if num_tokens > 1:
            self._metrics.tokens(num_tokens - 1, generation_s if is_timed else None)
        if num_tokens and is_timed:
            self._count_first(entry, at_s - generation_s)

    def _count_first(self, entry: QueueEntry, at_s: float) -> None:
        with self._entries_lock:  # of several sequences one has the first
            is_first, entry.has_tokens = not entry.has_tokens, True
        if is_first:
            self._metrics.first_token(at_s - entry.active.arrived_s)

    def _close(self, active: ActiveRequest) -> None:
        with self._entries_lock:
            entry = self._entries.pop(active, None)
            if entry is not None:
                self._steps.forget(entry)
        self._owner.closed(active)
