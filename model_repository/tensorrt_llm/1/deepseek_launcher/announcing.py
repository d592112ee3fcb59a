"""The lines by which a rank tells the supervisor of itself; they pass the MPI launcher like any other output."""

from __future__ import annotations

import json
from typing import Any

_PREFIX = "deepseek-triton rank "


def line(rank: int, event: str, **facts: Any) -> str:
    return f"{_PREFIX}{json.dumps({'rank': rank, 'event': event, **facts}, separators=(',', ':'))}"


def is_alive(text: str) -> bool:
    """Whether the line is one of those that come every 15 s and are for the supervisor alone."""
    return _PREFIX in text and '"event":"alive"' in text


def ended(rank: int, code: int) -> str:
    """:param code: as a shell has it."""
    return line(rank, "ended", code=code, signal=code - 128 if code > 128 else None)


def parse(text: str) -> dict[str, Any] | None:
    """None for a line that is no announcement. A launcher may have put something before it."""
    _, found, rest = text.partition(_PREFIX)
    if not found:
        return None
    try:
        facts, _ = json.JSONDecoder().raw_decode(rest)
    except ValueError:
        return None
    if not isinstance(facts, dict) or not isinstance(facts.get("rank"), int) or not isinstance(facts.get("event"), str):
        return None
    return facts
