"""A result as CSV: a row for each run, a column for each number, and the same columns in every file."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from deepseek_triton_tools.bench.load.load_settings import LoadPoint
from deepseek_triton_tools.bench.measuring.figures import Distribution, Figures
from deepseek_triton_tools.bench.results.bench_result import BenchResult, BenchRun


def csv_text(result: BenchResult) -> str:
    """Return the file's text; what is unknown is empty."""
    rows = [
        _row(result, point.load, number, run)
        for point in result.points
        for number, run in enumerate(point.runs, start=1)
    ]
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0] if rows else (), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _row(result: BenchResult, load: LoadPoint, number: int, run: BenchRun) -> dict[str, Any]:
    return {
        "date": result.date,
        "model": result.model,
        "endpoint": result.endpoint,
        "dataset": result.dataset,
        "gpus": result.gpus,
        "load": load.label,
        "concurrency": load.concurrency,
        "rate": load.rate,
        "burstiness": load.burstiness,
        "num_requests": load.num_requests,
        "run": number,
        "interrupted": int(run.interrupted),
        **dict(_numbers(run.figures)),
    }


def _numbers(figures: Figures) -> Iterator[tuple[str, float | None]]:
    for each in fields(figures):
        value = getattr(figures, each.name)
        if isinstance(value, Distribution):
            yield from ((f"{each.name}_{part.name}", getattr(value, part.name)) for part in fields(value))
        elif not isinstance(value, dict):
            yield each.name, value
