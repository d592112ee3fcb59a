"""A batch: many requests from JSON Lines, many at once, and the answers in the same order.

All of the input is checked before anything is sent, and it is never all in memory. The output has one line for each row
of the input, in the same order, written as soon as known.
"""

import fcntl
import hashlib
import json
import os
import shutil
import stat
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any

from deepseek_triton_client import (
    AccessDenied,
    Client,
    Completion,
    DeadlineExceeded,
    DeepseekTritonError,
    InvalidRequest,
    ModelNotFound,
    SamplingParams,
    ServerUnavailable,
    Timeouts,
)
from deepseek_triton_client._core.checked_request import batch_request
from deepseek_triton_tools.generating import records
from deepseek_triton_tools.host.whole_file import part_of
from deepseek_triton_tools.terminal.output_streams import complain
from deepseek_triton_tools.terminal.status_line import StatusLine, clock
from deepseek_triton_tools.tool_errors import ToolError


def run_batch(
    input: Path,
    output: Path,
    params: SamplingParams,
    connect: Callable[[], Client],
    *,
    chat: bool,
    system: str | None,
    concurrency: int,
    resume: bool,
    overwrite: bool,
    max_failures: int | None,
    patience_s: float,
    by_contract: bool,
) -> int:
    """Answer every row of `input` into `output`; `-` is standard input or output. Returns 1 when some rows failed.

    :param params: sampling of every row; the fields of a row win over them.
    :param connect: makes the client when there is something to send.
    :param chat: send prompts as messages, by the model's chat template.
    :param system: the system message of every row that has none of its own.
    :param concurrency: number of requests that are under way at once.
    :param resume: ask what the output lacks, and what failed in it; `overwrite`: begin it anew.
    :param max_failures: stop when this many rows have failed.
    :param patience_s: wait as long for a server that is lost after the first answer; 0: end.
    :param by_contract: refuse what the wire contract does; servers of others may take it.
    :raises ToolError: when a row is wrong or a file can't be used, before anything is sent.
    :raises DeepseekTritonError: when the server can't be had, at all or any more.
    """
    with open_input(input) as file:
        rows = BatchRows(file, records.file_name(input), params, chat, system, by_contract)
        total = rows.check()
        with open_output(output, keep=resume or overwrite) as answers:
            done = answers.begin(rows, resume=resume)
            progress = BatchProgress(total, done - len(answers.failed))
            resumes_in = answers.name if answers.can_resume else ""
            try:
                with connect() as client:
                    send = partial(client.generate_many, concurrency=concurrency, params=params, return_errors=True)
                    asked = (row for row in islice(rows, total) if row.number > done or row.number in answers.failed)
                    _answer(send, asked, answers, progress, max_failures, partial(_wait, client, patience_s))
            except BaseException:
                progress.clear()
                if progress.answered:
                    answers.finish()
                if progress.done:
                    complain(f"stopped: {progress.summary(resumes_in, was_left=True)}")
                raise
            answers.finish()
    progress.clear()
    complain(progress.summary(resumes_in if progress.done < total or progress.failed else ""))
    return 1 if progress.failed else 0


def _answer(
    send: Callable[[Iterator[records.Request]], Generator[Completion | DeepseekTritonError, None, None]],
    rows: "Iterator[BatchRow]",
    output: "Output",
    progress: "BatchProgress",
    max_failures: int | None,
    wait: Callable[[ServerUnavailable, float], None],
) -> None:
    unanswered: deque[BatchRow] = deque()  # rows that were sent: their answers come in the same order
    lost_since: float | None = None

    def requests() -> Iterator[records.Request]:
        again = [*unanswered]
        unanswered.clear()
        for row in chain(again, rows):
            unanswered.append(row)
            yield row.request

    while True:
        with closing(send(requests())) as answers:
            for answer in answers:
                if isinstance(answer, Completion):
                    answer = records.cut_off_error(answer) or answer
                if isinstance(answer, DeepseekTritonError) and fails_every_request(answer):
                    if not (progress.answered and isinstance(answer, ServerUnavailable)):
                        raise answer
                    break
                lost_since = None
                row = unanswered.popleft()
                output.write(row, answer)
                if not isinstance(answer, Completion) and progress.errors.setdefault(answer.code, answer) is answer:
                    progress.clear()
                    complain(f"line {row.number}: {answer}")
                progress.count(None if isinstance(answer, DeepseekTritonError) else answer.num_output_tokens or 0)
                if progress.failed == max_failures:
                    return
            else:
                return
        lost_since = lost_since or time.monotonic()
        progress.clear()
        wait(answer, lost_since)


def _wait(client: Client, patience_s: float, lost: ServerUnavailable, since: float) -> None:
    """Wait until a server is ready, or raise `lost` when it has been away for `patience_s` seconds."""
    left_s = since + patience_s - time.monotonic()
    if left_s <= 0:
        raise lost
    complain(f"waiting for the server: {lost.message}")
    with suppress(DeadlineExceeded):  # then the next request raises
        client.wait_until_ready(left_s)


