"""A whole benchmark, and its files: bench.json, figures.csv and the records of requests."""

from __future__ import annotations

import csv
import io
import json
import math
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from deepseek_triton_tools.bench.figures import Distribution, Figures, MetricSummary, RequestRecord, Slo, TimelineBin
from deepseek_triton_tools.bench.workload import LoadPoint
from deepseek_triton_tools.host.whole_file import whole_file
from deepseek_triton_tools.tool_errors import ToolError


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRun:
    figures: Figures
    timeline: tuple[TimelineBin, ...] = ()
    server_metrics: Mapping[str, MetricSummary] = field(default_factory=dict)
    """Series of the servers' /metrics, GPU telemetry too, by name with labels."""
    interrupted: bool = False
    """Ctrl-C ended it early."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPoint:
    load: LoadPoint
    runs: tuple[BenchRun, ...]
    """Repeated runs of the same load, at least one."""

    @property
    def whole_runs(self) -> tuple[BenchRun, ...]:
        return tuple(run for run in self.runs if not run.interrupted)

    @property
    def counted_runs(self) -> tuple[BenchRun, ...]:
        """Those that figures are of: the whole runs, or the interrupted one if it is the only one."""
        return self.whole_runs or self.runs

    @property
    def label(self) -> str:
        """The load's name, which says so if a run was interrupted."""
        return self.load.label + (", interrupted" if len(self.whole_runs) < len(self.runs) else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """This is written as bench.json, and every table and picture is made of it."""

    date: str
    """ISO 8601, UTC."""
    urls: tuple[str, ...]
    endpoint: str
    """triton-http, triton-grpc or openai."""
    model: str
    gpus: int | None
    dataset: str
    """The dataset in a few words: its kind and lengths."""
    slo: Slo
    points: tuple[BenchPoint, ...]
    command: str = ""
    preset: str = ""
    server: Mapping[str, Any] = field(default_factory=dict)
    """The server's own words: engine, variant, limits."""


FILE_NAME = "bench.json"
SCHEMA = "deepseek-triton/bench/1"
"""Its number grows when a field goes or means something else; a field with a default may be added."""


def write_result(result: BenchResult, path: Path) -> None:
    """Write it whole or not at all. Raises ToolError."""
    write_document(result_document(result), path)


def result_document(result: BenchResult) -> dict[str, Any]:
    """Return the result as JSON has it. Infinity becomes "inf"."""
    document = {"schema": SCHEMA, **asdict(result)}
    for point in document["points"]:
        if point["load"]["rate"] == math.inf:
            point["load"]["rate"] = "inf"
    return document


def write_document(document: Mapping[str, Any], path: Path) -> None:
    """Write JSON, whole or not at all. Raises ToolError."""
    with whole_file(path) as file:
        json.dump(document, file, indent=1, allow_nan=False)
        file.write("\n")


def read_result(path: Path) -> BenchResult:
    """Read a file that `write_result` wrote, or FILE_NAME in a folder.

    :raises ToolError: where it can't be read; it names the first field that is wrong.
    """
    path = path / FILE_NAME if path.is_dir() else path
    try:
        document = json.loads(path.read_text("utf-8"))
        schema = document.get("schema") if isinstance(document, dict) else None
        if schema != SCHEMA:
            raise ValueError(f"its schema is {schema!r}")
        result: BenchResult = from_document(BenchResult, document)
    except OSError as error:
        raise ToolError(f"{path} can't be read: {error.strerror}") from error
    except ValueError as error:  # JSON's and UTF-8's are such errors too
        raise ToolError(f"{path}: expected what deepseek-triton bench writes, {SCHEMA}; {error}") from error
    return result


def from_document(kind: Any, value: Any, where: str = "") -> Any:
    """Return `value`, which JSON or YAML gave, as a `kind`, such as a dataclass or `tuple[int, ...]`. Keys that are not
    known here were added by a newer version.

    :raises ValueError: which names the first field that is wrong, below `where`.
    """

    def expect(is_so: bool, what: str) -> None:
        if not is_so:
            raise ValueError(f"{where.lstrip('.') or 'all of it'}: expected {what}, got {value!r:.100}")

    if is_dataclass(kind):
        expect(isinstance(value, dict), "an object")
        kinds = get_type_hints(kind)
        needed = [each.name for each in fields(kind) if each.default is MISSING and each.default_factory is MISSING]
        lacking = [name for name in needed if name not in value]
        expect(not lacking, f"an object with {', '.join(lacking)}")
        parts = {name: from_document(kinds[name], value[name], f"{where}.{name}") for name in kinds if name in value}
        return kind(**parts)  # type: ignore[operator]
    origin, args = get_origin(kind), get_args(kind)
    if origin is tuple:
        expect(isinstance(value, list), "a list")
        return tuple(from_document(args[0], each, f"{where}[{number}]") for number, each in enumerate(value))
    if origin in (dict, Mapping):
        expect(isinstance(value, dict), "an object")
        return {key: from_document(args[1], each, f"{where}.{key}") for key, each in value.items()}
    if origin in (Union, types.UnionType):  # X | None
        return None if value is None else from_document(args[0], value, where)
    if kind is Any:
        return value
    if kind is float:
        value = math.inf if value == "inf" else value
        expect(isinstance(value, int | float) and not isinstance(value, bool), "a number")
        return float(value)
    expect(type(value) is kind, {int: "a whole number", str: "text", bool: "true or false"}[kind])
    return value


# --- figures.csv ---


def csv_text(result: BenchResult) -> str:
    """A row for each run, a column for each number, and the same columns in every file; what is unknown is empty."""
    rows = [
        {
            "date": result.date,
            "model": result.model,
            "endpoint": result.endpoint,
            "dataset": result.dataset,
            "gpus": result.gpus,
            "load": point.load.label,
            "concurrency": point.load.concurrency,
            "rate": point.load.rate,
            "burstiness": point.load.burstiness,
            "num_requests": point.load.num_requests,
            "run": number,
            "interrupted": int(run.interrupted),
            **dict(_numbers(run.figures)),
        }
        for point in result.points
        for number, run in enumerate(point.runs, start=1)
    ]
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0] if rows else (), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _numbers(figures: Figures) -> Iterator[tuple[str, float | None]]:
    for each in fields(figures):
        value = getattr(figures, each.name)
        if isinstance(value, Distribution):
            yield from ((f"{each.name}_{part.name}", getattr(value, part.name)) for part in fields(value))
        elif not isinstance(value, dict):
            yield each.name, value


# --- The records of a run ---

_DIGITS = 6
"""Times are written in microseconds, which halves the file."""
_TIMES = ("due_s", "sent_s", "ended_s")


def write_samples(records: Iterable[RequestRecord], path: Path) -> None:
    """Write a line of JSON for each request, whole or not at all; compressed where the name ends in .gz.

    :raises ToolError: where it can't be written.
    """
    with whole_file(path) as file:
        for record in records:
            sample = {each.name: getattr(record, each.name) for each in fields(record)}
            sample |= {name: round(sample[name], _DIGITS) for name in _TIMES if sample[name] is not None}
            sample["chunk_s"] = [round(time, _DIGITS) for time in record.chunk_s]
            sample["chunk_tokens"] = list(record.chunk_tokens)
            file.write(json.dumps(sample, separators=(",", ":")) + "\n")
