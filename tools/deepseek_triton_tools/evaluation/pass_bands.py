"""The published accuracy that a score is compared with, and from where on it passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any

_FILE = Path(__file__).with_name("pass_bands.yaml")
_ALPHA_QUANTILE = 1.645
"""A quantile of the normal distribution: one in twenty runs of an equal model fails."""
_SIGMA = 50.0
"""Percent: the standard deviation of one answer that is right half the time, the largest there is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassBand:
    """Accuracies are in percent."""

    task: str
    title: str
    models: Sequence[str]
    chat: bool
    reference: float
    num_questions: int
    source: str
    pass_at: float | None = None

    def passes_from(self, num_questions: int) -> float:
        """Return the lowest score that passes in a run of so many questions."""
        if self.pass_at is not None and num_questions == self.num_questions:
            return self.pass_at
        spread = _SIGMA * sqrt(1 / self.num_questions + 1 / num_questions)
        return self.reference - _ALPHA_QUANTILE * spread


@dataclass(frozen=True, slots=True, kw_only=True)
class BandVerdict:
    title: str
    reference: float | None
    """Percent; None for a limit that the user gave."""
    passes_from: float
    passed: bool
    source: str


def pass_bands() -> tuple[PassBand, ...]:
    import yaml

    rows: list[dict[str, Any]] = yaml.safe_load(_FILE.read_text("utf-8"))
    return tuple(PassBand(**row) for row in rows)


def bands_of(task: str, model: str, *, chat: bool) -> tuple[PassBand, ...]:
    """Return the bands that were measured on this model in this form."""
    return tuple(band for band in pass_bands() if band.task == task and model in band.models and band.chat == chat)


def verdicts(
    bands: Sequence[PassBand], score: float, num_questions: int, *, pass_at: float | None
) -> tuple[BandVerdict, ...]:
    """:param pass_at: the user's own limit, in percent, which takes the place of the published ones."""
    if pass_at is not None:
        given = BandVerdict(
            title="--pass-at", reference=None, passes_from=pass_at, passed=score >= pass_at, source="the command line"
        )
        return (given,)
    return tuple(
        BandVerdict(
            title=band.title,
            reference=band.reference,
            passes_from=(limit := band.passes_from(num_questions)),
            passed=score >= limit,
            source=band.source,
        )
        for band in bands
    )
