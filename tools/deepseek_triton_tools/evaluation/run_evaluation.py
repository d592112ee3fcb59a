"""Runs one evaluation: data, questions, scores, files and verdict."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from deepseek_triton_client import AsyncClient, InvalidRequest, ModelNotFound, Retries, SamplingParams
from deepseek_triton_tools.evaluation.harness import (
    HarnessModel,
    conversation_in,
    evaluate,
    lm_class,
    load_lm_eval,
    prepare,
)
from deepseek_triton_tools.evaluation.own_questions import own_questions
from deepseek_triton_tools.evaluation.questions import open_answers
from deepseek_triton_tools.evaluation.summary import EvaluationSummary, PassBand, bands_of, scores_in, verdicts
from deepseek_triton_tools.evaluation.task_data import EvaluationTask
from deepseek_triton_tools.evaluation.tasks import LM_EVAL_SEED, gpqa_diamond, gsm8k, mmlu, tiny
from deepseek_triton_tools.host.whole_file import whole_file
from deepseek_triton_tools.terminal.output_streams import complain, to_reader
from deepseek_triton_tools.tool_errors import ToolError

_ROUNDS = 20
"""Attempts for a question that the server was too full for, or not there: about a minute."""
_UNKNOWN_MODEL = "Request for unknown model"
"""Triton's own words begin so. Any other "not found" is a web server's."""
_SERVER_FACTS = ("name", "checkpoint", "engine", "engine_version")
"""Facts of `describe` that the answers depend on."""


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    connect: Callable[..., AsyncClient]
    """Takes further settings of the client."""
    model: str
    """The model's name on the server."""
    task: str | None
    task_file: Path | None = None
    data: Path | None = None
    output: Path
    overwrite: bool = False
    limit: int | None = None
    num_fewshot: int | None = None
    like_lm_eval: bool = False
    scorer: str = "exact"
    chat: bool = False
    system: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Sampling fields that win over those of the task."""
    concurrency: int = 32
    allow_failed: int = 0
    pass_at: float | None = None
    """Percent."""
    fail_below_band: bool = False
    as_json: bool = False


def run_evaluation(options: EvaluationOptions) -> int:
    """Ask, score, write and print. Returns 1 where the score is below the band and that was asked for.

    Raises ToolError where something is missing or wrong, or where questions failed; DeepseekTritonError where the
    server can't be had.
    """
    SamplingParams(**options.fields)  # a wrong field is refused before anything is loaded
    prepare()
    info = asyncio.run(_describe(options.connect))
    name = str(info.get("name") or options.model)
    bands = () if options.task is None else bands_of(options.task, name, chat=options.chat)
    if options.fail_below_band and not bands and options.pass_at is None:
        raise ToolError(
            f"--fail-below-band: no accuracy of {name} is published for this task and form; name one with --pass-at"
        )
    task = _task(options)
    try:
        options.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ToolError(f"--output {options.output} can't be made: {error.strerror}") from error
    load_lm_eval()
    server = {fact: info[fact] for fact in _SERVER_FACTS if fact in info} or {"name": options.model}
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
        if options.as_json:
            print(summary.as_json())
        else:
            summary.print()
    return 1 if options.fail_below_band and summary.passed is False else 0


async def _describe(connect: Callable[[], AsyncClient]) -> dict[str, Any]:
    """Return what the server says of its model; nothing where it has another model than this project's.

    :raises ToolError: for what is no Triton server.
    """
    async with connect() as client:
        try:
            return await client.model_info()
        except ModelNotFound as error:
            if error.message.startswith(_UNKNOWN_MODEL):
                raise
            raise ToolError(
                "nothing of Triton's is there: eval asks Triton servers, not OpenAI endpoints; give the Triton "
                "server's address (docs/eval.md has lm_eval's line for the gateway)"
            ) from error
        except InvalidRequest:
            return {}


def _task(options: EvaluationOptions) -> EvaluationTask:
    limit, shots = options.limit, options.num_fewshot
    if options.task_file is not None:
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
    if options.task == "gsm8k":
        return gsm8k(options.data, num_fewshot=shots, limit=limit, like_lm_eval=options.like_lm_eval)
    if options.task == "mmlu":
        return mmlu(options.data, num_fewshot=shots, limit=limit)
    if options.task == "gpqa_diamond":
        return gpqa_diamond(options.data, limit=limit)
    if options.task == "own":
        return own_questions(options.data, scorer=options.scorer, limit=limit)
    return tiny(limit=limit)


def _summary(
    options: EvaluationOptions,
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
        model=str(info.get("name") or options.model),
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
    notes = []
    if model.truncated and not task.is_cut:
        notes.append(
            f"{model.truncated:,} of {model.num_asked:,} answers were cut off at their most tokens: --max-tokens"
        )
    if model.failed:
        notes.append(f"{len(model.failed):,} questions failed and count as wrong (--allow-failed)")
    if model.thought:
        notes.append(f"{model.thought:,} answers began with reasoning, which was not scored")
    if model.num_kept:
        notes.append(f"{model.num_kept:,} of the answers are of an earlier run; --overwrite asks again")
    if any(band.num_questions > num_questions for band in bands):
        notes.append(f"the band is wider than the published one, because only {num_questions:,} questions were asked")
    return notes


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
