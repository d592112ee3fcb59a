"""The records of a run as a file of JSON Lines, from which figures can be computed again."""

from __future__ import annotations

import gzip
import json
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from deepseek_triton_tools.bench.measuring.request_record import RequestRecord
from deepseek_triton_tools.host.whole_file import whole_file
from deepseek_triton_tools.tool_errors import ToolError

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
