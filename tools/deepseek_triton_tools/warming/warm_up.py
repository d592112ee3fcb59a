"""Bringing the files of a survey into the page cache, and the progress meanwhile.

Indexes and headers are checked while the files are being read. That takes a third of a second for DeepSeek's 92,000
tensors, and longer where the storage is slow. The warm-up does not wait for it, and reads no more of a file that the
check has found damaged.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deepseek_triton_build.check import Finding
from deepseek_triton_tools.repository.checkpoint_files import find_damage
from deepseek_triton_tools.warming.checksums import Checksum, expected_checksums
from deepseek_triton_tools.warming.page_cache import known_sum
from deepseek_triton_tools.warming.survey import Survey, SurveyedFile, with_findings
from deepseek_triton_tools.warming.transfer import Problem, Transfer

PERIOD_S = 0.5
"""Seconds between two looks at the threads."""
MORE_PASSES = 2
"""Passes after the first one, while the kernel has dropped some of the files for the sake of other processes. If it
still drops them after that, there is no room for them."""
STAYED_SHARE = 0.999
"""Share of the bytes that has to stay. The kernel drops a page here and there, though the files fit."""
_RATE_OVER_S = 10.0
_TICK_S = 0.1
_STOP_PATIENCE_S = 2.0
"""Seconds that an answer about residency may take once the warm-up is to stop."""

Residency = Mapping[Path, int | None]
"""File -> bytes of it in the page cache; None: unknown."""


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


@dataclass(frozen=True, kw_only=True)
class WarmResult:
    survey: Survey
    """The survey after the damage check: its checkpoints have their findings."""
    progress: WarmProgress
    """The progress at the end."""
    resident: int | None
    """Bytes of the chosen files in the page cache at the end. None: unknown."""
    was_stopped: bool
    """The caller set `stop`."""
    gave_up: bool
    """No byte came for options.give_up_s seconds."""
    num_verified: int
    """Files whose checksum was compared. 0 without options.verify."""
    num_unverified: int
    """Files that have no checksum. 0 without options.verify."""

    @property
    def is_damaged(self) -> bool:
        """A file is missing, damaged or can't be read."""
        return bool(self.progress.problems)

    @property
    def is_partial(self) -> bool:
        """Not everything is in the page cache: it does not fit, or did not stay."""
        has_stayed = self.resident is None or self.resident >= STAYED_SHARE * self.survey.chosen_size
        return bool(self.survey.left_out) or not has_stayed

    @property
    def exit_code(self) -> int:
        """Exit code of `deepseek-triton warm files`: 0 everything is in the page cache; 1 a file is missing, damaged or
        can't be read; 3 only a part fits, or stayed; 4 the storage stalled and the warm-up gave up."""
        if self.is_damaged:
            return 1
        if self.gave_up:
            return 4
        return 3 if self.is_partial or self.was_stopped else 0


def examine(survey: Survey) -> Survey:
    """`survey` with the findings about its checkpoints; damaged files are no longer chosen."""
    return with_findings(survey, {each.folder: list(find_damage(each)) for each in survey.checkpoints})


def warm(
    survey: Survey, *, observe: Callable[[WarmProgress], None] | None = None, stop: threading.Event | None = None
) -> WarmResult:
    """Bring the chosen files of `survey` into the page cache, and check meanwhile whether they are whole.

    A file that can't be read becomes a problem of the result, and the other files are read all the same.

    :param observe: called about twice a second in the calling thread, and once at the end.
    :param stop: when it is set, the warm-up ends within a moment and returns what has been done.
    :raises CheckpointError: when options.verify is set and the checksums can't be read.
    """
    observe, stop = observe or (lambda _: None), stop or threading.Event()
    checkpoints = survey.checkpoints if survey.options.verify else ()
    checksums = {path: sum_ for checkpoint in checkpoints for path, sum_ in expected_checksums(checkpoint).items()}
    # Files in memory (tmpfs) need no reading, unless their checksum is to be compared.
    files = [file for file in survey.chosen if file.file_system.reading.jobs or file.file.path in checksums]
    watch = _Watch(survey, _transfer(survey, files, checksums))
    residency = watch.run_pass(observe, stop)
    for _ in range(0 if survey.exceeds_headroom else MORE_PASSES):
        dropped = watch.dropped_files(residency)
        if not dropped or watch.gave_up or stop.is_set():
            break
        watch.passes.append(_transfer(survey, dropped, {}))
        residency = watch.run_pass(observe, stop)
    watch.raise_errors()
    examined, progress, first_pass = watch.check.examined(), watch.progress(), watch.passes[0]
    observe(progress)
    return WarmResult(
        survey=examined,
        progress=progress,
        resident=known_sum(residency.get(each.file.path) for each in examined.chosen),
        was_stopped=stop.is_set(),
        gave_up=watch.gave_up,
        num_verified=first_pass.num_verified,
        num_unverified=len(first_pass.files) - first_pass.num_verified if survey.options.verify else 0,
    )


