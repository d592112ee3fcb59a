"""One Triton request from acceptance to its final response, and the one place that sends that response.

OPEN ──TOKENS──> GENERATING ──END──> ENDED ──FINAL_SENT──> CLOSED
  └──────────────END──────────────────^

Everything that can end a request (the engine, a cancelled client, a stop, a deadline, a failure) calls `end` or adds a
last step. The first of them fixes the outcome; what comes later is dropped. Only delivery sends: with `deliver`, or,
after a response that could not be sent, the error with `give_up`.

Threads: delivery's threads and the engine's add steps; any thread may end the request; one of delivery's threads at a
time delivers; the watcher asks whether the client has gone. `_lock` guards the state and the buffers and is never held
while a response is sent. `_reply_lock` is held around every use of the reply: asking a reply that has been closed
whether it is cancelled crashes the server (triton-inference-server/server#8192). Where both are held, `_reply_lock` is
taken first.
"""

import math
import threading
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import Protocol

from deepseek_backend.admission import Admitted
from deepseek_backend.engines.base import FinishReason, Step
from deepseek_backend.engines.generate_request import GenerateRequest
from deepseek_backend.errors import BackendError, CancelledError
from deepseek_backend.parsing import ParsedRequest
from deepseek_backend.sequence_buffer import Outputs, SequenceBuffer, SequenceChunk, counts_tokens, num_bytes, outputs


class RequestState(Enum):
    OPEN = auto()
    """Accepted; the engine has made nothing for it yet."""
    GENERATING = auto()
    ENDED = auto()
    """The outcome is fixed; the final response has not been sent."""
    CLOSED = auto()
    """The final response has been sent, or there is nobody to send it to."""


class RequestEvent(Enum):
    TOKENS = auto()
    """The engine made a step of the request."""
    END = auto()
    """Something ended the request: the engine, its client, a stop, a deadline or a failure."""
    FINAL_SENT = auto()


TRANSITIONS: dict[tuple[RequestState, RequestEvent], RequestState] = {
    (RequestState.OPEN, RequestEvent.TOKENS): RequestState.GENERATING,
    (RequestState.GENERATING, RequestEvent.TOKENS): RequestState.GENERATING,
    (RequestState.OPEN, RequestEvent.END): RequestState.ENDED,
    (RequestState.GENERATING, RequestEvent.END): RequestState.ENDED,
    (RequestState.ENDED, RequestEvent.FINAL_SENT): RequestState.CLOSED,
}
"""(state, event) -> next state. An event that has no entry for a state came too late and is dropped."""


LARGE_BYTES = 256 << 10
"""A final response of more bytes is sent in two steps. A container has 64 MiB of /dev/shm unless told otherwise."""
# Stands in a request that has not begun. It is shared: making one costs as much as the rest of a new request.
_NOT_PARSED = ParsedRequest()


class StepEffect(Enum):
    """The work that `ActiveRequest.add` leaves to its caller."""

    NOTHING = auto()
    SEND = auto()
    """There is something to send."""
    ABORT = auto()
    """A stop string ended the sequence, and the engine is still generating it: abort it there."""
    SEND_AND_ABORT = auto()


class Reply(Protocol):
    """How a request is answered. `model.py` implements it on Triton's response sender, tests on a list."""

    def send(self, outputs: Outputs, *, final: bool) -> None:
        """Send a response. When sending the final one fails, nothing can be sent after it."""

    def finish(self) -> None:
        """End the answer without a further response; at least one response has been sent."""

    def send_error(self, error: BackendError) -> None:
        """Send the error as the final response."""

    def is_cancelled(self) -> bool: ...


