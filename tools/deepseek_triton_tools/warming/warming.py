"""Bringing the files of a survey into the page cache."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from deepseek_triton_tools.warming.checkpoint.checksums import expected_checksums
from deepseek_triton_tools.warming.checkpoint.survey import Survey, SurveyedFile
from deepseek_triton_tools.warming.damage_check import Check
from deepseek_triton_tools.warming.residency_query import Asking, Residency, ask, total
from deepseek_triton_tools.warming.transfer import Problem, Transfer

PERIOD_S = 0.5
"""Between two looks at the threads."""
_RESIDENCY_PERIOD_S = 5.0
_RATE_OVER_S = 10.0
_CHEAP = ("cachestat", "memory")
"""Ways of asking what is resident that cost nothing worth mentioning: 0.16 ms a GiB, against mincore's 17."""
MORE_PASSES = 2
"""When the kernel has dropped some of it by the end, for somebody else's sake. If it goes on, there is no room."""
STAYED = 0.999
"""Of the bytes: the kernel drops a page here and there, which is no sign that they don't fit."""


@dataclass(frozen=True, kw_only=True)
class Stall:
    """A file of which nothing has come for a while."""

    path: Path
    offset: int
    """The byte that is waited for."""
    waited_s: float
    waits_in: str
    """Where the kernel has the thread, by /proc/<pid>/task/<tid>/wchan; "" where it does not say."""
    mount: str
    """For people: "nfs4 server:/export on /models"."""


@dataclass(frozen=True, kw_only=True)
class WarmProgress:
    """How far it is; made about twice a second."""

    total: int
    """Bytes to bring in or to find there."""
    done: int
    found: int
    """Bytes of `done` that were in the page cache already."""
    again: int
    """Bytes that the kernel dropped before the end, brought in once more."""
    resident: int | None
    """Bytes of the chosen files in the page cache, as of some seconds ago; None where asking would take long."""
    num_files: int
    num_files_done: int
    elapsed_s: float
    rate: float
    """Bytes a second brought in, over the last ten seconds."""
    eta_s: float | None
    """None while it can't be said."""
    stalls: tuple[Stall, ...]
    problems: tuple[Problem, ...]
    """What is missing, damaged or can't be read, as far as it is known."""


@dataclass(frozen=True, kw_only=True)
class WarmResult:
    survey: Survey
    """Examined: its checkpoints have their findings."""
    progress: WarmProgress
    """At the end."""
    resident: int | None
    """Bytes of the chosen files in the page cache at the end; None: unknown."""
    was_stopped: bool
    """By `stop`."""
    gave_up: bool
    """After options.give_up_s without a byte."""
    num_verified: int
    """Files with options.verify that have a checksum; `num_unverified` of them have none."""
    num_unverified: int

    @property
    def is_damaged(self) -> bool:
        """A file is missing, damaged or can't be read."""
        return bool(self.progress.problems)

    @property
    def is_partial(self) -> bool:
        """Not all of it is in the page cache: it does not fit, or did not stay."""
        has_stayed = self.resident is None or self.resident >= STAYED * self.survey.chosen_size
        return bool(self.survey.left_out) or not has_stayed

    @property
    def exit_code(self) -> int:
        """The contract of `deepseek-triton warm`: 0 all of it is in the page cache; 1 a file is missing, damaged or
        can't be read; 3 only a part fits, or stayed; 4 the storage stalled and it was given up."""
        if self.is_damaged:
            return 1
        if self.gave_up:
            return 4
        return 3 if self.is_partial or self.was_stopped else 0


