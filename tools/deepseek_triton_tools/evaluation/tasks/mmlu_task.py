"""MMLU: questions on 57 subjects with four choices, after five solved ones of the subject. The model writes the letter.

trtllm-eval has code of its own for it (TensorRT-LLM tensorrt_llm/evaluate/mmlu.py): at most two tokens, which have to
begin with the letter, and prompts of at most 4,094 tokens. It reads the files with pandas, so that a column of numbers
loses its form and an empty cell or "None" is written "nan"; the same is done here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from math import ceil
from pathlib import Path
from typing import Any

from deepseek_triton_tools.evaluation.evaluation_task import EvaluationTask, Row, metric, rows_as_dataset
from deepseek_triton_tools.evaluation.task_data import hub_rows
from deepseek_triton_tools.tool_errors import ToolError

_LETTERS = "ABCD"
_WHERE = "give --data the unpacked folder of people.eecs.berkeley.edu/~hendrycks/data.tar, which has dev and test"

Cells = Sequence[Any]
"""Question, choices, letter of the right one."""


def mmlu(data: Path | None, *, num_fewshot: int | None, limit: int | None) -> EvaluationTask:
    """Raises ToolError where there is no data. `limit` takes as many questions of each subject, chosen by seed 0."""
    shots = 5 if num_fewshot is None else num_fewshot
    rows = list(_questions(data, shots, limit))
    if not any(row["answer"] in _LETTERS for row in rows):
        raise ToolError(f"MMLU: expected the letter of the right choice in the last column; {_WHERE}")
    subjects = sorted({row["subject"] for row in rows})
    config = {
        "task": "mmlu",
        "output_type": "generate_until",
        "custom_dataset": rows_as_dataset(test=rows),
        "test_split": "test",
        "doc_to_text": "prompt",
        "doc_to_target": "answer",
        "process_results": _scores,
        "metric_list": [metric(name) for name in ("acc", *subjects)],
        "generation_kwargs": {"until": [], "temperature": 0.0, "max_gen_toks": 2, "truncate_prompt_tokens": 4094},
        "num_fewshot": 0,  # the prompt has them
    }
    return EvaluationTask(name="mmlu", config=config, metrics=("acc,none",), is_cut=True)


def _scores(doc: Row, answers: Sequence[str]) -> dict[str, float]:
    right = float(answers[0].strip().startswith(doc["answer"]))
    return {"acc": right, doc["subject"]: right}


def _questions(data: Path | None, shots: int, limit: int | None) -> Iterator[Row]:
    tables = _hub_tables() if data is None else _own_tables(data)
    chosen = import_module("numpy").random.RandomState(0)
    each = None if limit is None else ceil(limit / len(tables))
    for subject, (dev, test) in tables.items():
        # Two blanks, because trtllm-eval writes one before each word of the subject.
        head = f"The following are multiple choice questions (with answers) about  {subject.replace('_', ' ')}.\n\n"
        head += "".join(f"{_question(cells)} {cells[-1]}\n\n" for cells in _cells(dev)[:shots])
        asked = test.sample(each, random_state=chosen) if each is not None and each < len(test) else test
        for cells in _cells(asked):
            yield {"subject": subject, "prompt": head + _question(cells), "answer": str(cells[-1])}


def _cells(table: Any) -> list[Cells]:
    return list(table.itertuples(index=False, name=None))


def _question(cells: Cells) -> str:
    choices = (f"\n{letter}. {choice}" for letter, choice in zip(_LETTERS, cells[1:-1], strict=False))
    return f"{cells[0]}{''.join(choices)}\nAnswer:"


def _own_tables(data: Path) -> dict[str, tuple[Any, Any]]:
    """Return the questions for examples and those to ask, by subject."""
    read = import_module("pandas").read_csv
    folder = next((path for path in (data, data / "data") if (path / "dev").is_dir()), None)
    tests = sorted((folder / "test").glob("*_test.csv")) if folder else []
    if folder is None or not tests:
        raise ToolError(f"--data {data}: expected the folders dev and test with a CSV file for each subject; {_WHERE}")
    tables = {}
    for test in tests:
        subject = test.name.removesuffix("_test.csv")
        dev = folder / "dev" / f"{subject}_dev.csv"
        if not dev.is_file():
            raise ToolError(f"--data {data}: {test.name} has no {dev.name} in dev")
        tables[subject] = (read(dev, header=None), read(test, header=None))
    return tables


def _hub_tables() -> dict[str, tuple[Any, Any]]:
    table = import_module("pandas").DataFrame
    found: dict[str, tuple[list[Cells], list[Cells]]] = {}
    for number, split in enumerate(("dev", "test")):
        for row in hub_rows("cais/mmlu", "all", split, otherwise=_WHERE):
            cells = (row["question"], *row["choices"], _LETTERS[row["answer"]])
            found.setdefault(row["subject"], ([], []))[number].append(cells)
    return {subject: (table(dev), table(test)) for subject, (dev, test) in sorted(found.items())}
