"""Versions compared by their numbers: "1.10" is after "1.9", and "4.1.9a1" is 4.1.9.

Only beside another candidate, "1.3.0rc14", is it seen that "1.3.0rc13" is one: before it, and 1.3.0 after it.
"""

from __future__ import annotations

import re


def parts(version: str) -> tuple[int, ...]:
    """The leading numbers; () of what has none."""
    found = re.match(r"[v=]?(\d+(?:\.\d+)*)", version.strip())
    return tuple(map(int, found[1].split("."))) if found else ()


def _candidate(version: str) -> int | None:
    """13 of "1.3.0rc13"."""
    found = re.search(r"rc(\d+)", version)
    return int(found[1]) if found else None


def is_before(version: str, other: str) -> bool:
    """Not of what has no number."""
    mine, theirs = parts(version), parts(other)
    length = max(len(mine), len(theirs))
    if not mine:
        return False
    padded, bound = (each + (0,) * (length - len(each)) for each in (mine, theirs))
    if padded == bound and (candidate := _candidate(other)):
        return (_candidate(version) or candidate) < candidate
    return padded < bound


def is_within(version: str, *, since: str | None = None, before: str | None = None) -> bool:
    """since <= version < before; a version without a number is within nothing."""
    if not parts(version):
        return False
    return not (since and is_before(version, since)) and (before is None or is_before(version, before))
