"""The file of answers: JSON Lines, written as each answer comes, so that a run that was stopped can go on.

Its first line says which server answered. A question is known again by a hash of what was sent.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deepseek_triton_tools.tool_errors import ToolError


class KeptAnswers:
    """Answers by the hash of their question; `num_before` of them are of an earlier run."""

    def __init__(self, descriptor: int, records: dict[str, dict[str, Any]]) -> None:
        self._descriptor = descriptor
        self._records = records
        self.num_before = len(records)

    def get(self, key: str) -> dict[str, Any] | None:
        return self._records.get(key)

    def add(self, key: str, record: Mapping[str, Any]) -> None:
        self._records[key] = dict(record)
        _append(self._descriptor, {"key": key, **record})


@contextmanager
def open_answers(path: Path, server: Mapping[str, Any], *, overwrite: bool) -> Iterator[KeptAnswers]:
    """Open the file, or begin it. `server` is what the answers depend on beside the question.

    Raises ToolError where another run writes the file, or where it holds answers of another server.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ToolError(f"{path} is being written by another run") from error
        if overwrite:
            os.ftruncate(descriptor, 0)
        lines = _whole_lines(descriptor, path)
        if not lines:
            _append(descriptor, {"server": dict(server)})
        else:
            _check_server(path, lines[0].get("server"), server)
        yield KeptAnswers(descriptor, {line["key"]: line for line in lines[1:]})
    finally:
        os.close(descriptor)


def _append(descriptor: int, record: Mapping[str, Any]) -> None:
    left = memoryview(json.dumps(record, ensure_ascii=False).encode() + b"\n")
    while left:
        left = left[os.write(descriptor, left) :]


def _whole_lines(descriptor: int, path: Path) -> list[dict[str, Any]]:
    """Read the lines, and cut off half a one: the program was killed while it wrote."""
    with open(descriptor, "rb", closefd=False) as file:
        content = file.read()
    end = content.rfind(b"\n") + 1
    try:
        lines = [json.loads(line) for line in content[:end].splitlines()]
        well_formed = all(isinstance(line, dict) for line in lines) and all(
            isinstance(line.get("key"), str) for line in lines[1:]
        )
    except (ValueError, RecursionError):
        well_formed = False
    if not well_formed:
        raise ToolError(f"{path} is no file of answers: give another --output, or --overwrite")
    os.ftruncate(descriptor, end)
    return lines


def _check_server(path: Path, before: Any, now: Mapping[str, Any]) -> None:
    if before != dict(now):
        known = before if isinstance(before, dict) else {}
        changed = "; ".join(
            f"{name} was {known.get(name)!r} and is {now.get(name)!r}"
            for name in sorted({*known, *now})
            if known.get(name) != now.get(name)
        )
        raise ToolError(
            f"{path} holds answers of another server or model ({changed}): give another --output, or --overwrite"
        )
