"""What a run says at its end: the scores, the verdict and what to know about them. For people, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from deepseek_triton_tools.evaluation.pass_bands import BandVerdict
from deepseek_triton_tools.terminal.tables import Table, paragraph, show

SCHEMA = "deepseek-triton/eval/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricScore:
    """In percent, unless the metric is none of a share."""

    name: str
    value: float
    stderr: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSummary:
    task: str
    model: str
    engine: str
    form: str
    """chat or completion."""
    num_questions: int
    scores: tuple[MetricScore, ...]
    score: float
    """Mean of `scores`."""
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
        rows = [_score_row(score.name, score.value, score.stderr) for score in self.scores]
        if len(rows) > 1:
            rows.append(_score_row("score (their mean)", self.score, None))
        rows += [_score_row(f"  {name}", value, None) for name, value in self._shown_breakdown()]
        show(Table(title=title, headings=("metric", "%", "+-"), rows=rows, is_grid=True))
        if self.verdicts:
            headings = ("compared with", "reference", "passes from", "verdict")
            show(Table(title="", headings=headings, rows=[_verdict_row(one) for one in self.verdicts]))
        for note in self.notes:
            print(paragraph(note))
        print(paragraph(f"results, samples and answers: {self.output}"))

    def _shown_breakdown(self) -> Sequence[tuple[str, float]]:
        """Those of 57 subjects are in the files only."""
        return list(self.breakdown.items()) if len(self.breakdown) <= 8 else []


def _score_row(name: str, value: float, stderr: float | None) -> tuple[str, str, str]:
    return name, f"{value:.2f}", "" if stderr is None else f"{stderr:.2f}"


def _verdict_row(verdict: BandVerdict) -> tuple[str, ...]:
    reference = "" if verdict.reference is None else f"{verdict.reference:.2f}"
    return verdict.title, reference, f"{verdict.passes_from:.2f}", "pass" if verdict.passed else "below"


def scores_in(results: Mapping[str, Any], chosen: Sequence[str]) -> tuple[tuple[MetricScore, ...], dict[str, float]]:
    """Return the chosen metrics of lm-eval's results of one task, and the others.

    :param chosen: their names; none chooses all.
    """
    found = {
        name: float(value)
        for name, value in results.items()
        if "," in name and "_stderr," not in name and isinstance(value, (int, float))
    }
    names = [name for name in chosen if name in found] or list(found)

    def percent(name: str) -> MetricScore:
        stderr = results.get(name.replace(",", "_stderr,", 1))
        shown = 100 * float(stderr) if isinstance(stderr, (int, float)) else None
        return MetricScore(name=name, value=100 * found[name], stderr=shown)

    others = {name.removesuffix(",none"): 100 * value for name, value in found.items() if name not in names}
    return tuple(map(percent, names)), others
