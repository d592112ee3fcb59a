"""A batch: many requests from JSON Lines, many at once, and the answers in the same order."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from deepseek_triton_client import (
    AccessDenied,
    Client,
    DeepseekTritonError,
    ModelNotFound,
    SamplingParams,
    ServerUnavailable,
)
from deepseek_triton_tools.generating.batch_files import BatchRow, BatchRows, Output, open_input, open_output
from deepseek_triton_tools.generating.prompt_sources import Request, file_name
from deepseek_triton_tools.terminal.output_streams import complain
from deepseek_triton_tools.terminal.status_line import StatusLine, clock


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A batch to answer. The path `-` is standard input or output."""

    input: Path
    output: Path
    params: SamplingParams
    """Sampling of every row; the fields of a row win over them."""
    chat: bool = False
    """Send prompts as messages, by the model's chat template."""
    system: str | None = None
    """The system message of every row that has none of its own."""
    concurrency: int = 16
    """Number of requests that are under way at once."""
    resume: bool = False
    """Go on where the output ends."""
    overwrite: bool = False
    """Begin the output anew."""
    max_failures: int | None = None
    """Stop when this many rows have failed."""


def run_batch(batch: Batch, connect: Callable[[], Client]) -> int:
    """Answer every row of the input into the output. Returns 1 when some rows failed.

    `connect` makes the client when there is something to send. Raises ToolError when a row is wrong or a file can't be
    used, before anything is sent; DeepseekTritonError when the server can't be had at all.
    """
    with open_input(batch.input) as file:
        rows = BatchRows(file, file_name(batch.input), batch.params, batch.chat, batch.system)
        total = rows.check()
        with open_output(batch.output, keep=batch.resume or batch.overwrite) as output:
            done = output.begin(rows, resume=batch.resume)
            progress = BatchProgress(total, done)
            try:
                with connect() as client:
                    _answer(batch, client, islice(rows, done, total), output, progress)
            except BaseException:
                progress.clear()
                if progress.done:
                    complain(f"stopped: {progress.summary()}{_how_to_resume(output)}")
                raise
            output.finish()
    progress.clear()
    complain(progress.summary() + (_how_to_resume(output) if progress.done < total else ""))
    return 1 if progress.failed else 0


def _answer(batch: Batch, client: Client, rows: Iterator[BatchRow], output: Output, progress: BatchProgress) -> None:
    unanswered: deque[BatchRow] = deque()  # rows that were sent: their answers come in the same order

    def requests() -> Iterator[Request]:
        for row in rows:
            unanswered.append(row)
            yield row.request

    answers = client.generate_many(requests(), concurrency=batch.concurrency, params=batch.params, return_errors=True)
    with closing(answers):
        for answer in answers:
            if isinstance(answer, DeepseekTritonError) and not progress.answered and fails_every_request(answer):
                raise answer
            output.write(unanswered.popleft(), answer)
            if isinstance(answer, DeepseekTritonError):
                progress.count_failed()
            else:
                progress.count_answered(answer.num_output_tokens)
            if progress.failed == batch.max_failures:
                return


def fails_every_request(error: DeepseekTritonError) -> bool:
    """Whether every other request would fail in the same way."""
    return isinstance(error, (AccessDenied, ModelNotFound)) or (
        isinstance(error, ServerUnavailable) and error.unprocessed
    )


def _how_to_resume(output: Output) -> str:
    return f"; the same command with --resume goes on in {output.name}" if output.can_resume else ""


class BatchProgress:
    def __init__(self, total: int, done: int) -> None:
        """`done`: how many of the `total` rows an earlier run has answered."""
        self._total = total
        self._before = self.done = done
        self.failed = 0
        self._num_tokens = 0
        self._started = time.monotonic()
        self._status = StatusLine()
        if self._status.is_terminal:
            self._status.show(self._line)

    @property
    def answered(self) -> int:
        """Rows that this run has answered, failed ones not counted."""
        return self.done - self._before - self.failed

    def count_answered(self, num_tokens: int | None) -> None:
        """`num_tokens`: those of the answer; None where the server doesn't count them."""
        self.done += 1
        self._num_tokens += num_tokens or 0
        self._status.show(self._line)

    def count_failed(self) -> None:
        self.done += 1
        self.failed += 1
        self._status.show(self._line)

    def clear(self) -> None:
        """Empty the terminal's line, for other output."""
        self._status.clear()

    def summary(self) -> str:
        elapsed = time.monotonic() - self._started
        failed = f", {self.failed} failed" if self.failed else ""
        before = f" ({self._before} by an earlier run)" if self._before else ""
        return (
            f"{self.done} of {self._total} rows done{before}{failed}; "
            f"{self._num_tokens:,} tokens in {elapsed:.1f} s, {self._rate():,.0f} tokens/s"
        )

    def _line(self) -> str:
        left = self._total - self.done
        done_now = self.done - self._before
        elapsed = time.monotonic() - self._started
        eta = f", {clock(elapsed / done_now * left)} left" if done_now and left else ""
        return f"{self.done}/{self._total} done, {self.failed} failed, {self._rate():,.0f} tokens/s{eta}"

    def _rate(self) -> float:
        return self._num_tokens / max(time.monotonic() - self._started, 1e-9)
