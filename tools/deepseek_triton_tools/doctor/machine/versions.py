"""Versions, compared by their numbers: "1.10" comes after "1.9", and "4.1.9a1" counts as 4.1.9.

A release candidate is told apart only when it is compared with another candidate: "1.3.0rc13" is before "1.3.0rc14",
and "1.3.0" is not.
"""

from __future__ import annotations

import re


def version_numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers; () when there are none."""
    found = re.match(r"[v=]?(\d+(?:\.\d+)*)", version.strip())
    return tuple(map(int, found[1].split("."))) if found else ()


def _candidate(version: str) -> int | None:
    """Return 13 for "1.3.0rc13"."""
    found = re.search(r"rc(\d+)", version)
    return int(found[1]) if found else None


def is_before(version: str, other: str) -> bool:
    """Return whether `version` is older than `other`; False when it has no number."""
    mine, theirs = version_numbers(version), version_numbers(other)
    length = max(len(mine), len(theirs))
    if not mine:
        return False
    padded, bound = (each + (0,) * (length - len(each)) for each in (mine, theirs))
    if padded == bound and (candidate := _candidate(other)):
        return (_candidate(version) or candidate) < candidate
    return padded < bound