def _transfer(survey: Survey, files: Sequence[SurveyedFile], checksums: Mapping[Path, Checksum]) -> Transfer:
    limit = survey.options.rate_limit
    rate_limit = None if limit is None else limit / survey.num_working_shares
    return Transfer(files, jobs=survey.jobs, rate_limit=rate_limit, checksums=checksums)


class _DamageCheck:
    """A thread that checks the checkpoints of `survey`, and calls `on_damage` for each damaged file."""

    def __init__(self, survey: Survey, on_damage: Callable[[Problem], None]) -> None:
        self.problems: list[Problem] = []
        self.ended = threading.Event()
        self.error: BaseException | None = None
        """The error that ended the thread before its time: a bug."""
        self.place = (survey.checkpoints[0].folder if survey.checkpoints else Path(), 0, 0, time.monotonic())
        """(file or folder that it reads now, byte, thread, time when it began with it)."""
        self._survey = survey
        self._on_damage = on_damage
        self._findings: dict[Path, list[Finding]] = {}
        """Folder of a checkpoint -> its findings."""
        # A daemon, like the threads that read: storage that does not answer must not keep the process alive.
        threading.Thread(target=self._run, name="warm-check", daemon=True).start()

    def examined(self) -> Survey:
        """The survey with the findings so far."""
        return with_findings(self._survey, self._findings)

    def _run(self) -> None:
        def begin_file(path: Path) -> None:
            self.place = (path, 0, threading.get_native_id(), time.monotonic())

        begin_file(self.place[0])
        try:
            for checkpoint in self._survey.checkpoints:
                for finding in find_damage(checkpoint, begin_file):
                    self._findings.setdefault(checkpoint.folder, []).append(finding)
                    if finding.severity == "error":
                        problem = Problem(path=Path(finding.file), message=finding.message, fix=finding.fix)
                        self.problems.append(problem)
                        self._on_damage(problem)
        except BaseException as error:
            self.error = error
            raise
        finally:
            self.ended.set()


