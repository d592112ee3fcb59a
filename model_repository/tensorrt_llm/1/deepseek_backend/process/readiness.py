"""Whether requests should be sent here: that needs more than a living process."""

from __future__ import annotations

import time

from deepseek_backend.engines.base import EngineHealth


class TokenClock:
    """How long the open requests have waited for a token.

    Threads: the engine's thread reports tokens; the caller's lock is held around the other two reports.
    """

    def __init__(self) -> None:
        self._since_s = time.monotonic()
        """Time of the last token, or at which the first request came that waits for one."""
        self._waiting = False
        """Requests have waited since then, and no token has come."""

    @property
    def idle_s(self) -> float:
        return time.monotonic() - self._since_s

    def request_came(self) -> None:
        """A request has come and no other is open."""
        if not self._waiting:
            self._since_s, self._waiting = time.monotonic(), True

    def token_came(self) -> None:
        self._since_s, self._waiting = time.monotonic(), False

    def wait_is_over(self) -> None:
        """The last open request has ended in a way that is no sign of a hang."""
        self._waiting = False


def readiness(engine: EngineHealth, *, draining: bool, num_open: int, idle_s: float, hang_s: float) -> EngineHealth:
    """The engine's own health, and what the engine can't see itself: draining and a hang.

    `idle_s` is the time since the last token of any request, or since there is a request to answer.
    """
    if not engine.alive:
        return engine
    if draining:
        return EngineHealth(alive=False, reason="the model is being stopped")
    if num_open and idle_s > hang_s:
        reason = f"{num_open} requests are open and none had a token for {idle_s:.0f} s (hang_s is {hang_s:.0f})"
        return EngineHealth(alive=False, reason=reason)
    return EngineHealth(alive=True)
