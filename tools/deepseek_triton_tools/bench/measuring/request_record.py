"""The times and tokens of one request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

Outcome = Literal["completed", "failed", "cancelled"]
"""failed: an error, or an end that is none (finish reason "timeout"). cancelled: left by the client."""


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """Times are seconds since the start of the run, on one clock for all processes of it."""

    index: int
    """Number of the conversation in the dataset."""
    turn: int = 0
    due_s: float | None = None
    """Open loop and trace: when it was to be sent."""
    sent_s: float = 0.0
    chunk_s: Sequence[float] = field(default_factory=list)
    """When each chunk that held tokens came."""
    chunk_tokens: Sequence[int] = field(default_factory=list)
    """The number of tokens in each of them. They add up to `num_output_tokens`."""
    ended_s: float = 0.0
    num_input_tokens: int = 0
    num_output_tokens: int = 0
    asked_tokens: int | None = None
    """The number of tokens that the answer was to have; None: as many as the model likes."""
    num_cached_tokens: int | None = None
    outcome: Outcome = "completed"
    finish_reason: str | None = None
    error: str = ""
    """For a request that failed, the machine-readable code if there is one, and the message."""
    url: str = ""
    """The server that was asked."""
