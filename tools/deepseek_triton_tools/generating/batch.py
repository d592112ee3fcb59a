"""A batch: many requests from JSON Lines, many at once, and the answers in the same order."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from functools import partial
from itertools import islice
from pathlib import Path

from deepseek_triton_client import (
    AccessDenied,
    Client,
    Completion,
    DeepseekTritonError,
    ModelNotFound,
    SamplingParams,
    ServerUnavailable,
)
from deepseek_triton_tools.generating.batch_files import BatchRow, BatchRows, Output, open_input, open_output
from deepseek_triton_tools.generating.prompt_sources import Request, file_name
from deepseek_triton_tools.terminal.output_streams import complain
from deepseek_triton_tools.terminal.status_line import StatusLine, clock


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
) -> int:
    """Answer every row of `input` into `output`; `-` is standard input or output. Returns 1 when some rows failed.

    :param params: sampling of every row; the fields of a row win over them.
    :param connect: makes the client when there is something to send.
    :param chat: send prompts as messages, by the model's chat template.
    :param system: the system message of every row that has none of its own.
    :param concurrency: number of requests that are under way at once.
    :param resume: go on where the output ends; `overwrite`: begin it anew.
    :param max_failures: stop when this many rows have failed.
    :raises ToolError: when a row is wrong or a file can't be used, before anything is sent.
    :raises DeepseekTritonError: when the server can't be had at all.
    """
    with open_input(input) as file:
        rows = BatchRows(file, file_name(input), params, chat, system)
        total = rows.check()
        with open_output(output, keep=resume or overwrite) as answers:
            done = answers.begin(rows, resume=resume)
            progress = BatchProgress(total, done)
            how_to_resume = f"; the same command with --resume goes on in {answers.name}" if answers.can_resume else ""
            try:
                with connect() as client:
                    send = partial(client.generate_many, concurrency=concurrency, params=params, return_errors=True)
                    _answer(send, islice(rows, done, total), answers, progress, max_failures)
            except BaseException:
                progress.clear()
                if progress.done:
                    complain(f"stopped: {progress.summary()}{how_to_resume}")
                raise
            answers.finish()
    progress.clear()
    complain(progress.summary() + (how_to_resume if progress.done < total else ""))
    return 1 if progress.failed else 0


def _answer(
    send: Callable[[Iterator[Request]], Generator[Completion | DeepseekTritonError, None, None]],
    rows: Iterator[BatchRow],
    output: Output,
    progress: BatchProgress,
    max_failures: int | None,
) -> None:
    unanswered: deque[BatchRow] = deque()  # rows that were sent: their answers come in the same order

    def requests() -> Iterator[Request]:
        for row in rows:
            unanswered.append(row)
            yield row.request

    with closing(send(requests())) as answers:
        for answer in answers:
            if isinstance(answer, DeepseekTritonError) and not progress.answered and fails_every_request(answer):
                raise answer
            output.write(unanswered.popleft(), answer)
            if isinstance(answer, DeepseekTritonError):
                progress.count_failed()
            else:
                progress.count_answered(answer.num_output_tokens)
            if progress.failed == max_failures:
                return


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