class ActiveRequest:
    """One Triton request from acceptance to its final response."""

    def __init__(self, reply: Reply, *, client_id: str = "", arrived_s: float = 0.0) -> None:
        self.client_id = client_id
        """The id the client gave. Several requests may share it."""
        self.arrived_s = arrived_s
        """Time of arrival, by time.monotonic()."""
        self.deadline_s: float | None = None
        """Time at which the watcher ends the request, by time.monotonic(). None: no deadline."""
        self.parsed = _NOT_PARSED
        self.requests: tuple[GenerateRequest, ...] = ()
        """The requests given to the engine, one for each sequence."""
        self.sequences: list[SequenceBuffer] = []
        self.abort_reason: FinishReason | None = None
        """The finish reason for what the engine ends because it was told to; its last step is awaited then."""
        self.has_sent = False
        """A response with text has been sent."""
        self.has_handed_over = False
        """A response with a handover has been sent, and the client was there just before."""
        self.num_tokens_waiting = 0
        """Tokens that came after the last response."""
        self.waiting_since_s = math.inf
        """Time at which the first step after the last response came, by time.monotonic(). Infinite: none has come."""
        self.has_unsent_end = False
        """A sequence has ended after the last response."""
        self._reply = reply
        self._lock = threading.Lock()
        self._reply_lock = threading.Lock()
        self.state = RequestState.OPEN
        self.error: BackendError | None = None
        """The error that ended the request; None where none did."""
        self._admitted: Admitted | None = None
        """The request's share of admission's limits, given back just before the final response."""
        self._prepared: Outputs | None = None
        """The response to a task that generates nothing."""
        self._num_unsettled = 0
        """Sequences of which the engine has more to say."""
        self._several = False
        """The answer has more than one sequence."""
        self._may_be_cut = False
        """The text that waits may leave in pieces. That holds for plain text, where no other output has to stay with
        its part of the text and the request does not ask for few chunks."""

    def begin(
        self,
        parsed: ParsedRequest,
        requests: Sequence[GenerateRequest] = (),
        *,
        admitted: Admitted | None = None,
        deadline_s: float | None = None,
        reasoning_ends: Mapping[int, int] | None = None,
    ) -> bool:
        """Take the parsed request and its requests to the engine. False: the request has ended before it began."""
        with self._lock:
            if self.state is not RequestState.OPEN:
                return False
            self.parsed = parsed
            self.deadline_s = deadline_s
            self._admitted = admitted
            self._several = len(parsed.prompts) * parsed.num_choices > 1
            self._may_be_cut = parsed.streaming and not (
                parsed.cumulative or parsed.returned or self._several or parsed.wants_few_chunks
            )
            self.requests = tuple(requests)
            self._num_unsettled = len(requests)
            self.sequences = [
                SequenceBuffer(
                    index, parsed, request.prompt, request.begun, reasoning_ends or {}, request.continues_reasoning
                )
                for index, request in enumerate(requests)
            ]
            return True

    @property
    def ended(self) -> bool:
        """The outcome is fixed, whether or not the final response has been sent."""
        return self.state in (RequestState.ENDED, RequestState.CLOSED)

    @property
    def closed(self) -> bool:
        return self.state is RequestState.CLOSED

    @property
    def outcome(self) -> str:
        """How the request ended, for the metrics: the first sequence's finish reason, or the error's code."""
        if self.error is not None:
            return self.error.code.value
        return str(self.sequences[0].finish_reason) if self.sequences else "stop"

    @property
    def has_tokens(self) -> bool:
        """The engine has generated at least one token for the request."""
        return any(sequence.num_output_tokens for sequence in self.sequences)

    def add(self, index: int, step: Step, now: float = 0.0) -> StepEffect:
        """Take one engine step of the sequence `index`; `now` is the time at which it came, by time.monotonic()."""
        with self._lock:
            sequence = self.sequences[index]
            if sequence.settled or not self._advance(RequestEvent.TOKENS):
                return StepEffect.NOTHING
            if self.abort_reason is not None and step.finish_reason == "cancelled":
                step.finish_reason = self.abort_reason
            had_ended = sequence.ended
            if step.error is not None and not had_ended:
                self._end_locked(error=step.error)
                return StepEffect.SEND
            # Before the text: delivery reads these without the lock to judge how long the text may wait.
            self.num_tokens_waiting += len(step.token_ids)
            if self.waiting_since_s == math.inf:
                self.waiting_since_s = now
            sequence.add(step)
            if sequence.ended and not had_ended:
                self.has_unsent_end = True
            if sequence.ended and sequence.settled:
                self._num_unsettled -= 1
                if not self._num_unsettled:
                    self._advance(RequestEvent.END)
            send = (self.parsed.streaming and sequence.has_news()) or self.ended
            if sequence.matched_stop and not had_ended and step.finish_reason is None:
                return StepEffect.SEND_AND_ABORT if send else StepEffect.ABORT
            return StepEffect.SEND if send else StepEffect.NOTHING

    @property
    def has_text_in_engine(self) -> bool:
        """The engine has the text so far, and sends it when it ends or is aborted.

        A context_only request counts too: the engine alone knows whether it has a KV cache to hand over, and a client
        that is told "cancelled" would leave it there.
        """
        return not self.ended and any(
            not request.wants_steps or request.request_type == "context_only" for request in self.requests
        )

    def mark_aborted(self, finish_reason: FinishReason) -> bool:
        """Note why the engine is told to end the request. False: it was told already."""
        with self._lock:
            if self.abort_reason is not None:
                return False
            self.abort_reason = finish_reason
            return True

    def end(self, *, finish_reason: FinishReason | None = None, error: BackendError | None = None) -> bool:
        """Fix the outcome: a finish reason with the text so far, or an error. False: it was fixed already."""
        with self._lock:
            return self._end_locked(finish_reason=finish_reason, error=error)

    def end_with(self, response: Outputs) -> None:
        """End a request that generates nothing, with its one response."""
        with self._lock:
            if self._end_locked(finish_reason="stop"):
                self._prepared = response

    def has_news(self) -> bool:
        """A sequence has something for a stream's next response. Reads without the lock, as a hint."""
        if len(self.sequences) == 1:  # nearly always
            return self.sequences[0].has_news()
        return any(sequence.has_news() for sequence in self.sequences)

    def is_cut(self) -> bool:
        """The next response carries only a piece of the text that waits."""
        return self._may_be_cut and self.error is None and not self.sequences[0].is_one_piece

    def deliver(self) -> bool:
        """Send what is waiting, or the next piece of it. True: that was the final response.

        Only delivery calls this, from one thread at a time.
        """
        with self._lock:
            error = self.error
            cut = self.is_cut()
            final = self.state is RequestState.ENDED and not cut
            chunks = [] if error is not None or self.closed else self._take(final=final, cut=cut)
            self.has_sent = self.has_sent or bool(chunks)
            if not cut:
                self.num_tokens_waiting, self.waiting_since_s, self.has_unsent_end = 0, math.inf, False
        if final:
            self._release()  # before sending: a client that sends its next request on the answer finds room
        with self._reply_lock:
            if self.closed:
                return False
            hands_over = any(chunk.handover is not None for chunk in chunks)
            if hands_over and self._reply.is_cancelled():  # with the KV cache kept, for a client who has gone
                error = CancelledError("the client has gone")
                with self._lock:
                    self.error = error
            if final and error is not None:
                self._reply.send_error(error)
            elif final or chunks:
                prepared = self._prepared if final else None
                response = prepared or outputs(chunks, self.parsed, several=self._several)
                if final and num_bytes(response) > LARGE_BYTES:
                    # Triton closes a reply before it has room for the final response. If /dev/shm had none, the request
                    # would be left without an answer. In two steps the first one fails while the reply is still open.
                    self._reply.send(response, final=False)
                    self._reply.finish()
                else:
                    self._reply.send(response, final=final)
            if not final:
                return False
            self.has_handed_over = hands_over and error is None
            with self._lock:
                self._advance(RequestEvent.FINAL_SENT)
            return True

    def give_up(self, error: BackendError) -> None:
        """Close after a response that could not be sent: answer with the error, or not at all if that fails too.

        :raises Exception: what the reply raised when the error could not be sent either.
        """
        with self._lock:
            self._end_locked(error=error)
            self.error = error.without_frames()
        self._release()
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
        self._release()

    def client_has_gone(self) -> bool:
        """Ask the reply. False also while a response is being sent: the caller has other requests to ask."""
        if not self._reply_lock.acquire(blocking=False):
            return False
        try:
            return not self.closed and self._reply.is_cancelled()
        finally:
            self._reply_lock.release()

    def _release(self) -> None:
        if self._admitted is not None:
            self._admitted.release()

    def _advance(self, event: RequestEvent) -> bool:
        if event is RequestEvent.TOKENS and self.state is RequestState.GENERATING:
            return True  # nearly always; the table says the same
        following = TRANSITIONS.get((self.state, event))
        if following is None:
            return False
        self.state = following
        return True

    def _end_locked(self, *, finish_reason: FinishReason | None = None, error: BackendError | None = None) -> bool:
        if not self._advance(RequestEvent.END):
            return False
        self.error = error.without_frames() if error is not None else None
        if not self.sequences:  # a request that never began, or asks for no sequence, is answered all the same
            self.sequences = [SequenceBuffer(0, self.parsed, "")]
        for sequence in self.sequences:
            sequence.end(finish_reason or "cancelled")
        return True

    def _take(self, *, final: bool, cut: bool) -> list[SequenceChunk]:
        """Take the chunks of the next response out of the buffers, under the lock.

        Of a final response with more answers than the request wants, keep the likeliest n to each prompt, likeliest
        first. An answer that was cut short has fewer tokens to lower its probability, so it comes after complete ones.
        """
        if cut:
            return [self.sequences[0].take_piece()]
        if not final and not self.parsed.streaming:
            return []
        news = [sequence for sequence in self.sequences if sequence.has_news()]
        ended = any(sequence.ended for sequence in news)
        counted = counts_tokens(self.parsed, ended=ended, several=self._several)
        chunks = [sequence.take(counted=counted) for sequence in news]
        num_generated, num_returned = self.parsed.num_sequences_per_prompt, self.parsed.num_choices
        if not final or num_generated <= num_returned:
            return chunks
        kept: list[SequenceChunk] = []
        for first in range(0, len(chunks), num_generated):
            answers = chunks[first : first + num_generated]
            answers.sort(
                key=lambda chunk: (
                    chunk.finish_reason in ("cancelled", "timeout"),
                    not chunk.num_output_tokens,
                    -chunk.cumulative_logprob,
                )
            )
            kept += answers[:num_returned]
        for index, chunk in enumerate(kept):
            chunk.index = index
        return kept
