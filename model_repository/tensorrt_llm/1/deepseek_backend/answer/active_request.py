"""The life of one Triton request: its states, their legal transitions, and the one place that sends its final response.

    OPEN ──TOKENS──> GENERATING ──END──> ENDED ──FINAL_SENT──> CLOSED
      └──────────────END──────────────────^

Everything that can end a request (the engine, a cancelled client, a stop, a failure) fixes its outcome; the first one
wins and what comes later is dropped. Only the sender sends: with `deliver`, and with `give_up` the error after
a response that could not be sent.

Threads: the intake adds steps, any thread may end, one of the sender's at a time delivers, the watcher asks whether the
client has gone. `_lock` guards the state and the buffer and is never held while sending. `_reply_lock` is held
around every use of the reply: asking a reply that has been closed whether it is cancelled crashes the server
(triton-inference-server/server#8192).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from enum import Enum, auto
from typing import TYPE_CHECKING, Protocol

from deepseek_backend.answer.response_tensors import Outputs, counts_tokens, num_bytes, outputs
from deepseek_backend.answer.sequence_buffer import SequenceBuffer, SequenceChunk
from deepseek_backend.engines.base import FinishReason, Step
from deepseek_backend.engines.generate_request import GenerateRequest
from deepseek_backend.errors import BackendError
from deepseek_backend.request.parsed_request import ParsedRequest

if TYPE_CHECKING:
    from deepseek_backend.delivery.step_queue import PendingSteps
    from deepseek_backend.request.admission import Admitted

LARGE_BYTES = 256 << 10
"""A container has 64 MiB of /dev/shm unless told otherwise."""


class RequestState(Enum):
    OPEN = auto()
    GENERATING = auto()
    ENDED = auto()
    CLOSED = auto()


class RequestEvent(Enum):
    TOKENS = auto()
    END = auto()
    FINAL_SENT = auto()


TRANSITIONS: dict[tuple[RequestState, RequestEvent], RequestState] = {
    (RequestState.OPEN, RequestEvent.TOKENS): RequestState.GENERATING,
    (RequestState.GENERATING, RequestEvent.TOKENS): RequestState.GENERATING,
    (RequestState.OPEN, RequestEvent.END): RequestState.ENDED,
    (RequestState.GENERATING, RequestEvent.END): RequestState.ENDED,
    (RequestState.ENDED, RequestEvent.FINAL_SENT): RequestState.CLOSED,
}
"""An event that is not here for a state is dropped: it came too late."""


class StepEffect(Enum):
    """What a step asks of the caller."""

    NOTHING = auto()
    SEND = auto()
    """There is something to send."""
    ABORT = auto()
    """A stop string ended the sequence, and the engine is still generating it: abort it there."""
    SEND_AND_ABORT = auto()


class Urgency(Enum):
    """How soon what waits should leave."""

    NONE = auto()
    """Nothing waits."""
    HELD = auto()
    """It may wait for more, until `ActiveRequest.due_s`: the request asks for few chunks."""
    RUNNING = auto()
    URGENT = auto()
    """The first text, or the end: somebody looks at an empty screen, or holds resources for nothing."""


class QueueState(Enum):
    """Where the sender has an exchange."""

    IDLE = auto()
    HELD = auto()
    RUNNING = auto()
    URGENT = auto()
    SENDING = auto()

    def __init__(self, number: int) -> None:
        self.in_line = self.name not in ("IDLE", "HELD")
        """It will be served without anybody's doing."""


class Reply(Protocol):
    """How a request is answered. `model.py` implements it on Triton's response sender, tests on a list."""

    def send(self, outputs: Outputs, *, final: bool) -> None:
        """Send a response. One that fails as the final one can't be followed by anything."""

    def finish(self) -> None:
        """End without a further response, after at least one."""

    def send_error(self, error: BackendError) -> None:
        """Send the error as the final response."""

    def is_cancelled(self) -> bool: ...