def warm(
    survey: Survey,
    *,
    observe: Callable[[WarmProgress], None] | None = None,
    stop: threading.Event | None = None,
) -> WarmResult:
    """Bring the chosen files of `survey` into the page cache; while they come, look whether they are whole.

    A file that can't be read is a problem of the result, and the others are read all the same.

    :param observe: called about twice a second, in the calling thread, and once at the end.
    :param stop: set, it ends within a moment with what has been done.
    :raises CheckpointError: when options.verify is set and the checksums can't be read.
    """
    stop = stop or threading.Event()
    transfer = _transfer(survey)
    check = Check(survey, on_damage=transfer.leave)
    watch = _StallWatch(survey, transfer, check)
    check.start()
    _follow(watch, observe, stop)
    residency = _ask(survey, watch, stop)
    for _ in range(0 if survey.exceeds_headroom else MORE_PASSES):
        dropped = watch.dropped(residency)
        if not dropped or watch.gave_up or stop.is_set():
            break
        watch.go_on(_more(dropped, survey))
        _follow(watch, observe, stop)
        residency = _ask(survey, watch, stop)
    watch.raise_errors()
    examined = check.examined()
    resident = total({each.file.path: residency.get(each.file.path) for each in examined.chosen})
    progress = replace(watch.look(), resident=resident)
    if observe:
        observe(progress)
    return WarmResult(
        survey=examined,
        progress=progress,
        resident=resident,
        was_stopped=stop.is_set(),
        gave_up=watch.gave_up,
        num_verified=transfer.num_verified,
        num_unverified=len(transfer.files) - transfer.num_verified if survey.options.verify else 0,
    )


def _ask(survey: Survey, watch: _StallWatch, stop: threading.Event) -> Residency:
    """After a storage was given up, there is nobody to ask."""
    return {} if watch.gave_up else ask(survey.chosen, stop=stop, limit_s=survey.options.give_up_s)


def _follow(watch: _StallWatch, observe: Callable[[WarmProgress], None] | None, stop: threading.Event) -> None:
    """Let the threads of the transfer run, until they have ended, are stopped or hopeless."""
    watch.transfer.start()
    try:
        while not watch.has_ended(PERIOD_S) and not watch.gives_up() and not stop.is_set():
            if observe:
                observe(watch.look())
    finally:
        watch.transfer.stop()
    watch.transfer.ended.wait(PERIOD_S)  # for the steps under way; a thread that hangs is left


def _transfer(survey: Survey) -> Transfer:
    options = survey.options
    checkpoints = survey.checkpoints if options.verify else ()
    checksums = {path: sum_ for checkpoint in checkpoints for path, sum_ in expected_checksums(checkpoint).items()}
    readable = [file for file in survey.chosen if file.file_system.reading.jobs or file.file.path in checksums]
    return Transfer(readable, jobs=survey.jobs, rate_limit=_rate_limit(survey), checksums=checksums)


def _more(dropped: Sequence[SurveyedFile], survey: Survey) -> Transfer:
    """A transfer of what was there already; what still is costs nothing."""
    return Transfer(dropped, jobs=survey.jobs, rate_limit=_rate_limit(survey), checksums={})


def _rate_limit(survey: Survey) -> float | None:
    limit = survey.options.rate_limit
    return None if limit is None else limit / survey.num_working_shares


