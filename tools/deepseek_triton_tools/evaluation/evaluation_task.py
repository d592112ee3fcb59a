"""One task: lm-evaluation-harness's own description of it, and what is reported of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


def rows_as_dataset(**splits: Sequence[Row]) -> Callable[..., Mapping[str, Any]]:
    """Return lm-eval's `custom_dataset`: these rows, by split."""

    def dataset(**_: Any) -> Mapping[str, Any]:
        from importlib import import_module

        from_rows = import_module("datasets").Dataset.from_list
        return {name: from_rows(list(rows)) for name, rows in splits.items()}

    return dataset


def metric(name: str) -> dict[str, Any]:
    return {"metric": name, "aggregation": "mean", "higher_is_better": True}
