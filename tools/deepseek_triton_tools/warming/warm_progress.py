"""The progress of a warm-up, as the calling thread sees it."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from deepseek_triton_tools.warming.checkpoint.survey import Survey, SurveyedFile
from deepseek_triton_tools.warming.damage_check import DamageCheck
from deepseek_triton_tools.warming.pagecache.residency import known_sum
from deepseek_triton_tools.warming.residency_query import Residency, ResidencyQuery
from deepseek_triton_tools.warming.transfer import Problem, Transfer

STAYED_SHARE = 0.999
"""Share of the bytes that has to stay. The kernel drops a page here and there, though the files fit."""
_RESIDENCY_PERIOD_S = 5.0
_RATE_OVER_S = 10.0
_CHEAP_METHODS = ("cachestat", "memory")
"""Ways of asking what is resident that cost almost nothing: 0.16 ms a GiB, against 17 ms a GiB of mincore."""


@dataclass(frozen=True, kw_only=True)
class Stall:
    """A file that has delivered nothing for a while."""

    path: Path
    offset: int
    """The byte that a thread waits for."""
    waited_s: float
    waits_in: str
    """The kernel function that the thread waits in, by /proc/<pid>/task/<tid>/wchan; "" where the kernel hides it."""
    mount: str
    """The mount, for people: "nfs4 server:/export on /models"."""


@dataclass(frozen=True, kw_only=True)
class WarmProgress:
    """The progress of a warm-up at one moment; made about twice a second."""

    total: int
    """Bytes to bring in, those that are already in the page cache included."""
    done: int
    found: int
    """Bytes of `done` that were in the page cache already."""
    again: int
    """Bytes that the kernel dropped before the end and that were brought in once more."""
    resident: int | None
    """Bytes of the chosen files in the page cache, some seconds old. None where asking would take long."""
    num_files: int
    num_files_done: int
    elapsed_s: float
    rate: float
    """Bytes a second brought in, over the last ten seconds."""
    eta_s: float | None
    """Seconds that are left. None while the rate is unknown."""
    stalls: tuple[Stall, ...]
    problems: tuple[Problem, ...]
    """The files known so far to be missing, damaged or unreadable."""


class ProgressWatch:
    """Watches the passes of a warm-up and its damage check, for the calling thread."""

    def __init__(self, survey: Survey, first_pass: Transfer, check: DamageCheck) -> None:
        self._chosen = survey.chosen
        self._options = survey.options
        self.passes = [first_pass]
        """The passes so far. The last one is under way."""
        self.gave_up = False
        self._check = check
        self._started_s = time.monotonic()
        self._read: deque[tuple[float, int]] = deque([(self._started_s, 0)])
        """(time, bytes read by then), over the last seconds."""
        self._mounts = _mounts(survey)
        self._is_asking_cheap = all(file.residency_method in _CHEAP_METHODS for file in self._chosen)
        self._problems: dict[Problem, None] = {}
        """The known problems, in the order in which they became known."""
        self._resident: int | None = None
        self._query: ResidencyQuery | None = None
        self._query_began_s = 0.0

    def wait_for_end(self, timeout_s: float) -> bool:
        """Wait until the current pass and the damage check have ended; False when they have not within `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        has_ended = self.passes[-1].ended.wait(timeout_s)
        return has_ended and self._check.ended.wait(max(0.0, deadline - time.monotonic()))

    def dropped_files(self, residency: Residency) -> list[SurveyedFile]:
        """Files that were brought in, and that the kernel has dropped a part of since."""
        files = [file.surveyed for file in self.passes[0].files if not file.segments_left and not file.problem]
        parts = [(each, residency.get(each.file.path)) for each in files]
        return [each for each, part in parts if part is not None and part < STAYED_SHARE * each.file.size]

    def raise_errors(self) -> None:
        """Raise the error that ended one of the threads: a bug."""
        for error in (self._check.error, *(each.error for each in self.passes)):
            if error is not None:
                raise error

    def progress(self) -> WarmProgress:
        now = time.monotonic()
        files = self.passes[0].files
        done, found = sum(file.done for file in files), sum(file.found for file in files)
        again = sum(file.done - file.found for each in self.passes[1:] for file in each.files)
        rate = self._rate(now, done - found + again)
        to_come = sum(file.surveyed.file.size - file.done for file in self.passes[-1].files if not file.problem)
        return WarmProgress(
            total=sum(file.surveyed.file.size for file in files),
            done=done,
            found=found,
            again=again,
            resident=self._latest_resident(now),
            num_files=len(files),
            num_files_done=sum(not file.segments_left for file in files),
            elapsed_s=now - self._started_s,
            rate=rate,
            eta_s=to_come / rate if rate else None,
            stalls=tuple(self._stalls(now)),
            problems=self._known_problems(),
        )

    def should_give_up(self) -> bool:
        """Whether no thread has received anything for options.give_up_s seconds; `gave_up` remembers it."""
        since = [since_s for _, _, _, since_s in self._waiting_threads()]
        limit = self._options.give_up_s
        self.gave_up = bool(since) and limit is not None and time.monotonic() - max(since) > limit
        return self.gave_up

    def _known_problems(self) -> tuple[Problem, ...]:
        """A file's header and its bytes may both show one damage: the problem that was known first is reported."""
        of_check = list(self._check.problems)
        of_files = [file.problem for each in self.passes for file in each.files if file.problem]
        for problems, others in ((of_check, of_files), (of_files, of_check)):
            reported = {problem.path for problem in others if problem in self._problems}
            self._problems.update(dict.fromkeys(problem for problem in problems if problem.path not in reported))
        return tuple(self._problems)

    def _waiting_threads(self) -> list[tuple[Path, int, int, float]]:
        """(file, byte, thread, time of its last byte) of each thread that waits for storage."""
        places = [(place.file, place.offset, place.thread_id, place.since_s) for place in self.passes[-1].places]
        waiting = [(file.path, offset, thread, since_s) for file, offset, thread, since_s in places if file]
        if not self._check.ended.is_set():
            waiting.append((self._check.path, 0, self._check.thread_id, self._check.since_s))
        return waiting

    def _rate(self, now: float, read: int) -> float:
        self._read.append((now, read))
        while len(self._read) > 2 and now - self._read[1][0] > _RATE_OVER_S:
            self._read.popleft()
        then, read_then = self._read[0]
        return (read - read_then) / max(now - then, 1e-9)

    def _latest_resident(self, now: float) -> int | None:
        """The kernel's latest answer. A new query begins every five seconds where asking is cheap."""
        if self._query and self._query.ended.is_set():
            self._resident, self._query = known_sum(self._query.answer.values()), None
        if self._is_asking_cheap and not self._query and now - self._query_began_s > _RESIDENCY_PERIOD_S:
            self._query_began_s, self._query = now, ResidencyQuery(self._chosen)
        return self._resident

    def _stalls(self, now: float) -> list[Stall]:
        return [
            Stall(
                path=path,
                offset=offset,
                waited_s=now - since_s,
                waits_in=_waits_in(thread),
                mount=self._mounts.get(path) or self._mounts.get(path.parent, ""),
            )
            for path, offset, thread, since_s in self._waiting_threads()
            if now - since_s > self._options.stall_s
        ]


def _mounts(survey: Survey) -> dict[Path, str]:
    """Each file and each folder of files -> its mount, for people."""
    mounts = {}
    for each in survey.files:
        mounts[each.file.path] = mounts[each.file.path.parent] = str(each.file_system.mount)
    return mounts


def _waits_in(thread_id: int) -> str:
    try:
        name = Path(f"/proc/self/task/{thread_id}/wchan").read_text()
    except OSError:  # hidden from ordinary users by some kernels
        return ""
    return "" if name == "0" else name
