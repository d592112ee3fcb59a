"""The output of a batch: JSON Lines, a line for each row of the input in its order, on disk as soon as it is known."""

from __future__ import annotations

import fcntl
import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deepseek_triton_client import Completion, DeepseekTritonError
from deepseek_triton_tools.generating.batch_input import BatchRow
from deepseek_triton_tools.generating.completion_records import as_json, completion_record, error_record
from deepseek_triton_tools.tool_errors import ToolError


class Output:
    """A file that grows by whole rows. Nothing is buffered, so nothing is lost or left to fail later."""

    def __init__(self, descriptor: int, name: str, *, can_resume: bool) -> None:
        self._descriptor = descriptor
        self.name = name
        self.can_resume = can_resume
        """It is a file proper, opened to append."""
        self._end: int | None = None
        """Where the answers end that are kept. What is behind stays until there is something to put in its place."""

    def begin(self, rows: Iterable[BatchRow], *, resume: bool) -> int:
        """How many of `rows` are answered already, which is where to go on.

        Rows that failed at the very end are not: a server that was gone is the usual reason to go on.

        :raises ToolError: when the answers in it are not of these rows.
        """
        if not self.can_resume:
            return 0
        num_answered, self._end = self._answered(rows) if resume else (0, 0)
        return num_answered

    def write(self, row: BatchRow, answer: Completion | DeepseekTritonError) -> None:
        """:raises ToolError: when the disk takes no more."""
        self.finish()
        record: dict[str, Any] = {"id": row.id, "input": row.digest}
        if isinstance(answer, DeepseekTritonError):
            record["error"] = error_record(answer)
        else:
            record |= completion_record(answer)
        left = memoryview(as_json(record).encode() + b"\n")
        try:
            while left:
                left = left[os.write(self._descriptor, left) :]
        except BrokenPipeError:
            raise  # nobody reads it any more, which is no failure
        except OSError as error:
            hint = "; --resume goes on" if self.can_resume else ""
            raise ToolError(f"{self.name} can't be written: {error.strerror}{hint}") from error

    def finish(self) -> None:
        """Drop what is not kept."""
        if self._end is not None:
            os.ftruncate(self._descriptor, self._end)
            self._end = None

    def _answered(self, rows: Iterable[BatchRow]) -> tuple[int, int]:
        """The rows up to the last one with an answer, and where in the file they end."""
        num_answered = end = position = 0
        expected = iter(rows)
        with open(self._descriptor, "rb", closefd=False) as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    break  # torn when the program was killed
                record = self._record(number, line)
                self._match(number, record, next(expected, None))
                position += len(line)
                if "error" not in record:
                    num_answered, end = number, position
        return num_answered, end

    def _match(self, number: int, record: dict[str, Any], row: BatchRow | None) -> None:
        if row is None or (record.get("id"), record.get("input")) != (row.id, row.digest):
            found = "ends before" if row is None else f"has another row {row.id!r} there"
            raise ToolError(
                f"{self.name} line {number} answers row {record.get('id')!r}, and the input {found}: "
                "give another --output, or --overwrite"
            )

    def _record(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict):
            raise ToolError(f"{self.name} line {number} is no answer of a batch: give another --output, or --overwrite")
        return record


@contextmanager
def open_output(path: Path, *, keep: bool) -> Iterator[Output]:
    """`-` is standard output. What is in the file stays until there is an answer to write.

    :raises ToolError: when it can't be written, another run writes it, or it is there and is not to be kept.
    """
    if str(path) == "-":
        yield Output(sys.stdout.fileno(), "standard output", can_resume=False)
        return
    is_file = path.is_file() or not path.exists()  # and no device or named pipe
    try:
        descriptor = _opened(path, keep=keep) if is_file else os.open(path, os.O_WRONLY)
    except FileExistsError as error:
        message = f"{path} is there already: --resume goes on where it ends, --overwrite begins anew"
        raise ToolError(message, exit_code=2) from error
    except BlockingIOError as error:
        raise ToolError(f"{path} is being written by another run") from error
    except OSError as error:
        raise ToolError(f"{path} can't be written: {error.strerror}") from error
    try:
        yield Output(descriptor, str(path), can_resume=is_file)
    except BaseException:
        if is_file and os.fstat(descriptor).st_size == 0:
            path.unlink()  # made for nothing
        raise
    finally:
        os.close(descriptor)


def _opened(path: Path, *, keep: bool) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | (0 if keep else os.O_EXCL), 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
