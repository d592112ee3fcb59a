"""Every error of the generator. The text is one line: what was expected, what came, what to do.

BuildError
├── UnknownNameError      a variant, GPU, engine, preset or release nobody knows; names the nearest
├── RefusedPlanError      it can't work: the rule, its source, and what does work
├── CheckpointError       a checkpoint's folder can't be used
├── NothingToCheckError   there is no model where one should be
└── OutputError           the output folder can't be written, or holds something that isn't ours to replace
    └── EditedError       it was changed by hand since it was generated; carries the difference
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any


class BuildError(Exception):
    """Base of the generator's errors. Never raised itself."""


class UnknownNameError(BuildError):
    """`note`: what else the name may be, instead of the nearest one."""

    def __init__(self, kind: str, name: str, known: Iterable[str], *, note: str = "") -> None:
        self.kind, self.name, self.known = kind, name, tuple(known)
        nearest = _nearest(name.lower()[:_LONGEST], self.known)
        hint = f"{note}; " if note else f"did you mean {' or '.join(map(repr, nearest))}? " if nearest else ""
        given = repr(name if len(name) <= _LONGEST else f"{name[:_LONGEST]}...")
        super().__init__(f"unknown {kind} {given}: {hint}known so far: {', '.join(self.known)}")


_LONGEST = 200
"""Characters of a name that are looked at and shown."""


def _nearest(name: str, known: Iterable[str]) -> list[str]:
    """Names that begin with `name` or that it holds as a word; else the one that it may be a misspelling of."""
    words = re.split(r"[\s_/]+", name)
    holding = [entry for entry in known if name and entry.startswith((f"{name}-", f"{name}."))]
    holding = holding or [entry for entry in known if entry in words]
    # A name with other numbers is another thing (v3 is no misspelt r1), not a slip of the finger.
    alike = [entry for entry in known if _numbers(entry) == _numbers(name)]
    return holding or difflib.get_close_matches(name, alike, n=1)


def _numbers(name: str) -> list[int]:
    """Those in `name`: 26.7 is 26.07. A model's date (0528), which slips easily, is left out."""
    return [int(number) for number in re.findall(r"\d+", name) if len(number) < _DATE]


_DATE = 4
"""Digits of it."""


class RefusedPlanError(BuildError):
    """It can't work. `suggestion` holds the nearest request that does, as changes to PlanRequest's fields."""

    def __init__(self, message: str, *, suggestion: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.suggestion: Mapping[str, Any] = suggestion or {}


class UnusableCheckpointError(BuildError):
    """A checkpoint's folder can't be used."""


class NothingToCheckError(BuildError):
    """There is no model, or nothing at all, where one should be."""


class OutputError(BuildError):
    """The output folder can't be written, or holds something that isn't ours to replace."""


class EditedError(OutputError):
    """The folder was changed by hand since it was generated. `diff`: from what is there to what would be written."""

    def __init__(self, message: str, *, diff: str) -> None:
        super().__init__(message)
        self.diff = diff
