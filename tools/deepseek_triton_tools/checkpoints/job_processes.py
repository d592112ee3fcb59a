"""Processes that do jobs, each of which gets the next job when it has none."""

from __future__ import annotations

import multiprocessing
import signal
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, Generic, TypeVar

from deepseek_triton_tools.tool_errors import CheckpointError

_TURN_S = 0.2
"""The longest time from one turn to the next while nothing happens."""

Say = Callable[[int], None]
"""Reports progress from within a job, in whatever the jobs count, and ends its process when the main one was killed."""

_Job = TypeVar("_Job")
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Turn(Generic[_Result]):
    """The progress and the results since the last turn."""

    progress: int
    """The sum of the numbers that the jobs said."""
    done: Sequence[tuple[int, _Result]]
    """Index and result of the jobs that were done."""


@dataclass(frozen=True)
class _Failure:
    error: Exception
    trace: str


def do_jobs(
    jobs: Sequence[_Job], works: Sequence[Callable[[_Job, Say], _Result]], *, if_killed: str
) -> Generator[Turn[_Result], None, None]:
    """Do the jobs in one process for each of `works`, which is what that process does with a job.

    A turn comes several times a second. Close the generator to end the processes early. Ctrl-C reaches the main process
    only.

    :raises CheckpointError: `if_killed`, when a process was killed. What a job raises is raised here, too.
    """
    # A forked process could not use CUDA, and would inherit locks that other threads hold.
    context = multiprocessing.get_context("spawn")
    left = iter(enumerate(jobs))
    busy: dict[Connection, SpawnProcess] = {}
    try:
        for work, job in zip(works, left, strict=False):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, work), daemon=True)
            with _without_interrupts():
                process.start()
            theirs.close()
            busy[ours] = process
            with _alive(if_killed):
                ours.send(job)
        while busy:
            progress, done = 0, []
            for pipe in wait(list(busy), _TURN_S):
                assert isinstance(pipe, Connection)
                with _alive(if_killed):
                    word = pipe.recv()
                if isinstance(word, int):
                    progress += word
                    continue
                if isinstance(word, _Failure):
                    raise word.error from RuntimeError(word.trace)
                done.append(word)
                if (following := next(left, None)) is not None:
                    with _alive(if_killed):
                        pipe.send(following)
                else:
                    pipe.close()
                    busy.pop(pipe).join()
            yield Turn(progress, done)
    finally:
        for pipe, process in busy.items():
            process.terminate()
            process.join()
            pipe.close()


@contextmanager
def _alive(if_killed: str) -> Iterator[None]:
    """Speak with a process. It lives until its pipe is closed, so one that does not answer was killed."""
    try:
        yield
    except (EOFError, OSError) as error:
        raise CheckpointError(if_killed) from error


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Start processes that Ctrl-C does not reach, also while they import."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work(pipe: Connection, work: Callable[[Any, Say], object]) -> None:
    """Do the jobs that come through `pipe`, until its other end is closed."""
    # A main process that was killed reads no more, so the next word to it ends this process.
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            index, job = pipe.recv()
            try:
                word: object = (index, work(job, pipe.send))
            except (BrokenPipeError, ConnectionResetError):
                raise
            except Exception as error:
                word = _Failure(error, traceback.format_exc())
            pipe.send(word)