def fails_every_request(error: DeepseekTritonError) -> bool:
    """Whether every other request would fail in the same way."""
    return isinstance(error, (AccessDenied, ModelNotFound)) or (
        isinstance(error, ServerUnavailable) and error.unprocessed
    )


class BatchProgress:
    def __init__(self, total: int, done: int) -> None:
        """`done`: how many of the `total` rows an earlier run has answered."""
        self._total = total
        self._before = self.done = done
        self.failed = self._num_tokens = 0
        self.errors: dict[str | None, DeepseekTritonError] = {}  # the first of each code
        self._started = time.monotonic()
        self._status = StatusLine()
        if self._status.is_terminal:
            self._status.show(self._line)

    @property
    def answered(self) -> int:
        """Rows that this run has answered, failed ones not counted."""
        return self.done - self._before - self.failed

    def count(self, num_tokens: int | None) -> None:
        """`num_tokens`: those of the answer, 0 where the server doesn't count them; None for a failure."""
        self.done += 1
        self.failed += num_tokens is None
        self._num_tokens += num_tokens or 0
        self._status.show(self._line)

    def clear(self) -> None:
        """Empty the terminal's line, for other output."""
        self._status.clear()

    def summary(self, resumes_in: str, *, was_left: bool = False) -> str:
        elapsed = time.monotonic() - self._started
        failed = f", {self.failed} failed" if self.failed else ""
        before = f" ({self._before} by an earlier run)" if self._before else ""
        refused = not was_left and all(isinstance(error, InvalidRequest) for error in self.errors.values())
        how = "mend the options or the rows, then" if refused else "the same command with"
        return (
            f"{self.done} of {self._total} rows done{before}{failed}; "
            f"{self._num_tokens:,} tokens in {elapsed:.1f} s, {self._rate():,.0f} tokens/s"
            + (f"; {how} --resume goes on in {resumes_in}" if resumes_in else "")
        )

    def _line(self) -> str:
        left = self._total - self.done
        done_now = self.done - self._before
        elapsed = time.monotonic() - self._started
        eta = f", {clock(elapsed / done_now * left)} left" if done_now and left else ""
        return f"{self.done}/{self._total} done, {self.failed} failed, {self._rate():,.0f} tokens/s{eta}"

    def _rate(self) -> float:
        return self._num_tokens / max(time.monotonic() - self._started, 1e-9)


@dataclass(frozen=True)
class BatchRow:
    """One line of the input."""

    number: int
    """Number of the line, from 1."""
    id: Any
    """The line's own "id", else its "request_id", else `number`."""
    digest: str
    """A hash of the line, by which a resumed run knows it again."""
    request: records.Request


@dataclass(frozen=True)
class BatchRows:
    """The rows of the input. They can be read as often as needed; blank lines don't count."""

    file: IO[bytes]
    name: str
    params: SamplingParams
    """Sampling of every row; the fields of a row win over them."""
    chat: bool = False
    system: str | None = None
    by_contract: bool = True

    def __iter__(self) -> Iterator[BatchRow]:
        """Raises ToolError for a line that is wrong."""
        for number, line in self._lines():
            try:
                yield self._row(number, line)
            except ToolError as error:
                raise ToolError(f"{self.name} line {number}: {error}") from error

    def check(self) -> int:
        """Count the rows, and name all that are wrong on stderr. Raises ToolError when one is wrong."""
        if self.by_contract and (problem := records.refused(self.params)):
            raise ToolError(problem, exit_code=2)
        num_rows = num_wrong = 0
        for number, line in self._lines():
            num_rows += 1
            try:
                self._row(number, line)
            except ToolError as error:
                num_wrong += 1
                complain(f"{self.name} line {number}: {error}")
        if num_wrong:
            raise ToolError(f"{num_wrong} of {num_rows} rows of {self.name} are wrong; nothing was sent")
        return num_rows

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        self.file.seek(0)
        for number, line in enumerate(self.file, start=1):
            if line.strip():
                yield number, line.strip()

    def _row(self, number: int, line: bytes) -> BatchRow:
        request = _parsed(line)
        request_id = request.get("request_id")
        row_id = request.pop("id", number if request_id is None else request_id)
        if not isinstance(row_id, (str, int)) or isinstance(row_id, bool):
            raise ToolError(f"id: expected a text or a whole number, got {row_id!r:.100}")
        try:
            checked = batch_request(request, params=self.params, timeouts=Timeouts())
        except InvalidRequest as error:
            raise ToolError(error.message) from error
        if checked.prompt == "" or min(checked.input_ids or (0,)) < 0:
            raise ToolError(f"prompt: expected a text or token ids, got {request['prompt']!r:.100}")
        if self.by_contract and (problem := records.refused(checked.params, request.get("messages"))):
            raise ToolError(problem)
        digest = hashlib.sha256(line).hexdigest()[:16]
        return BatchRow(number, row_id, digest, records.as_asked(request, chat=self.chat, system=self.system))


