"""Decides whether a command that has ended is started again, and when."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal

Policy = Literal["fatal", "always", "never"]
POLICIES: tuple[Policy, ...] = ("fatal", "always", "never")

_LONGEST_DELAY_S = 60
_PROVEN_S = 600
"""An attempt that was ready for this long sets the count of restarts back to zero."""


class End(Enum):
    """How an attempt ended."""

    STOPPED = "stopped"
    """A stop was requested."""
    DONE = "done"
    """The command ended with 0 by itself."""
    FATAL = "fatal"
    """Something failed."""
    DEADLINE = "deadline"
    """It was not ready in time."""
    DISAGREEMENT = "disagreement"
    """The nodes would serve different files, and would do so again after a restart."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of one attempt."""

    end: End
    exit_code: int
    reason: str = ""
    ready_s: float | None = None
    """Seconds since it first became ready; None when it never did."""


class Restarts:
    """Counts the restarts and applies the policy."""

    def __init__(self, policy: Policy, most: int) -> None:
        self.done = 0
        """Number of restarts since the server was last ready for ten minutes."""
        self._policy = policy
        self._most = most

    def delay_s(self, outcome: Outcome) -> float | None:
        """Return the seconds to wait before the next attempt; None when there is to be no further one."""
        if not self._is_wanted(outcome):
            return None
        if (outcome.ready_s or 0) >= _PROVEN_S:
            self.done = 0
        if self.done >= self._most:
            return None
        self.done += 1
        return float(min(_LONGEST_DELAY_S, 2 ** (self.done - 1)))

    def _is_wanted(self, outcome: Outcome) -> bool:
        if outcome.end in (End.STOPPED, End.DISAGREEMENT) or self._policy == "never":
            return False
        # A server that never became ready would need an hour to fail again, nearly always for the same reason.
        return self._policy == "always" or (outcome.end is End.FATAL and outcome.ready_s is not None)
