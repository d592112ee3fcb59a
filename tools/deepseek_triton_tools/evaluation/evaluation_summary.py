"""The end of a run: the scores, the verdict and what to know about them. For people, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from deepseek_triton_tools.evaluation.pass_bands import BandVerdict
from deepseek_triton_tools.terminal.tables import Table, paragraph, show

SCHEMA = "deepseek-triton/eval/1"


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
        rows += [_score_row(f"  {name}", value) for name, value in self._shown_breakdown()]
        show(Table(title=title, headings=("metric", "value", "+-"), rows=rows, is_grid=True))
        if self.verdicts:
            headings = ("compared with", "reference", "passes from", "verdict")
            show(Table(title="", headings=headings, rows=[_verdict_row(one) for one in self.verdicts]))
        for note in self.notes:
            print(paragraph(note))
        print(paragraph(f"results, samples and answers: {self.output}"))

    def _shown_breakdown(self) -> Sequence[tuple[str, float]]:
        """Those of 57 subjects are in the files only."""
        return list(self.breakdown.items()) if len(self.breakdown) <= 8 else []


def _score_row(
    name: str, value: float, stderr: float | None = None, *, is_percent: bool = True
) -> tuple[str, str, str]:
    return name, f"{value:.2f}{' %' if is_percent else ''}", "" if stderr is None else f"{stderr:.2f}"


def _verdict_row(verdict: BandVerdict) -> tuple[str, ...]:
    reference = "" if verdict.reference is None else f"{verdict.reference:.2f}"
    return verdict.title, reference, f"{verdict.passes_from:.2f}", "pass" if verdict.passed else "below"


def scores_in(results: Mapping[str, Any], chosen: Sequence[str]) -> tuple[tuple[MetricScore, ...], dict[str, float]]:
    """Return the chosen metrics of lm-eval's results, and the others where they are shares, in percent.

    :param chosen: their names; none chooses all. Of a group of tasks they are the group's own, or where it has none,
        those of each task.
    """
    groups = [name for name in results.get("groups", {}) if _metrics(results, name)]
    tasks = groups[:1] or [name for name in results["results"] if _metrics(results, name)]
    found = [
        one if len(tasks) == 1 else replace(one, name=f"{task} {one.name}")
        for task in tasks
        for one in _metrics(results, task)
    ]
    scores = [one for one in found if one.name in chosen] or found
    others = [one for one in found if one not in scores and one.is_percent]
    return tuple(scores), {one.name.removesuffix(",none"): one.value for one in others}


def _metrics(results: Mapping[str, Any], task: str) -> list[MetricScore]:
    """:param task: a task or a group."""
    row = results["results"][task]
    better = results.get("higher_is_better", {}).get(task, {})
    found = []
    for name, value in row.items():
        if "," not in name or "_stderr," in name or not isinstance(value, (int, float)):
            continue
        stderr = row.get(name.replace(",", "_stderr,", 1))
        is_percent = better.get(name.partition(",")[0]) is True and 0 <= float(value) <= 1
        factor = 100 if is_percent else 1
        found.append(
            MetricScore(
                name=name,
                value=factor * float(value),
                stderr=factor * float(stderr) if isinstance(stderr, (int, float)) else None,
                is_percent=is_percent,
            )
        )
    return found
