"""Whether requests should be sent here: more than "the process is there"."""

from __future__ import annotations

from deepseek_backend.engines.base import EngineHealth


def readiness(engine: EngineHealth, *, draining: bool, num_open: int, idle_s: float, hang_s: float) -> EngineHealth:
    """The engine's health, and what it can't see itself.

    `idle_s` is the time since the last token of any request, or since there is one to answer.
    """
    if not engine.alive:
        return engine
    if draining:
        return EngineHealth(alive=False, reason="the model is being stopped")
    if num_open and idle_s > hang_s:
        reason = f"{num_open} requests are open and none had a token for {idle_s:.0f} s (hang_s is {hang_s:.0f})"
        return EngineHealth(alive=False, reason=reason)
    return EngineHealth(alive=True)
