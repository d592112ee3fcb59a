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
    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        self.kind, self.name, self.known = kind, name, tuple(known)
        # A name with other digits is another thing (v3 is no misspelt r1), not a slip of the finger.
        alike = [entry for entry in self.known if _digits(entry) == _digits(name)]
        longer = [entry for entry in self.known if entry.startswith(f"{name.lower()}-")]
        nearest = longer or difflib.get_close_matches(name.lower(), alike, n=1)
        hint = f"did you mean {' or '.join(map(repr, nearest))}? " if nearest else ""
        super().__init__(f"unknown {kind} {name!r}: {hint}known so far: {', '.join(self.known)}")


def _digits(name: str) -> str:
    return re.sub(r"\D", "", name)


class RefusedPlanError(BuildError):
    """It can't work. `suggestion` holds the nearest request that does, as changes to PlanRequest's fields."""

    def __init__(self, message: str, *, suggestion: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.suggestion: Mapping[str, Any] = suggestion or {}


class CheckpointError(BuildError):
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
