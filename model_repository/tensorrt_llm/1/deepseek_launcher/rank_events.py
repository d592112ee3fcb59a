"""Writes and parses the lines that a rank sends to the supervisor: `started`, `alive` and `ended`.

They pass the MPI launcher like any other output.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from deepseek_launcher.children import signal_of

_PREFIX = "deepseek-triton rank "


def line(rank: int, event: str, launch: str, **facts: Any) -> str:
    """Return the line of an event.

    The line names the launch, because an engine's log may show text of users, and a launch may run within another.
    """
    return f"{_PREFIX}{json.dumps({'rank': rank, 'event': event, **facts, 'launch': launch}, separators=(',', ':'))}"


def ended(rank: int, launch: str, code: int) -> str:
    """Return the line of the `ended` event; `code` is the exit code as a shell gives it."""
    return line(rank, "ended", launch, code=code, signal=signal_of(code))


def is_alive(text: str) -> bool:
    """Return whether the line is an `alive` event, which comes every 15 s and is for the supervisor alone."""
    return _PREFIX in text and '"event":"alive"' in text


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 60


def _is_seconds(value: object) -> bool:
    return type(value) in (int, float) and 0 <= value < 1e15  # type: ignore[operator]  # it is a number


def _is_text(pattern: str) -> Callable[[object], bool]:
    return lambda value: isinstance(value, str) and re.fullmatch(pattern, value) is not None


_HASH = "[0-9a-f]{16}"
_CHECKS: dict[str, Callable[[object], bool]] = {
    "rank": _is_count,
    "event": _is_text("started|alive|ended"),
    "launch": _is_text("[0-9a-f]{8}"),
    "size": _is_count,
    "host": _is_text(r"[\w.-]{1,255}"),
    "pid": _is_count,
    "repository": _is_text(_HASH),
    "checkpoint": _is_text(_HASH),
    "python": _is_text(r"[\w.+]{1,40}"),
    "cpu_s": _is_seconds,
    "read_bytes": _is_count,
    "rss_bytes": _is_count,
    "code": _is_count,
    "signal": _is_count,
}
_NEEDED = {"started": ("host", "pid"), "alive": (), "ended": ("code",)}


def parse(text: str, launch: str) -> dict[str, Any] | None:
    """Return the event's facts; None for any other line. A launcher may have put a tag before the event."""
    _, found, rest = text.partition(_PREFIX)
    if not found:
        return None
    try:
        facts, _ = json.JSONDecoder().raw_decode(rest)
    except (ValueError, RecursionError):
        return None
    return facts if isinstance(facts, dict) and facts.get("launch") == launch and _is_valid(facts) else None


def _is_valid(facts: dict[str, Any]) -> bool:
    """Check every value. A launcher can lose a piece of a line, and the rest may still be JSON."""
    known = {name: value for name, value in facts.items() if name in _CHECKS and value is not None}
    if not all(_CHECKS[name](value) for name, value in known.items()):
        return False
    return {"rank", "event"} <= known.keys() and known.keys() >= set(_NEEDED[known["event"]])