def open_input(path: Path) -> IO[bytes]:
    """Open the input so that it can be read again and again: a pipe is copied to a temporary file. `-` is standard
    input. Raises ToolError when it can't be read."""
    try:
        source = sys.stdin.buffer if str(path) == "-" else path.open("rb")
        if stat.S_ISREG(path.stat().st_mode if str(path) != "-" else 0):
            return source
        with source:
            copy = tempfile.TemporaryFile()  # noqa: SIM115 - for the caller to close
            shutil.copyfileobj(source, copy)
            return copy
    except OSError as error:
        raise ToolError(f"{records.file_name(path)} can't be read: {error.strerror}", exit_code=2) from error


def _parsed(line: bytes) -> records.Request:
    try:
        row = json.loads(line)
        json.dumps(row, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:  # half a surrogate pair is valid JSON, but can't be encoded
        raise ToolError(f"not JSON: {error}") from error
    if isinstance(row, str):
        return {"prompt": row}
    if not isinstance(row, dict):
        raise ToolError(f'expected a text or an object with "prompt" or "messages", got {row!r:.100}')
    return row


class Output:
    """A file that grows by whole rows. Nothing is buffered, so a write that fails fails at its row."""

    def __init__(self, descriptor: int, name: str, *, can_resume: bool) -> None:
        self._descriptor = descriptor
        self.name = name
        self.can_resume = can_resume
        """Whether it is a regular file, opened to append."""
        self.failed: dict[int, int] = {}
        """Rows that failed before the last one that is answered, by their number: their line here, from 1."""
        self._again: dict[int, bytes] = {}
        """A line here -> what takes its place."""
        self._end: int | None = None
        """End of the answers that are kept. The rest of the file stays until there is a row to put in its place."""

    def begin(self, rows: Iterable[BatchRow], *, resume: bool) -> int:
        """Return the number of the last row that is answered already: the batch goes on after it, and with `failed`.

        Raises ToolError when the file holds answers to other rows.
        """
        if not self.can_resume:
            return 0
        last, self._end = self._answered(rows) if resume else (0, 0)
        return last

    def write(self, row: BatchRow, answer: Completion | DeepseekTritonError) -> None:
        """Raises ToolError when the disk takes no more."""
        record: dict[str, Any] = {"id": row.id, "input": row.digest}
        if isinstance(answer, DeepseekTritonError):
            record["error"] = {"type": type(answer).__name__, "code": answer.code, "message": answer.message}
        else:
            record |= records.completion_record(answer)
        line = records.as_json(record).encode() + b"\n"
        if row.number in self.failed:
            self._again[self.failed[row.number]] = line
            return
        self.finish()
        left = memoryview(line)
        try:
            while left:
                left = left[os.write(self._descriptor, left) :]
        except BrokenPipeError:
            raise  # the reader has left, which is no failure
        except OSError as error:
            raise self._unwritten(error) from error

    def finish(self) -> None:
        """Cut off what is behind the answers that are kept, and put those that failed rows have got into their places.

        Raises ToolError when the disk takes no more; the file is whole then, as it was.
        """
        if self._end is not None:
            os.ftruncate(self._descriptor, self._end)
            self._end = None
        if not self._again:
            return
        path = Path(os.path.realpath(self.name))
        scratch = part_of(path)
        try:
            descriptor = _open_to_append(scratch, keep=False)
            with open(descriptor, "ab") as new, open(self._descriptor, "rb", closefd=False) as old:
                os.fchmod(new.fileno(), stat.S_IMODE(os.fstat(self._descriptor).st_mode))
                old.seek(0)
                new.writelines(self._again.get(number, line) for number, line in enumerate(old, start=1))
                new.flush()
                os.replace(scratch, path)
                os.dup2(new.fileno(), self._descriptor)  # with its lock
        except OSError as error:
            scratch.unlink(missing_ok=True)
            raise self._unwritten(error) from error
        self._again.clear()

    def _unwritten(self, error: OSError) -> ToolError:
        hint = "; --resume goes on" if self.can_resume else ""
        return ToolError(f"{self.name} can't be written: {error.strerror}{hint}")

    def _answered(self, rows: Iterable[BatchRow]) -> tuple[int, int]:
        """Return the number of the last row with an answer, and where in the file it ends; note those that failed."""
        last = end = position = 0
        expected, failed = iter(rows), dict[int, int]()
        with open(self._descriptor, "rb", closefd=False) as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    break  # half a line: the program was killed while it wrote
                row, problem = next(expected, None), None
                try:
                    record = json.loads(line)
                    place = (record.get("id"), record.get("input"))
                except (ValueError, AttributeError):
                    problem = "is no answer of a batch"
                else:
                    # A row that failed may have been mended since.
                    if row is None or place[0] != row.id or (place[1] != row.digest and "error" not in record):
                        other = "ends before" if row is None else f"has another row {row.id!r} there"
                        problem = f"answers row {place[0]!r}, and the input {other}"
                if row is None or problem:
                    raise ToolError(f"{self.name} line {number} {problem}: give another --output, or --overwrite")
                position += len(line)
                if "error" in record:
                    failed[row.number] = number
                else:
                    last, end = row.number, position
                    self.failed |= failed
                    failed = {}
        return last, end


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
