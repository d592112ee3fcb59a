"""`deepseek-triton generate --input`: many requests from JSON Lines, many at once, answers in the same order."""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path

from deepseek_triton_client import (
    AccessDenied,
    DeepseekTritonError,
    ModelNotFound,
    SamplingParams,
    ServerUnavailable,
)
from deepseek_triton_tools.cli.client_options import client_of
from deepseek_triton_tools.cli.sampling_options import sampling_fields
from deepseek_triton_tools.generating.batch_input import BatchRow, BatchRows, open_input
from deepseek_triton_tools.generating.batch_output import Output, open_output
from deepseek_triton_tools.generating.batch_progress import BatchProgress
from deepseek_triton_tools.generating.prompt_sources import Request
from deepseek_triton_tools.terminal.output_streams import complain
from deepseek_triton_tools.tool_errors import ToolError

_CONCURRENCY = 16


def run_batch(args: argparse.Namespace) -> int:
    """Answer every row of --input into --output. 1 when some failed.

    :raises ToolError: when a row is wrong or a file can't be used; nothing was sent then.
    :raises deepseek_triton_client.DeepseekTritonError: when the server can't be had at all.
    """
    _check_files(args)
    params = SamplingParams(**sampling_fields(args))
    with open_input(args.input) as file:
        rows = BatchRows(file, _name(args.input), params, args.chat, args.system)
        total = rows.check()
        with open_output(args.output, keep=args.resume or args.overwrite) as output:
            done = output.begin(rows, resume=args.resume)
            progress = BatchProgress(total, done)
            try:
                _answer(args, islice(rows, done, total), output, progress)
            except BaseException:
                progress.clear()
                if progress.done:
                    complain(f"stopped: {progress.summary()}{_how_to_resume(output)}")
                raise
            output.finish()
    progress.clear()
    complain(progress.summary() + (_how_to_resume(output) if progress.done < total else ""))
    return 1 if progress.failed else 0


def _answer(args: argparse.Namespace, rows: Iterator[BatchRow], output: Output, progress: BatchProgress) -> None:
    waiting: deque[BatchRow] = deque()  # sent, and not answered yet: answers come in order

    def requests() -> Iterator[Request]:
        for row in rows:
            waiting.append(row)
            yield row.request

    params = SamplingParams(**sampling_fields(args))
    concurrency = args.concurrency or _CONCURRENCY
    with client_of(args) as client:
        answers = client.generate_many(requests(), concurrency=concurrency, params=params, return_errors=True)
        with closing(answers):  # a generator, which the protocol does not promise
            for answer in answers:
                if isinstance(answer, DeepseekTritonError):
                    if not progress.answered and _is_hopeless(answer):
                        raise answer
                    output.write(waiting.popleft(), answer)
                    progress.row(None, failed=True)
                else:
                    output.write(waiting.popleft(), answer)
                    progress.row(answer.num_output_tokens, failed=False)
                if progress.failed == args.max_failures:
                    return


def _is_hopeless(error: DeepseekTritonError) -> bool:
    """Every row would fail with it."""
    return isinstance(error, (AccessDenied, ModelNotFound)) or (
        isinstance(error, ServerUnavailable) and error.unprocessed
    )


def _how_to_resume(output: Output) -> str:
    return f"; the same command with --resume goes on in {output.name}" if output.can_resume else ""


def _check_files(args: argparse.Namespace) -> None:
    if args.output is None:
        raise ToolError("--input needs --output FILE (- is standard output)", exit_code=2)
    if args.resume and args.overwrite:
        raise ToolError("give --resume or --overwrite, not both", exit_code=2)
    if args.resume and str(args.output) == "-":
        raise ToolError("--resume needs an --output that can be read again", exit_code=2)
    if args.input.exists() and args.output.exists() and args.input.samefile(args.output):
        raise ToolError(f"--input and --output are the same file, {args.output}", exit_code=2)


def _name(path: Path) -> str:
    return "standard input" if str(path) == "-" else str(path)
