"""The life of one Triton request: its states, their legal transitions, and the one place that sends its final response.

    OPEN ──TOKENS──> GENERATING ──END──> ENDED ──FINAL_SENT──> CLOSED
      └──────────────END──────────────────^

Everything that can end a request (the engine, a cancelled client, a stop, a failure) fixes its outcome; the first one
wins and what comes later is dropped. Only the sender's thread sends: with `Exchange.deliver`, and with `give_up` the
error after a response that could not be sent.

Threads: the engine's thread adds steps, any thread may end, the sender's thread delivers, the watcher asks whether the
client has gone. `_lock` guards the state and the buffer and is never held while sending. `_reply_lock` is held around
every use of the reply: asking a reply that has been closed whether it is cancelled crashes the server
(triton-inference-server/server#8192).
"""

from __future__ import annotations

import threading
from enum import Enum, auto
from typing import Protocol

from deepseek_backend.engines.base import FinishReason, Step
from deepseek_backend.errors import BackendError
from deepseek_backend.request import Call
from deepseek_backend.response import Chunk, Outputs, chunk_outputs
from deepseek_backend.text import StopStringFilter


class State(Enum):
    OPEN = auto()
    GENERATING = auto()
    ENDED = auto()
    CLOSED = auto()


class Event(Enum):
    TOKENS = auto()
    END = auto()
    FINAL_SENT = auto()


TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.OPEN, Event.TOKENS): State.GENERATING,
    (State.GENERATING, Event.TOKENS): State.GENERATING,
    (State.OPEN, Event.END): State.ENDED,
    (State.GENERATING, Event.END): State.ENDED,
    (State.ENDED, Event.FINAL_SENT): State.CLOSED,
}
"""An event that is not here for a state is dropped: it came too late."""


class StepEffect(Enum):
    """What a step asks of the caller."""

    NOTHING = auto()
    MORE = auto()
    """There is something to send."""
    ENDED = auto()
    """The final response is to be sent."""
    STOP_STRING = auto()
    """Likewise, and the engine is still generating: abort it there."""


class Reply(Protocol):
    """How a request is answered. `model.py` implements it on Triton's response sender, tests on a list."""

    def send(self, outputs: Outputs, *, final: bool) -> None: ...

    def send_error(self, error: BackendError) -> None:
        """Send the error as the final response."""

    def is_cancelled(self) -> bool: ...


class Exchange:
    """One Triton request from acceptance to its final response."""

    def __init__(self, reply: Reply, *, request_id: str = "", client_id: str = "") -> None:
        self.request_id = request_id
        """The backend's own, unique; what the engine knows the request by."""
        self.client_id = client_id
        """The client's, which several may share."""
        self.call = Call()
        self.queued = False
        """Waits in the sender's queue. Owned by the sender, under its lock."""
        self._reply = reply
        self._lock = threading.Lock()
        self._reply_lock = threading.Lock()
        self._state = State.OPEN
        self._filter = StopStringFilter(())
        self._text: list[str] = []
        self._num_input_tokens = 0
        self._num_output_tokens = 0
        self._finish_reason: FinishReason | None = None
        self._stop_reason: int | str | None = None
        self._error: BackendError | None = None

    def begin(self, call: Call) -> None:
        """Take the parsed call. Before the first step."""
        self.call = call
        self._filter = StopStringFilter(call.sampling.stop, include_stop=bool(call.sampling.include_stop_str_in_output))
        if call.echo:
            self._text.append(call.prompt)

    @property
    def state(self) -> State:
        return self._state

    @property
    def ended(self) -> bool:
        """The outcome is fixed, whether or not the final response has been sent."""
        return self._state in (State.ENDED, State.CLOSED)

    @property
    def closed(self) -> bool:
        return self._state is State.CLOSED

    def add(self, step: Step) -> StepEffect:
        """Take one engine step."""
        with self._lock:
            if not self._advance(Event.TOKENS):
                return StepEffect.NOTHING
            self._num_input_tokens = step.num_input_tokens or self._num_input_tokens
            self._num_output_tokens += len(step.token_ids)
            if step.text:
                self._text.append(self._filter.push(step.text))
            if self._filter.matched is not None:
                self._end_locked(finish_reason="stop", stop_reason=self._filter.matched)
                return StepEffect.ENDED if step.finish_reason or step.error else StepEffect.STOP_STRING
            if step.error is not None:
                self._end_locked(error=step.error)
                return StepEffect.ENDED
            if step.finish_reason is not None:
                self._end_locked(finish_reason=step.finish_reason, stop_reason=step.stop_reason)
                return StepEffect.ENDED
            return StepEffect.MORE if self.call.streaming else StepEffect.NOTHING

    def end(self, *, finish_reason: FinishReason | None = None, error: BackendError | None = None) -> bool:
        """Fix the outcome: a finish reason with the text so far, or an error. False: it was fixed already."""
        with self._lock:
            return self._end_locked(finish_reason=finish_reason, error=error)

    def deliver(self) -> bool:
        """Send what is waiting. True when that was the final response. The sender's thread only."""
        with self._lock:
            chunk, error = self._take_locked()
        with self._reply_lock:
            if error is not None:
                self._reply.send_error(error)
            elif chunk is not None:
                self._reply.send(chunk_outputs(chunk, self.call), final=chunk.final)
            if error is None and (chunk is None or not chunk.final):
                return False
            with self._lock:
                self._advance(Event.FINAL_SENT)
            return True

    def give_up(self, error: BackendError) -> None:
        """Close after a response that could not be sent: answer with the error, or not at all if that fails too.

        :raises Exception: what the reply raised, when there is nobody to answer any more.
        """
        with self._lock:
            self._end_locked(error=error)
        with self._reply_lock:
            with self._lock:
                if not self._advance(Event.FINAL_SENT):
                    return
            self._reply.send_error(error)

    def abandon(self) -> None:
        """Close without an answer, where there is nobody to answer."""
        with self._lock:
            self._end_locked(finish_reason="cancelled")
            self._advance(Event.FINAL_SENT)

    def client_has_gone(self) -> bool:
        with self._reply_lock:
            return not self.closed and self._reply.is_cancelled()

    def _advance(self, event: Event) -> bool:
        following = TRANSITIONS.get((self._state, event))
        if following is None:
            return False
        self._state = following
        return True

    def _end_locked(
        self,
        *,
        finish_reason: FinishReason | None = None,
        stop_reason: int | str | None = None,
        error: BackendError | None = None,
    ) -> bool:
        if not self._advance(Event.END):
            return False
        if self._filter.matched is None:
            self._text.append(self._filter.finish())
        self._finish_reason, self._stop_reason, self._error = finish_reason, stop_reason, error
        return True

    def _take_locked(self) -> tuple[Chunk | None, BackendError | None]:
        final = self._state is State.ENDED
        if final and self._error is not None:
            return None, self._error
        text = "".join(self._text)
        if self._state is State.CLOSED or (not final and (not text or not self.call.streaming)):
            return None, None
        chunk = Chunk(
            text=text,
            num_input_tokens=self._num_input_tokens,
            num_output_tokens=self._num_output_tokens,
            final=final,
            finish_reason=self._finish_reason,
            stop_reason=self._stop_reason,
        )
        self._text.clear()
        if final or self.call.num_output_tokens_always:
            self._num_output_tokens = 0
        return chunk, None