class _Watch:
    """Watches the passes of a warm-up and its damage check, for the calling thread."""

    def __init__(self, survey: Survey, first_pass: Transfer) -> None:
        self.passes = [first_pass]
        """The passes so far. The last one is under way."""
        self.check = _DamageCheck(survey, first_pass.skip_damaged)
        self.gave_up = False
        self._chosen, self._options = survey.chosen, survey.options
        self._started_s = time.monotonic()
        self._read: deque[tuple[float, int]] = deque([(self._started_s, 0)])
        """(time, bytes read by then), over the last seconds."""
        paths = ((each.file.path, str(each.file_system.mount)) for each in survey.files)
        self._mounts = {place: mount for path, mount in paths for place in (path, path.parent)}
        """Each file and each folder of files -> its mount, for people."""
        self._problems: dict[Problem, None] = {}
        """The known problems, in the order in which they became known."""

    def run_pass(self, observe: Callable[[WarmProgress], None], stop: threading.Event) -> Residency:
        """Let the threads of the last pass run until they and the damage check end, `stop` is set, or the storage has
        stalled too long. Return what is resident then."""
        this_pass = self.passes[-1]
        this_pass.start()
        try:
            while not (this_pass.ended.is_set() and self.check.ended.is_set()) and not stop.is_set():
                since = [since_s for _, _, _, since_s in self._waiting_threads()]
                limit = self._options.give_up_s
                self.gave_up = bool(since) and limit is not None and time.monotonic() - max(since) > limit
                if self.gave_up:
                    break
                observe(self.progress())
                (this_pass if not this_pass.ended.is_set() else self.check).ended.wait(PERIOD_S)
        finally:
            this_pass.stop()
        # For the steps under way; a thread that hangs is left alone.
        this_pass.ended.wait(PERIOD_S)
        # A storage that stalls would not answer this either.
        if self.gave_up:
            return {}
        answer: dict[Path, int | None] = {}
        # In a daemon thread, because opening a file of a server that is gone never returns.

        def ask() -> None:
            answer.update({each.file.path: each.ask_resident() for each in self._chosen})

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        asked_s = time.monotonic()
        while thread.is_alive():
            thread.join(_TICK_S)
            limits = [self._options.give_up_s, _STOP_PATIENCE_S if stop.is_set() else None]
            if any(limit is not None and time.monotonic() - asked_s > limit for limit in limits):
                return {}
        return answer

    def dropped_files(self, residency: Residency) -> list[SurveyedFile]:
        """Files that were brought in, and that the kernel has dropped a part of since."""
        files = [file.surveyed for file in self.passes[0].files if not file.segments_left and not file.problem]
        parts = [(each, residency.get(each.file.path)) for each in files]
        return [each for each, part in parts if part is not None and part < STAYED_SHARE * each.file.size]

    def raise_errors(self) -> None:
        """Raise the error that ended one of the threads: a bug."""
        for error in (self.check.error, *(each.error for each in self.passes)):
            if error is not None:
                raise error

    def progress(self) -> WarmProgress:
        now = time.monotonic()
        files = self.passes[0].files
        done, found = sum(file.done for file in files), sum(file.found for file in files)
        again = sum(file.done - file.found for each in self.passes[1:] for file in each.files)
        self._read.append((now, done - found + again))
        while len(self._read) > 2 and now - self._read[1][0] > _RATE_OVER_S:
            self._read.popleft()
        then, read_then = self._read[0]
        rate = (done - found + again - read_then) / max(now - then, 1e-9)
        to_come = sum(file.surveyed.file.size - file.done for file in self.passes[-1].files if not file.problem)
        return WarmProgress(
            total=sum(file.surveyed.file.size for file in files),
            done=done,
            found=found,
            again=again,
            num_files=len(files),
            num_files_done=sum(not file.segments_left for file in files),
            elapsed_s=now - self._started_s,
            rate=rate,
            eta_s=to_come / rate if rate else None,
            stalls=tuple(
                Stall(
                    path=path,
                    offset=offset,
                    waited_s=now - since_s,
                    waits_in=_kernel_function(thread),
                    mount=self._mounts.get(path) or self._mounts.get(path.parent, ""),
                )
                for path, offset, thread, since_s in self._waiting_threads()
                if now - since_s > self._options.stall_s
            ),
            problems=self._known_problems(),
        )

    def _known_problems(self) -> tuple[Problem, ...]:
        """A file's header and its bytes may both show one damage: the problem that was known first is reported."""
        of_check = list(self.check.problems)
        of_files = [file.problem for each in self.passes for file in each.files if file.problem]
        for problems, others in ((of_check, of_files), (of_files, of_check)):
            reported = {problem.path for problem in others if problem in self._problems}
            self._problems.update(dict.fromkeys(problem for problem in problems if problem.path not in reported))
        return tuple(self._problems)

    def _waiting_threads(self) -> list[tuple[Path, int, int, float]]:
        """(file, byte, thread, time of its last byte) of each thread that waits for storage."""
        places = [(place.file, place.offset, place.thread_id, place.since_s) for place in self.passes[-1].places]
        waiting = [(file.path, offset, thread, since_s) for file, offset, thread, since_s in places if file]
        return waiting if self.check.ended.is_set() else [*waiting, self.check.place]


def _kernel_function(thread_id: int) -> str:
    """The function that a thread waits in; "" where the kernel hides it, as some do from ordinary users."""
    try:
        name = Path(f"/proc/self/task/{thread_id}/wchan").read_text()
    except OSError:
        return ""
    return "" if name == "0" else name
