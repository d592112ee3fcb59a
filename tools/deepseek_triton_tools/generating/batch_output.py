"""The output of a batch: JSON Lines, one for each row of the input, in the same order, written as soon as known."""

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
    """A file that grows by whole rows. Nothing is buffered, so a write that fails fails at its row."""

    def __init__(self, descriptor: int, name: str, *, can_resume: bool) -> None:
        self._descriptor = descriptor
        self.name = name
        self.can_resume = can_resume
        """Whether it is a regular file, opened to append."""
        self._end: int | None = None
        """End of the answers that are kept. The rest of the file stays until there is a row to put in its place."""

    def begin(self, rows: Iterable[BatchRow], *, resume: bool) -> int:
        """Return how many of `rows` are answered already: the batch goes on after them.

        Failed rows at the end of the file don't count as answered, because a server that had gone is the usual reason
        to resume. Raises ToolError when the file holds answers to other rows.
        """
        if not self.can_resume:
            return 0
        num_answered, self._end = self._answered(rows) if resume else (0, 0)
        return num_answered

    def write(self, row: BatchRow, answer: Completion | DeepseekTritonError) -> None:
        """Raises ToolError when the disk takes no more."""
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
            raise  # the reader has left, which is no failure
        except OSError as error:
            hint = "; --resume goes on" if self.can_resume else ""
            raise ToolError(f"{self.name} can't be written: {error.strerror}{hint}") from error

    def finish(self) -> None:
        """Cut off what is behind the answers that are kept."""
        if self._end is not None:
            os.ftruncate(self._descriptor, self._end)
            self._end = None

    def _answered(self, rows: Iterable[BatchRow]) -> tuple[int, int]:
        """Count the rows up to the last one with an answer, and find where in the file they end."""
        num_answered = end = position = 0
        expected = iter(rows)
        with open(self._descriptor, "rb", closefd=False) as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    break  # half a line: the program was killed while it wrote
                record = self._record(number, line)
                self._check_row(number, record, next(expected, None))
                position += len(line)
                if "error" not in record:
                    num_answered, end = number, position
        return num_answered, end

    def _check_row(self, number: int, record: dict[str, Any], row: BatchRow | None) -> None:
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
    """Open the output; `-` is standard output. The file's content stays until there is an answer to write.

    With `keep` the file may exist. Raises ToolError when it may not, can't be written, or another run writes it.
    """
    if str(path) == "-":
        yield Output(sys.stdout.fileno(), "standard output", can_resume=False)
        return
    is_file = os.path.isfile(path) or not os.path.exists(path)  # not a device or a named pipe
    try:
        descriptor = _open_to_append(path, keep=keep) if is_file else os.open(path, os.O_WRONLY)
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
            path.unlink()  # this run made the file and wrote nothing
        raise
    finally:
        os.close(descriptor)


def _open_to_append(path: Path, *, keep: bool) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | (0 if keep else os.O_EXCL), 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
