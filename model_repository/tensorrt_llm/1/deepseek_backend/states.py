"""The states of one Triton request and the legal transitions between them: a table, nothing else.

OPEN ──TOKENS──> GENERATING ──END──> ENDED ──FINAL_SENT──> CLOSED
  └──────────────END──────────────────^
"""

from __future__ import annotations

from enum import Enum, auto


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
