"""How much load: one point of a sweep."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPoint:
    """Closed loop: `concurrency` without `rate`. Open loop: `rate`, and `concurrency` is then only a limit. Trace:
    neither; the dataset says when."""

    num_requests: int
    """Conversations that are measured; a plain request is a conversation of one turn."""
    num_warmup: int = 0
    """Conversations sent before, at the same pace, and not measured."""
    concurrency: int | None = None
    """Conversations under way at once."""
    rate: float | None = None
    """Requests a second; infinity sends all at once."""
    burstiness: float = 1.0
    """Shape of the gamma distribution of the gaps between requests: 1 is Poisson, below it come bursts."""
    duration_s: float | None = None
    """Nothing is sent later than this; what is under way is waited for. The dataset is repeated as often as needed."""
    leave_share: float = 0.0
    """Share of the requests, 0 to 1, that the client leaves after `leave_after_s`."""
    leave_after_s: float = 0.0

    @property
    def label(self) -> str:
        """A name for tables and pictures. Requests that are all sent within a second are named by their number."""
        parts = []
        if self.rate is not None:
            at_once = self.rate >= self.num_requests
            parts.append(f"{self.num_requests} at once" if at_once else f"rate {self.rate:g}")
        if self.concurrency is not None:
            parts.append(f"concurrency {self.concurrency}")
        return ", ".join(parts) or "trace"
