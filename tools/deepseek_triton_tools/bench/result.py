"""A whole benchmark, and its files: bench.json, figures.csv and the records of requests."""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import types
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from deepseek_triton_tools.bench.figures import Distribution, Figures, MetricSummary, Slo, TimelineBin
from deepseek_triton_tools.bench.targets import RequestRecord
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
    """Read a file that `write_result` wrote, or FILE_NAME in a folder. Raises ToolError."""
    path = path / FILE_NAME if path.is_dir() else path
    try:
        return _result_of(path.read_text("utf-8"))
    except OSError as error:
        raise ToolError(f"{path} can't be read: {error.strerror}") from error
    except ValueError as error:  # JSON's and UTF-8's are such errors too
        raise ToolError(f"{path}: expected what deepseek-triton bench writes, {SCHEMA}; {error}") from error


def _result_of(text: str) -> BenchResult:
    """Raises ValueError, which names the first field that is wrong."""
    document = json.loads(text)
    found = document.get("schema") if isinstance(document, dict) else None
    if found != SCHEMA:
        raise ValueError(f"its schema is {found!r}")
    result: BenchResult = _parsed(BenchResult, document, "")
    return result


_NUMBERS = {"inf": math.inf}


def _parsed(kind: Any, value: Any, where: str) -> Any:
    """Return `value`, which JSON gave, as a `kind`. Keys that are not known here were added by a newer version."""
    if is_dataclass(kind):
        _expect(isinstance(value, dict), "an object", value, where)
        kinds = get_type_hints(kind)
        needed = [each.name for each in fields(kind) if each.default is MISSING and each.default_factory is MISSING]
        lacking = [name for name in needed if name not in value]
        _expect(not lacking, f"an object with {', '.join(lacking)}", value, where)
        given = {name: _parsed(kinds[name], value[name], f"{where}.{name}") for name in kinds if name in value}
        return kind(**given)  # type: ignore[operator]
    origin, args = get_origin(kind), get_args(kind)
    if origin is tuple:
        _expect(isinstance(value, list), "a list", value, where)
        return tuple(_parsed(args[0], each, f"{where}[{number}]") for number, each in enumerate(value))
    if origin in (dict, Mapping):
        _expect(isinstance(value, dict), "an object", value, where)
        return {key: _parsed(args[1], each, f"{where}.{key}") for key, each in value.items()}
    if origin in (Union, types.UnionType):  # X | None
        return None if value is None else _parsed(args[0], value, where)
    if kind is Any:
        return value
    if kind is float:
        value = _NUMBERS.get(value, value) if isinstance(value, str) else value
        _expect(isinstance(value, int | float) and not isinstance(value, bool), "a number", value, where)
        return float(value)
    _expect(type(value) is kind, {int: "a whole number", str: "text", bool: "true or false"}[kind], value, where)
    return value


def _expect(is_so: bool, what: str, value: Any, where: str) -> None:
    if not is_so:
        raise ValueError(f"{where.lstrip('.') or 'all of it'}: expected {what}, got {value!r:.100}")


def csv_text(result: BenchResult) -> str:
    """Return the file's text; what is unknown is empty."""
    rows = [
        _csv_row(result, point.load, number, run)
        for point in result.points
        for number, run in enumerate(point.runs, start=1)
    ]
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0] if rows else (), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _csv_row(result: BenchResult, load: LoadPoint, number: int, run: BenchRun) -> dict[str, Any]:
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


_DIGITS = 6
"""Times are written in microseconds, which halves the file."""


def write_samples(records: Iterable[RequestRecord], path: Path) -> None:
    """Write a line for each request, whole or not at all; compressed where the name ends in .gz. Raises ToolError."""
    with whole_file(path) as file:
        file.writelines(json.dumps(_sample(record), separators=(",", ":")) + "\n" for record in records)


def read_samples(path: Path) -> list[RequestRecord]:
    """Read what `write_samples` wrote. Raises ToolError, which names the first line that is wrong."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            return list(_records(file, path))
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ToolError(f"{path} can't be read: {getattr(error, 'strerror', None) or error}") from error


def _sample(record: RequestRecord) -> dict[str, Any]:
    sample = {each.name: getattr(record, each.name) for each in fields(record)}
    times = {
        name: value if value is None else round(value, _DIGITS) for name, value in sample.items() if name in _TIMES
    }
    chunk_s = [round(time, _DIGITS) for time in record.chunk_s]
    return sample | times | {"chunk_s": chunk_s, "chunk_tokens": list(record.chunk_tokens)}


_TIMES = {"due_s", "sent_s", "ended_s"}


def _records(lines: Iterable[str], path: Path) -> Iterator[RequestRecord]:
    for number, line in enumerate(lines, start=1):
        try:
            sample = json.loads(line)
            sample |= {"chunk_s": array("d", sample["chunk_s"]), "chunk_tokens": array("i", sample["chunk_tokens"])}
            yield RequestRecord(**sample)
        except (ValueError, TypeError, KeyError) as error:
            raise ToolError(f"{path}, line {number}: expected the record of a request; {error}") from error
