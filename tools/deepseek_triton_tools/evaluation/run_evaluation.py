"""One evaluation: questions, scores, the published accuracy that they are compared with, files and verdict."""

import argparse
import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from math import sqrt
from pathlib import Path
from typing import Any

from deepseek_triton_client import AsyncClient, InvalidRequest, ModelNotFound, Retries, SamplingParams
from deepseek_triton_tools.evaluation.harness import (
    EvaluationTask,
    HarnessModel,
    conversation_in,
    evaluate,
    lm_class,
    load_lm_eval,
    prepare,
)
from deepseek_triton_tools.evaluation.questions import open_answers
from deepseek_triton_tools.evaluation.tasks import LM_EVAL_SEED, gpqa_diamond, gsm8k, mmlu, own_questions, tiny
from deepseek_triton_tools.host.whole_file import whole_file
from deepseek_triton_tools.terminal.output_streams import complain, to_reader
from deepseek_triton_tools.terminal.tables import Table, paragraph, show
from deepseek_triton_tools.tool_errors import ToolError

SCHEMA = "deepseek-triton/eval/1"
_MOST_SHOWN = 8
"""Further metrics; those of 57 subjects are in the files only."""
_FILE = Path(__file__).with_name("pass_bands.yaml")
# A quantile of the normal distribution: one in twenty runs of an equal model fails.
_ALPHA_QUANTILE = 1.645
# Percent: the standard deviation of one answer that is right half the time, the largest there is.
_SIGMA = 50.0


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
    limits = [(band.title, band.reference, band.passes_from(num_questions), band.source) for band in bands]
    return tuple(
        BandVerdict(title=title, reference=reference, passes_from=limit, passed=score >= limit, source=source)
        for title, reference, limit, source in (
            limits if pass_at is None else [("--pass-at", None, pass_at, "the command line")]
        )
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
            compared = [
                (
                    one.title,
                    "" if one.reference is None else f"{one.reference:.2f}",
                    f"{one.passes_from:.2f}",
                    "pass" if one.passed else "below",
                )
                for one in self.verdicts
            ]
            show(Table(title="", headings=headings, rows=compared))
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


# Attempts for a question that the server was too full for, or not there: about a minute.
_ROUNDS = 20
_SERVER_FACTS = ("name", "checkpoint", "engine", "engine_version", "tool_form", "versions")
"""Facts of `describe`, or of `/v1/models`, that the answers depend on."""


def run_evaluation(options: argparse.Namespace) -> int:
    """Ask, score, write and print. Returns 1 where the score is below the band and that was asked for.

    :param options: the command line's; `connect` makes a client, with further settings, and `fields` are the sampling
        fields that win over those of the task.
    Raises ToolError where something is missing or wrong, or where questions failed; DeepseekTritonError where the
    server can't be had.
    """
    SamplingParams(**options.fields)  # a wrong field is refused before anything is loaded
    prepare()
    info = asyncio.run(_describe(options.connect))
    name = str(info["name"])
    bands = bands_of(options.task, name, chat=options.chat) if options.task and options.pass_at is None else ()
    if options.fail_below_band and not bands and options.pass_at is None:
        raise ToolError(
            f"--fail-below-band needs --pass-at: no accuracy of {name} is published for this task and form", exit_code=2
        )
    task = _task(options)
    try:
        options.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ToolError(f"--output {options.output} can't be made: {error.strerror}", exit_code=2) from error
    load_lm_eval()
    server = {fact: info[fact] for fact in _SERVER_FACTS if fact in info}
    with open_answers(options.output / "answers.jsonl", server, overwrite=options.overwrite) as kept:
        model = lm_class()(
            partial(options.connect, retries=Retries(attempts=_ROUNDS)),
            kept,
            info,
            fields=options.fields,
            concurrency=options.concurrency,
            allow_failed=options.allow_failed,
        )
        try:
            results = evaluate(model, task, chat=options.chat, system=options.system)
        except BaseException:
            if kept.num_before or model.num_asked:
                complain(f"the answers so far are in {options.output}: the same command goes on")
            raise
    summary = _summary(options, task, model, results, bands, info)
    _write(options.output, results, summary)
    with to_reader():
        if options.json:
            print(summary.as_json())
        else:
            summary.print()
    return 1 if options.fail_below_band and summary.passed is False else 0


async def _describe(connect: Callable[[], AsyncClient]) -> dict[str, Any]:
    """Return what the server says of its model; its name where it is another than this project's, or behind /v1."""
    async with connect() as client:
        try:
            return await client.model_info()
        except ModelNotFound:
            raise
        except InvalidRequest:
            model = await client.metadata()
            return {"name": model.name, "versions": list(model.versions)}


def _task(options: argparse.Namespace) -> EvaluationTask:
    data, limit, shots = options.data, options.limit, options.num_fewshot
    if options.task_file is None:
        tasks: dict[str | None, Callable[[], EvaluationTask]] = {
            "gsm8k": lambda: gsm8k(data, num_fewshot=shots, limit=limit, like_lm_eval=options.like == "lm-eval"),
            "mmlu": lambda: mmlu(data, num_fewshot=shots, limit=limit),
            "gpqa_diamond": lambda: gpqa_diamond(data, limit=limit),
            "own": lambda: own_questions(data, scorer=options.scorer, limit=limit),
            "tiny": lambda: tiny(limit=limit),
        }
        return tasks[options.task]()
    if not options.task_file.is_file():
        raise ToolError(f"--task-file {options.task_file}: there is no such file", exit_code=2)
    return EvaluationTask(
        name=options.task_file.stem,
        config=options.task_file.resolve(),
        limit=limit,
        num_fewshot=shots,
        fewshot_seed=LM_EVAL_SEED,
        multiturn=True,
    )


def _summary(
    options: argparse.Namespace,
    task: EvaluationTask,
    model: HarnessModel,
    results: Mapping[str, Any],
    bands: tuple[PassBand, ...],
    info: Mapping[str, Any],
) -> EvaluationSummary:
    scores, breakdown = scores_in(results, task.metrics)
    percent = [one.value for one in scores if one.is_percent]
    score = sum(percent) / len(percent) if percent else None
    num_questions = sum(counts["effective"] for counts in results["n-samples"].values())
    engine = " ".join(str(info[fact]) for fact in ("engine", "engine_version") if info.get(fact))
    return EvaluationSummary(
        task=task.name,
        model=str(info["name"]),
        engine=engine,
        form="chat" if options.chat else "completion",
        num_questions=num_questions,
        scores=scores,
        score=score,
        verdicts=() if score is None else verdicts(bands, score, num_questions, pass_at=options.pass_at),
        truncated=model.truncated,
        thought=model.thought,
        failed=len(model.failed),
        kept=model.num_kept,
        num_output_tokens=model.num_output_tokens,
        output=str(options.output),
        notes=tuple(_notes(task, model, bands, num_questions)),
        breakdown=breakdown,
    )


def _notes(task: EvaluationTask, model: HarnessModel, bands: tuple[PassBand, ...], num_questions: int) -> list[str]:
    is_wider = any(band.num_questions > num_questions for band in bands)
    cut_off = 0 if task.is_cut else model.truncated
    notes = {
        f"{cut_off:,} of {model.num_asked:,} answers were cut off at their most tokens: --max-tokens": cut_off,
        f"{len(model.failed):,} questions failed and count as wrong (--allow-failed)": model.failed,
        f"{model.thought:,} answers began with reasoning, which was not scored": model.thought,
        f"{model.num_kept:,} of the answers are of an earlier run; --overwrite asks again": model.num_kept,
        f"the band is wider than the published one, because only {num_questions:,} questions were asked": is_wider,
    }
    return [note for note, is_so in notes.items() if is_so]


def _write(output: Path, results: Mapping[str, Any], summary: EvaluationSummary) -> None:
    """Write lm-eval's results, its samples and the summary; nothing of it half."""
    rest = {key: value for key, value in results.items() if key != "samples"}
    files = {"results.json": json.dumps(rest, indent=2, ensure_ascii=False, default=_plain)}
    for task, samples in results["samples"].items():
        shown = ({**sample, "arguments": _with_messages(sample["arguments"])} for sample in samples)
        lines = [json.dumps(sample, ensure_ascii=False, default=_plain) + "\n" for sample in shown]
        files[f"samples_{task.replace('/', '_')}.jsonl"] = "".join(lines)
    files["summary.json"] = summary.as_json() + "\n"
    for name, text in files.items():
        with whole_file(output / name) as file:
            file.write(text)


def _with_messages(arguments: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Write conversations as what they are, not as the texts that lm-eval passed."""
    return [[conversation_in(one) or one if isinstance(one, str) else one for one in each] for each in arguments]


def _plain(value: Any) -> Any:
    """Write a number of numpy as a number, and all else that JSON lacks as a text, as lm-eval does."""
    return value.item() if hasattr(value, "item") else str(value)
