"""Why an answer ended, in OpenAI's words, of which there are fewer."""

from __future__ import annotations

_BY_REASON = {"stop": "stop", "length": "length", "timeout": "length", "cancelled": "stop"}


def finish_of(finish_reason: str, stop_reason: str) -> tuple[str, str]:
    """OpenAI's finish_reason, and what the choice's `stop_reason` tells beside it: the stop string, the id of the stop
    token, or the word that OpenAI has not ("timeout", "cancelled"); "" for nothing."""
    told = _BY_REASON.get(finish_reason or "stop", "stop")
    return told, finish_reason if finish_reason in ("timeout", "cancelled") else stop_reason
