"""The end of a run: the scores, the published accuracy that they are compared with, and what to know about them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import sqrt
from pathlib import Path
from typing import Any

from deepseek_triton_tools.terminal.tables import Table, paragraph, show

SCHEMA = "deepseek-triton/eval/1"
_MOST_SHOWN = 8
"""Further metrics; those of 57 subjects are in the files only."""
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

    @property
    def row(self) -> tuple[str, str, str, str]:
        reference = "" if self.reference is None else f"{self.reference:.2f}"
        return self.title, reference, f"{self.passes_from:.2f}", "pass" if self.passed else "below"


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
        own = BandVerdict(
            title="--pass-at", reference=None, passes_from=pass_at, passed=score >= pass_at, source="the command line"
        )
        return (own,)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricScore:
    name: str
    value: float
    stderr: float | None
    is_percent: bool
    """Whether it is a share of the questions; a perplexity is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSummary:
    task: str
    model: str
    engine: str
    form: str
    """chat or completion."""
    num_questions: int
    scores: tuple[MetricScore, ...]
    score: float | None
    """Mean of the `scores` in percent; None without one."""
    verdicts: tuple[BandVerdict, ...]
    truncated: int
    """Answers that were cut off at the most tokens they may have."""
    thought: int
    failed: int
    """Questions without an answer, which count as wrong."""
    kept: int
    """Answers of an earlier run."""
    num_output_tokens: int
    output: str
    notes: tuple[str, ...] = ()
    breakdown: Mapping[str, float] = field(default_factory=dict)
    """Further metrics, such as those of single subjects."""

    @property
    def passed(self) -> bool | None:
        """Whether it passes every band; None without one."""
        return all(verdict.passed for verdict in self.verdicts) if self.verdicts else None

    def as_json(self) -> str:
        return json.dumps({"schema": SCHEMA, **asdict(self), "passed": self.passed}, ensure_ascii=False, indent=2)

    def print(self) -> None:
        engine = f" ({self.engine})" if self.engine else ""
        title = f"{self.task}: {self.model}{engine}, {self.num_questions:,} questions, {self.form} form"
        rows = [_score_row(one.name, one.value, one.stderr, is_percent=one.is_percent) for one in self.scores]
        if len(rows) > 1 and self.score is not None:
            rows.append(_score_row("score (their mean)", self.score))
        if len(self.breakdown) <= _MOST_SHOWN:
            rows += [_score_row(f"  {name}", value) for name, value in self.breakdown.items()]
        show(Table(title=title, headings=("metric", "value", "+-"), rows=rows, is_grid=True))
        if self.verdicts:
            headings = ("compared with", "reference", "passes from", "verdict")
            show(Table(title="", headings=headings, rows=[one.row for one in self.verdicts]))
        for note in self.notes:
            print(paragraph(note))
        print(paragraph(f"results, samples and answers: {self.output}"))


def _score_row(
    name: str, value: float, stderr: float | None = None, *, is_percent: bool = True
) -> tuple[str, str, str]:
    return name, f"{value:.2f}{' %' if is_percent else ''}", "" if stderr is None else f"{stderr:.2f}"


def scores_in(results: Mapping[str, Any], chosen: Sequence[str]) -> tuple[tuple[MetricScore, ...], dict[str, float]]:
    """Return the chosen metrics of lm-eval's results, and the others where they are shares, in percent.

    :param chosen: their names; none chooses all. Of a group of tasks they are the group's own, or where it has none,
        those of each task.
    """
    groups = [name for name in results.get("groups", {}) if _metrics(results, name)]
    tasks = groups[:1] or [name for name in results["results"] if _metrics(results, name)]
    metrics = [
        one if len(tasks) == 1 else replace(one, name=f"{task} {one.name}")
        for task in tasks
        for one in _metrics(results, task)
    ]
    scores = [one for one in metrics if one.name in chosen] or metrics
    others = [one for one in metrics if one not in scores and one.is_percent]
    return tuple(scores), {one.name.removesuffix(",none"): one.value for one in others}


def _metrics(results: Mapping[str, Any], task: str) -> list[MetricScore]:
    """:param task: a task or a group."""
    row = results["results"][task]
    better = results.get("higher_is_better", {}).get(task, {})
    scores = []
    for name, value in row.items():
        if "," not in name or "_stderr," in name or not isinstance(value, (int, float)):
            continue
        stderr = row.get(name.replace(",", "_stderr,", 1))
        is_percent = better.get(name.partition(",")[0]) is True and 0 <= float(value) <= 1
        factor = 100 if is_percent else 1
        scores.append(
            MetricScore(
                name=name,
                value=factor * float(value),
                stderr=factor * float(stderr) if isinstance(stderr, (int, float)) else None,
                is_percent=is_percent,
            )
        )
    return scores
