"""bench.json: a whole result, written and read."""

from __future__ import annotations

import json
import math
import types
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from deepseek_triton_tools.bench.results.bench_result import BenchResult
from deepseek_triton_tools.host.whole_file import whole_file
from deepseek_triton_tools.tool_errors import ToolError

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
        return _result(path.read_text("utf-8"))
    except OSError as error:
        raise ToolError(f"{path} can't be read: {error.strerror}") from error
    except ValueError as error:  # JSON's and UTF-8's are such errors too
        raise ToolError(f"{path}: expected what deepseek-triton bench writes, {SCHEMA}; {error}") from error


def _result(text: str) -> BenchResult:
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
