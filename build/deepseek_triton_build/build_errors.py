"""Every error of the generator. Its text is one line: what was expected, what came, what to do.

BuildError
├── UnknownNameError          a variant, GPU, engine, preset or release that nothing is known about; names the nearest
├── RefusedPlanError          a plan that can't work: the rule, its source, and what does work
├── UnusableCheckpointError   a checkpoint's folder can't be used
├── NothingToCheckError       there is no model where one should be
└── OutputError               the output folder can't be written, or holds what the generator didn't write
    └── ReplacementError      the folder holds another deployment, or was changed by hand; carries the difference
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from deepseek_triton_build.text import nearest_name


class BuildError(Exception):
    """Base of the generator's errors. Never raised itself."""


class UnknownNameError(BuildError):
    """An unknown name of the given kind. The text lists the known names and the nearest of them.

    :param note: what else the name may mean; it replaces the nearest name in the text.
    """

    def __init__(self, kind: str, name: str, known: Iterable[str], *, note: str = "") -> None:
        self.kind, self.name, self.known = kind, name, tuple(known)
        nearest = _likely_meant(name.lower()[:_LONGEST], self.known)
        hint = (
            f"{note}{' ' if note.endswith('?') else '; '}"
            if note
            else f"did you mean {' or '.join(map(repr, nearest))}? "
            if nearest
            else ""
        )
        given = repr(name if len(name) <= _LONGEST else f"{name[:_LONGEST]}...")
        super().__init__(f"unknown {kind} {given}: {hint}known so far: {', '.join(self.known)}")


_LONGEST = 200
"""Characters of a name that are compared and quoted; the rest is cut off."""


def _likely_meant(name: str, known: Iterable[str]) -> list[str]:
    """Return the known names that begin with `name` or occur in it as a word, else the one it may misspell."""
    words = re.split(r"[\s_/]+", name) + re.split(r"[\s_/-]+", name)
    holding = [entry for entry in known if name and entry.startswith((f"{name}-", f"{name}."))]
    holding = holding or [entry for entry in known if entry in words]
    # A name with other numbers means another thing and is no typing error: v3 is not a misspelt r1.
    alike = [entry for entry in known if _numbers(entry) == _numbers(name)]
    near = nearest_name(name, alike)
    return holding or ([near] if near else [])


def _numbers(name: str) -> list[int]:
    """Return the numbers in `name`: 26.7 equals 26.07. A model's date (0528) is left out, as it is easily mistyped."""
    return [int(number) for number in re.findall(r"\d+", name) if len(number) < _DATE]


_DATE = 4
"""Digits of a date in a model's name."""


class RefusedPlanError(BuildError):
    """A plan that can't work.

    :param cause: why it can't, without any advice.
    :param fix: what to do, said where no other request is known to work, so that there is one piece of advice.
    :param suggestion: changes to PlanRequest's fields that make the nearest plan that works.
    """

    def __init__(self, cause: str, *, fix: str = "", suggestion: Mapping[str, Any] | None = None) -> None:
        super().__init__(f"{cause}; {fix}" if fix else cause)
        self.cause = cause
        self.suggestion: Mapping[str, Any] = suggestion or {}


class UnusableCheckpointError(BuildError):
    """A checkpoint's folder can't be used."""


class NothingToCheckError(BuildError):
    """There is no model where one should be, or nothing at all."""


class OutputError(BuildError):
    """The output folder can't be written, or holds something that the generator didn't write."""


class ReplacementError(OutputError):
    """The folder holds another deployment, or was changed by hand. `diff`: a unified diff from what is there to what
    would be written."""

    def __init__(self, message: str, *, diff: str) -> None:
        super().__init__(message)
        self.diff = diff
