"""How much load: one point of a sweep."""

from __future__ import annotations

import math
from dataclasses import dataclass

_AT_ONCE_S = 0.1


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
    def at_once(self) -> bool:
        """Whether all requests are due within a tenth of a second: then their number is the load, not the rate."""
        return self.rate is not None and self.num_requests <= _AT_ONCE_S * self.rate

    @property
    def label(self) -> str:
        """A name for tables, pictures and files."""
        parts = []
        if self.at_once:
            parts.append(f"{self.num_requests} at once")
        if self.rate is not None and not (self.at_once and math.isinf(self.rate)):
            parts.append(f"rate {self.rate:.12g}")
        if self.concurrency is not None:
            parts.append(f"concurrency {self.concurrency}")
        return ", ".join(parts) or "trace"
