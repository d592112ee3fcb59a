"""The way out: steps come in from engines, responses leave to clients.

    engine's thread            delivery's threads
    put_steps ──> StepQueue ──> take: ActiveRequest.add ──> SendQueue ──> ActiveRequest.deliver ──> reply

Engines never wait for a client. Triton takes responses faster than a slow client does and keeps them, so such a client
costs the text of its stream.

Cost, as processor time of the whole path from `Service.on_steps` to the reply (tests/bench/path.py): 20 microseconds
for a token that leaves by itself, most of it the response; 1.7 for each of 20 that leave together; 22 for a final
response. Triton's own part of sending comes on top, some 20 microseconds in this process.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Protocol

from deepseek_backend.active_request import ActiveRequest, StepEffect
from deepseek_backend.backend_metrics import BackendMetrics
from deepseek_backend.engines.base import Step
from deepseek_backend.engines.generate_request import GenerateRequest
from deepseek_backend.errors import EngineError, describe
from deepseek_backend.pending_steps import PendingSteps
from deepseek_backend.send_queue import QueueEntry, QueueState, SendQueue, Urgency
from deepseek_backend.step_queue import StepQueue, Steps

logger = logging.getLogger(__name__)

NUM_THREADS = 4
"""A response is a message to the server and its answer, which one thread waits for: many streams need several threads.

Measured on two cores. Gap between two responses of a stream, 256 streams, vLLM at 6 ms an iteration: 100 ms at the
median and 500 ms at the 99th percentile with two threads, 62 and 200 ms with four, 50 and 125 ms with eight, at about
the same tokens a second. On an engine that is always ahead (case flat-200 of tests/bench/streams.py) two and four send
110,000 tokens a second, eight only 75,000. On 16 cores beside an H200 Python's lock is the limit, 256 streams: two send
4,150 responses a second with a gap of 207 ms at the 99th percentile, four 3,630 with 173 ms, eight 2,810 with 338 ms.
"""
_YIELD_S = 1e-6
"""An engine that is ahead sleeps this long: about 60 microseconds in truth, the kernel's least. A sleep of 0 would be
over before another thread is awake."""


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
        self._num_resting = 0
        """Threads that wait for something to do."""
        self._threads = [
            threading.Thread(target=self._run, name=f"sender-{number}", daemon=True) for number in range(NUM_THREADS)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def put_steps(self, steps: Steps) -> None:
        """Take the steps of one engine iteration. The engine's thread calls this; it does not wait for a client."""
        self._steps.put(steps)
        if self._steps.is_full:
            self._queue_entries(self._steps.collect())
            return
        if self._num_resting:
            with self._wakeup:
                self._wakeup.notify()
        if self._steps.is_behind:
            time.sleep(_YIELD_S)

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

    def _run(self) -> None:
        while True:
            try:
                served = self.serve_next()
            except Exception:  # every stream depends on this thread
                logger.exception("a thread of delivery goes on after")
                continue
            if not served and not self._rest():
                return

    def _rest(self) -> bool:
        """Wait until there may be something to do; False when there never will be."""
        with self._wakeup:
            self._num_resting += 1
            now = time.monotonic()
            idle = not self._steps.has_uncollected and not self._queue.has_work(now)
            if idle and not self._queue.stopping:
                self._wakeup.wait(self._queue.idle_for(now))
                idle = False
            self._num_resting -= 1
            return not idle

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
            logger.exception("a response could not be sent; request %r is given up", entry.active.client_id)
            self._give_up(entry.active, EngineError(f"a response could not be sent: {describe(error)}"))
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
            self._count_tokens(entry, pending, len(step.token_ids), at_s)
        if effect is StepEffect.NOTHING:
            return False
        if effect is not StepEffect.SEND:
            self._owner.abort([active.requests[pending.index]], cause="stop_string")
        elif step.error is not None and len(active.requests) > 1:
            self._owner.abort(active.requests, cause="error")
        return effect is not StepEffect.ABORT

    def _count_tokens(self, entry: QueueEntry, pending: PendingSteps, num_tokens: int, at_s: float) -> None:
        before_s, pending.last_token_s = pending.last_token_s, at_s
        self._metrics.tokens(num_tokens, None if before_s is None else at_s - before_s)
        if not entry.has_tokens:
            self._count_first(entry, at_s)

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

    def _give_up(self, active: ActiveRequest, error: EngineError) -> None:
        """Close a request to which nothing can be sent any more, and have the engine end it."""
        try:
            active.give_up(error)
        except Exception:
            logger.exception("nor could the error: request %r stays unanswered", active.client_id)
        self._owner.fail(active, error)
        self._close(active)

    def _close(self, active: ActiveRequest) -> None:
        with self._entries_lock:
            entry = self._entries.pop(active, None)
            if entry is not None:
                self._steps.forget(entry)
        self._owner.closed(active)