class ActiveRequest:
    """One Triton request from acceptance to its final response."""

    def __init__(self, reply: Reply, *, client_id: str = "", arrived_s: float = 0.0) -> None:
        self.client_id = client_id
        """The client's, which several may share."""
        self.arrived_s = arrived_s
        """By time.monotonic()."""
        self.deadline_s: float | None = None
        self.call = ParsedRequest()
        self.requests: tuple[GenerateRequest, ...] = ()
        """What the engine was given: one for each sequence."""
        self.sequences: list[SequenceBuffer] = []
        self.admitted: Admitted | None = None
        """What it holds of admission's limits."""
        self.has_tokens = False
        """The first one has come; the service's."""
        self.place = QueueState.IDLE
        """The sender's; what it reads and decides by is under its lock."""
        self.is_listed = False
        """Among those that the sender holds back, or has held back; the sender's, under its lock."""
        self.inflows: Sequence[PendingSteps] = ()
        """One for each sequence; the intake's."""
        self.due_s = math.inf
        """By time.monotonic(): how long what waits may be held back."""
        self._reply = reply
        self._lock = threading.Lock()
        self._reply_lock = threading.Lock()
        self._state = RequestState.OPEN
        self._error: BackendError | None = None
        self._num_unsettled = 0
        """Sequences that the engine has not done with."""
        self._several = False
        """The answer has more than one sequence."""
        self._may_be_cut = False
        """What waits may leave in pieces: plain text does, where no other output has to stay with its part of it, and
        nobody asked for few chunks."""
        self.may_wait = False
        """The request, or model.yaml for it, asks for few chunks."""
        self._has_sent = False
        self._num_tokens_waiting = 0
        """Since the last response."""

    def begin(self, call: ParsedRequest, requests: Sequence[GenerateRequest]) -> bool:
        """Take the parsed call and what it asks of the engine. False: it has ended before it began."""
        with self._lock:
            if self._state is not RequestState.OPEN:
                return False
            self.call = call
            self._several = len(call.prompts) * call.num_choices > 1
            self.may_wait = call.stream_interval is not None or call.stream_interval_ms is not None
            self._may_be_cut = call.streaming and not (
                call.cumulative or call.returned or self._several or self.may_wait
            )
            self.requests = tuple(requests)
            self._num_unsettled = len(requests)
            self.sequences = [SequenceBuffer(index, call, request.prompt) for index, request in enumerate(requests)]
            return True

    @property
    def state(self) -> RequestState:
        return self._state

    @property
    def ended(self) -> bool:
        """The outcome is fixed, whether or not the final response has been sent."""
        return self._state in (RequestState.ENDED, RequestState.CLOSED)

    @property
    def closed(self) -> bool:
        return self._state is RequestState.CLOSED

    @property
    def error(self) -> BackendError | None:
        """What it ended with, where that is an error."""
        return self._error

    @property
    def outcome(self) -> str:
        """How it ended, for the metrics: the first sequence's finish reason, or the error's code."""
        if self._error is not None:
            return self._error.code.value
        return str(self.sequences[0].finish_reason) if self.sequences else "stop"

    def add(self, index: int, step: Step, now: float = 0.0) -> StepEffect:
        """Take one engine step of a sequence; `now` by time.monotonic()."""
        with self._lock:
            sequence = self.sequences[index]
            if sequence.settled or not self._advance(RequestEvent.TOKENS):
                return StepEffect.NOTHING
            had_ended = sequence.ended
            if step.error is not None and not had_ended:
                self._end_locked(error=step.error)
                return StepEffect.SEND
            self._count_waiting(len(step.token_ids), now)  # first: by its due time the sender judges what is new
            sequence.add(step)
            if sequence.ended and not had_ended:
                self.due_s = now
            if sequence.ended and sequence.settled:
                self._num_unsettled -= 1
                if not self._num_unsettled:
                    self._advance(RequestEvent.END)
            send = (self.call.streaming and sequence.has_news()) or self.ended
            if sequence.matched_stop and not had_ended and step.finish_reason is None:
                return StepEffect.SEND_AND_ABORT if send else StepEffect.ABORT
            return StepEffect.SEND if send else StepEffect.NOTHING

    def end(self, *, finish_reason: FinishReason | None = None, error: BackendError | None = None) -> bool:
        """Fix the outcome: a finish reason with the text so far, or an error. False: it was fixed already."""
        with self._lock:
            return self._end_locked(finish_reason=finish_reason, error=error)

    def turn(self, now: float) -> Urgency:
        """How soon it should be served. Without the lock: whoever changes something asks again afterwards."""
        if self._state is RequestState.CLOSED:
            return Urgency.NONE
        if self._state is RequestState.ENDED:
            return Urgency.RUNNING if self._has_sent and self._is_cut() else Urgency.URGENT
        if not self.call.streaming:
            return Urgency.NONE
        if not self._has_news():
            return Urgency.RUNNING if self._has_steps() else Urgency.NONE
        if not self._has_sent:
            return Urgency.URGENT
        return Urgency.HELD if self._is_held(now) else Urgency.RUNNING

    def deliver(self) -> bool:
        """Send what is waiting, or the next piece of it. True when that was the final response. The sender only."""
        with self._lock:
            error = self._error
            cut = self._is_cut()
            final = self._state is RequestState.ENDED and not cut
            chunks = [] if error is not None or self.closed else self._take_locked(final=final, cut=cut)
            self._has_sent = self._has_sent or bool(chunks)
            if not cut:
                self._num_tokens_waiting, self.due_s = 0, math.inf
        if final and self.admitted is not None:
            self.admitted.release()  # before: whoever sends the next request when the answer has come finds room
        with self._reply_lock:
            if self.closed:
                return False
            if final and error is not None:
                self._reply.send_error(error)
            elif final or chunks:
                self._send(outputs(chunks, self.call, several=self._several), final=final)
            if not final:
                return False
            with self._lock:
                self._advance(RequestEvent.FINAL_SENT)
            return True

    def give_up(self, error: BackendError) -> None:
        """Close after a response that could not be sent: answer with the error, or not at all if that fails too.

        :raises Exception: what the reply raised, when there is nobody to answer any more.
        """
        with self._lock:
            self._end_locked(error=error)
            self._error = error
        with self._reply_lock:
            with self._lock:
                if not self._advance(RequestEvent.FINAL_SENT):
                    return
            self._reply.send_error(error)

    def abandon(self) -> None:
        """Close without an answer, where there is nobody to answer."""
        with self._reply_lock, self._lock:
            self._end_locked(finish_reason="cancelled")
            self._advance(RequestEvent.FINAL_SENT)

    def client_has_gone(self) -> bool:
        """False also while a response is being sent: whoever asks has others to ask."""
        if not self._reply_lock.acquire(blocking=False):
            return False
        try:
            return not self.closed and self._reply.is_cancelled()
        finally:
            self._reply_lock.release()

    def _send(self, response: Outputs, *, final: bool) -> None:
        """A large final response goes in two steps: Triton closes a reply before it has room for the final response.

        Where /dev/shm has none, that would be a request without an answer; so it can still be answered with the error.
        """
        if final and num_bytes(response) > LARGE_BYTES:
            self._reply.send(response, final=False)
            self._reply.finish()
        else:
            self._reply.send(response, final=final)

    def _advance(self, event: RequestEvent) -> bool:
        if event is RequestEvent.TOKENS and self._state is RequestState.GENERATING:
            return True  # as the table has it, and nearly always
        following = TRANSITIONS.get((self._state, event))
        if following is None:
            return False
        self._state = following
        return True

    def _end_locked(self, *, finish_reason: FinishReason | None = None, error: BackendError | None = None) -> bool:
        if not self._advance(RequestEvent.END):
            return False
        self._error = error
        if not self.sequences:  # it never began, or asks for none: there is an answer all the same
            self.sequences = [SequenceBuffer(0, self.call, "")]
        for sequence in self.sequences:
            sequence.end(finish_reason or "cancelled")
        return True

    def _has_steps(self) -> bool:
        """Some wait to be looked at."""
        if len(self.inflows) == 1:
            return bool(self.inflows[0].steps)
        return any(inflow.steps for inflow in self.inflows)

    def _has_news(self) -> bool:
        if len(self.sequences) == 1:  # nearly always
            return self.sequences[0].has_news()
        return any(sequence.has_news() for sequence in self.sequences)

    def _is_cut(self) -> bool:
        """The next response has a piece of what waits."""
        return self._may_be_cut and self._error is None and not self.sequences[0].is_one_piece

    def _count_waiting(self, num_tokens: int, now: float) -> None:
        self._num_tokens_waiting += num_tokens
        if self.due_s == math.inf and self.call.stream_interval_ms is not None:
            self.due_s = now + self.call.stream_interval_ms / 1e3

    def _is_held(self, now: float) -> bool:
        if not self.may_wait or now >= self.due_s:
            return False
        interval = self.call.stream_interval
        return interval is None or self._num_tokens_waiting < interval

    def _take_locked(self, *, final: bool, cut: bool) -> list[SequenceChunk]:
        """What the next response says."""
        if cut:
            return [self.sequences[0].take_piece()]
        if not final and not self.call.streaming:
            return []
        news = [sequence for sequence in self.sequences if sequence.has_news()]
        ended = any(sequence.ended for sequence in news)
        counted = counts_tokens(self.call, ended=ended, several=self._several)
        chunks = [sequence.take(counted=counted) for sequence in news]
        return _best(chunks, self.call) if final else chunks


def _best(chunks: list[SequenceChunk], call: ParsedRequest) -> list[SequenceChunk]:
    """Of each prompt's answers the likeliest n, likeliest first; all of them where no more were generated.

    One that was cut short has fewer tokens to be unlikely with, so it comes after those that are complete.
    """
    generated, wanted = call.num_sequences_per_prompt, call.num_choices
    if generated <= wanted:
        return chunks
    kept: list[SequenceChunk] = []
    for first in range(0, len(chunks), generated):
        answers = sorted(chunks[first : first + generated], key=_rank)
        kept += answers[:wanted]
    for index, chunk in enumerate(kept):
        chunk.index = index
    return kept


def _rank(chunk: SequenceChunk) -> tuple[bool, bool, float]:
    cut_short = chunk.finish_reason in ("cancelled", "timeout")
    return cut_short, not chunk.num_output_tokens, -chunk.cumulative_logprob
