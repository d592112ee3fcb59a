"""Every error of the generator. The text is one line: what was expected, what came, what to do.

BuildError
├── UnknownNameError      a variant, GPU, engine, preset or release nobody knows; names the nearest
├── RefusedPlanError      it can't work: the rule, its source, and what does work
└── OutputError           the output folder can't be written, or holds something that isn't ours to replace
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class BuildError(Exception):
    """Base of the generator's errors. Never raised itself."""


class UnknownNameError(BuildError):
    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        self.kind, self.name, self.known = kind, name, tuple(known)
        nearest = difflib.get_close_matches(name.lower(), self.known, n=1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        super().__init__(f"unknown {kind} {name!r}{hint} Known: {', '.join(self.known)}")


class RefusedPlanError(BuildError):
    pass


class OutputError(BuildError):
    pass
