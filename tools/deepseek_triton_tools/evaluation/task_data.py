"""A task as lm-evaluation-harness takes it, and its data: the user's own copy, Hugging Face's cache, or a download.

The data of GSM8K, MMLU and GPQA is never part of this project.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from deepseek_triton_tools.generating.prompt_sources import checked_rows, json_of_line
from deepseek_triton_tools.tool_errors import ToolError

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class EvaluationTask:
    name: str
    config: dict[str, Any] | Path
    """The task as lm-eval takes it: keys and values, or a YAML file."""
    metrics: tuple[str, ...] = ()
    """lm-eval's names, such as "exact_match,strict-match", of those whose mean is the score; none: all of them."""
    is_cut: bool = False
    """Answers are meant to be cut off: the task gives them fewer tokens than the model would write."""
    limit: int | None = None
    """Only the first questions."""
    num_fewshot: int | None = None
    """Solved examples before each question, where the task leaves it open."""
    fewshot_seed: int = 0
    multiturn: bool = False
    """In chats the examples are turns of the conversation, not a part of the question."""


def rows_as_dataset(splits: Mapping[str, Sequence[Row]], *, shuffled: bool = False) -> Callable[..., Mapping[str, Any]]:
    """Return lm-eval's `custom_dataset`: these rows, by split.

    :param shuffled: put those of `test` into the order that trtllm-eval gives them.
    """

    def dataset(**_: Any) -> Mapping[str, Any]:
        from_rows = import_module("datasets").Dataset.from_list
        made = {name: from_rows(list(rows)) for name, rows in splits.items() if rows}
        if shuffled:
            # trtllm-eval shuffles the examples too, but after lm-eval has read them.
            made["test"] = made["test"].shuffle(seed=0)
        return made

    return dataset


def generation_config(
    name: str,
    rows: Sequence[Row],
    metrics: Sequence[str],
    *,
    target: Any = "answer",
    scores: Callable[[Row, Sequence[str]], Mapping[str, float]] | None = None,
    until: Sequence[str] = (),
    max_tokens: int,
    generation: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Describe to lm-eval a task whose answers are generated greedily after the `prompt` of each row.

    :param metrics: their names; each is a mean over the questions.
    :param target: the key of the right answer, or what finds it in a row.
    :param scores: compares a row with the answers; None: lm-eval's own metrics do.
    :param generation: more fields of the requests.
    """
    return {
        "task": name,
        "output_type": "generate_until",
        "custom_dataset": rows_as_dataset({"test": rows}),
        "test_split": "test",
        "doc_to_text": "prompt",
        "doc_to_target": target,
        **({"process_results": scores} if scores else {}),
        "metric_list": [{"metric": metric, "aggregation": "mean", "higher_is_better": True} for metric in metrics],
        "generation_kwargs": {
            "until": list(until),
            "temperature": 0.0,
            "max_gen_toks": max_tokens,
            **(generation or {}),
        },
        "num_fewshot": 0,
    }


def data_file(data: Path, patterns: Sequence[str], expected: str) -> Path:
    """Return `data` itself where it is a file, else the first file below it that fits a pattern."""
    if data.is_file():
        return data
    if not data.is_dir():
        raise ToolError(f"--data {data}: there is no such file or folder; expected {expected}")
    for pattern in patterns:
        for path in sorted(data.glob(pattern)):
            return path
    raise ToolError(f"--data {data}: expected {expected}, found no {' or '.join(patterns)}")


def read_rows(path: Path, keys: Sequence[str], problem_of: Callable[[Row], str | None] = lambda _: None) -> list[Row]:
    """Read a file as JSON Lines, CSV with a heading, or Parquet, by its name.

    :param problem_of: says what else is wrong with a row that has the keys.
    :raises ToolError: where the file is none of these or empty, or a row is wrong. Each of the first ten problems is
        one line on stderr.
    """

    def checked(row: Any) -> Row:
        if not isinstance(row, dict):
            raise ToolError(f"expected an object, got {row!r:.100}")
        if missing := [key for key in keys if row.get(key) is None]:
            raise ToolError(f"expected the keys {', '.join(keys)}; it lacks {', '.join(missing)}")
        if problem := problem_of(row):
            raise ToolError(problem)
        return row

    try:
        if path.suffix in (".parquet", ".csv"):
            if path.suffix == ".parquet":
                table = import_module("pandas").read_parquet(path).to_dict("records")
            else:
                with path.open(encoding="utf-8", newline="") as text:
                    table = list(csv.DictReader(text))
            rows = checked_rows(str(path), "row", enumerate(table, 1), checked)
        else:
            with path.open("rb") as file:
                lines = ((number, line) for number, line in enumerate(file, 1) if line.strip())
                rows = checked_rows(str(path), "line", lines, lambda line: checked(json_of_line(line)))
    except (ValueError, OSError, csv.Error) as error:
        raise ToolError(f"{path} can't be read: {error}") from error
    if not rows:
        raise ToolError(f"{path} is empty")
    return rows


def hub_rows(name: str, config: str, split: str, *, otherwise: str) -> list[Row]:
    """Return a split of a dataset of the Hugging Face hub, from its cache or by download.

    :param otherwise: how the user gets the data where that fails.
    """
    load = import_module("datasets").load_dataset
    try:
        rows: list[Row] = load(name, config, split=split).to_list()
    except Exception as error:  # no network, offline, gated, not in the cache: many libraries raise here
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ToolError(f"no data of {name}: {otherwise} (Hugging Face: {reason:.200})") from error
    return rows
