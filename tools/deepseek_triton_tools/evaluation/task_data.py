"""Finds the data of a task: the user's own copy, Hugging Face's cache, or a download.

The data of GSM8K, MMLU and GPQA is never part of this project.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from deepseek_triton_tools.evaluation.evaluation_task import Row
from deepseek_triton_tools.tool_errors import ToolError


def found_file(data: Path, patterns: Sequence[str], wanted: str) -> Path:
    """Return `data` itself where it is a file, else the first file below it that fits a pattern."""
    if data.is_file():
        return data
    if not data.is_dir():
        raise ToolError(f"--data {data}: there is no such file or folder; expected {wanted}")
    for pattern in patterns:
        for path in sorted(data.glob(pattern)):
            return path
    raise ToolError(f"--data {data}: expected {wanted}, found no {' or '.join(patterns)}")


def read_rows(path: Path, keys: Sequence[str]) -> list[Row]:
    """Read a file as JSON Lines, CSV with a heading, or Parquet, by its name. Raises ToolError where it is none, is
    empty, or a row lacks a key."""
    try:
        rows = _read_rows(path)
    except (ValueError, OSError, csv.Error) as error:
        raise ToolError(f"{path} can't be read: {error}") from error
    if not rows:
        raise ToolError(f"{path} is empty")
    for number, row in enumerate(rows, start=1):
        missing = [key for key in keys if not isinstance(row, dict) or row.get(key) is None]
        if missing:
            raise ToolError(f"{path} row {number}: expected the keys {', '.join(keys)}; it lacks {', '.join(missing)}")
    return rows


def _read_rows(path: Path) -> list[Any]:
    if path.suffix == ".parquet":
        rows: list[Any] = import_module("pandas").read_parquet(path).to_dict("records")
        return rows
    if path.suffix == ".csv":
        with path.open(encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file))
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file if line.strip()]


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