class _StallWatch:
    """What the calling thread sees of the others."""

    def __init__(self, survey: Survey, transfer: Transfer, check: Check) -> None:
        self._chosen = survey.chosen
        self._options = survey.options
        self.transfer = transfer
        """The last one."""
        self.gave_up = False
        self._first = transfer
        self._later: list[Transfer] = []
        self._check = check
        self._started_s = time.monotonic()
        self._read: deque[tuple[float, int]] = deque([(self._started_s, 0)])
        """(when, bytes read by then), over the last seconds."""
        self._mounts = _mounts(survey)
        self._is_cheap = all(file.asked_by in _CHEAP for file in self._chosen)
        self._problems: dict[Problem, None] = {}
        """In the order in which they became known."""
        self._resident: int | None = None
        self._asking: Asking | None = None
        self._asked_s = 0.0

    def has_ended(self, timeout_s: float) -> bool:
        """Waits for it."""
        deadline = time.monotonic() + timeout_s
        return self.transfer.ended.wait(timeout_s) and self._check.ended.wait(max(0.0, deadline - time.monotonic()))

    def dropped(self, residency: Residency) -> list[SurveyedFile]:
        """Files that were brought in, and of which the kernel has dropped a part since."""
        files = [file.surveyed for file in self._first.files if not file.segments_left and not file.problem]
        parts = [(each, residency.get(each.file.path)) for each in files]
        return [each for each, part in parts if part is not None and part < STAYED * each.file.size]

    def raise_errors(self) -> None:
        """Of the threads: bugs."""
        for error in (self._check.error, *(transfer.error for transfer in (self._first, *self._later))):
            if error is not None:
                raise error

    def go_on(self, transfer: Transfer) -> None:
        """With another one."""
        self.transfer = transfer
        self._later.append(transfer)

    def look(self) -> WarmProgress:
        now = time.monotonic()
        files = self._first.files
        total = sum(file.surveyed.file.size for file in files)
        done, found = sum(file.done for file in files), sum(file.found for file in files)
        again = sum(file.done - file.found for transfer in self._later for file in transfer.files)
        rate = self._rate(now, done - found + again)
        return WarmProgress(
            total=total,
            done=done,
            found=found,
            again=again,
            resident=self._ask_resident(now),
            num_files=len(files),
            num_files_done=sum(not file.segments_left for file in files),
            elapsed_s=now - self._started_s,
            rate=rate,
            eta_s=_left(self.transfer) / rate if rate else None,
            stalls=tuple(self._stalls(now)),
            problems=self._known_problems(),
        )

    def _known_problems(self) -> tuple[Problem, ...]:
        """A file's header and its bytes may both tell of one damage: what is known first says it."""
        of_check = list(self._check.problems)
        of_files = [file.problem for each in (self._first, *self._later) for file in each.files if file.problem]
        for problems, others in ((of_check, of_files), (of_files, of_check)):
            said = {problem.path for problem in others if problem in self._problems}
            self._problems.update(dict.fromkeys(problem for problem in problems if problem.path not in said))
        return tuple(self._problems)

    def gives_up(self) -> bool:
        """Nothing has come on any thread for as long as is waited."""
        since = [since_s for _, _, _, since_s in self._waiting()]
        limit = self._options.give_up_s
        self.gave_up = bool(since) and limit is not None and time.monotonic() - max(since) > limit
        return self.gave_up

    def _waiting(self) -> list[tuple[Path, int, int, float]]:
        """Of each thread that waits for storage: the file, the byte, the thread, and since when."""
        places = [(place.file, place.offset, place.thread_id, place.since_s) for place in self.transfer.places]
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

    def _ask_resident(self, now: float) -> int | None:
        """The last answer."""
        if self._asking and self._asking.ended.is_set():
            self._resident, self._asking = total(self._asking.answer), None
        if self._is_cheap and not self._asking and now - self._asked_s > _RESIDENCY_PERIOD_S:
            self._asked_s, self._asking = now, Asking(self._chosen)
        return self._resident

    def _stalls(self, now: float) -> list[Stall]:
        waiting = [(path, offset, thread, now - since_s) for path, offset, thread, since_s in self._waiting()]
        return [
            Stall(
                path=path,
                offset=offset,
                waited_s=waited_s,
                waits_in=_waits_in(thread),
                mount=self._mounts.get(path) or self._mounts.get(path.parent, ""),
            )
            for path, offset, thread, waited_s in waiting
            if waited_s > self._options.stall_s
        ]


def _left(transfer: Transfer) -> int:
    """Bytes still to come."""
    return sum(file.surveyed.file.size - file.done for file in transfer.files if not file.problem)


def _mounts(survey: Survey) -> dict[Path, str]:
    """File, or folder of files -> where it is mounted, for people."""
    mounts = {}
    for each in survey.files:
        mount = each.file_system.mount
        name = f"{mount.type} {mount.source} on {mount.mount_point}"
        mounts[each.file.path] = mounts[each.file.path.parent] = name
    return mounts


def _waits_in(thread_id: int) -> str:
    try:
        name = Path(f"/proc/self/task/{thread_id}/wchan").read_text()
    except OSError:  # hidden from ordinary users by some kernels
        return ""
    return "" if name == "0" else name
