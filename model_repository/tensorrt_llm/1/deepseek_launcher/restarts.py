"""Whether what has ended is started again, and when."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal

Policy = Literal["fatal", "always", "never"]
POLICIES: tuple[Policy, ...] = ("fatal", "always", "never")

_LONGEST_DELAY_S = 60
_PROVEN_S = 600
"""Ready for as long, and what comes next is a new story."""


class End(Enum):
    """How an attempt ended."""

    STOPPED = "stopped"
    """As somebody asked."""
    DONE = "done"
    """Its command ended with 0 by itself."""
    FATAL = "fatal"
    DEADLINE = "deadline"
    DISAGREEMENT = "disagreement"
    """The nodes would serve different things: the same again."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Of one attempt."""

    end: End
    exit_code: int
    reason: str = ""
    ready_s: float | None = None
    """How long it had been ready; None when it never was."""


class Restarts:
    """Counts them."""

    def __init__(self, policy: Policy, most: int) -> None:
        self.done = 0
        """Since the last time that it was ready for ten minutes."""
        self._policy = policy
        self._most = most

    def delay_s(self, outcome: Outcome) -> float | None:
        """How long to wait before the next attempt; None for no further one."""
        if not self._wanted(outcome):
            return None
        if (outcome.ready_s or 0) >= _PROVEN_S:
            self.done = 0
        if self.done >= self._most:
            return None
        self.done += 1
        return float(min(_LONGEST_DELAY_S, 2 ** (self.done - 1)))

    def _wanted(self, outcome: Outcome) -> bool:
        if outcome.end in (End.STOPPED, End.DISAGREEMENT) or self._policy == "never":
            return False
        # What never became ready needs an hour to fail again, and its cause is nearly always one that stays.
        return self._policy == "always" or (outcome.end is End.FATAL and outcome.ready_s is not None)
