"""Bringing the files of a survey into the page cache."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from deepseek_triton_tools.warming.checkpoint.checksums import Checksum, expected_checksums
from deepseek_triton_tools.warming.checkpoint.survey import Survey, SurveyedFile
from deepseek_triton_tools.warming.damage_check import DamageCheck
from deepseek_triton_tools.warming.pagecache.residency import known_sum
from deepseek_triton_tools.warming.residency_query import Residency, ask_residency
from deepseek_triton_tools.warming.transfer import Transfer
from deepseek_triton_tools.warming.warm_progress import STAYED_SHARE, ProgressWatch, WarmProgress

PERIOD_S = 0.5
"""Seconds between two looks at the threads."""
MORE_PASSES = 2
"""Passes after the first one, while the kernel has dropped some of the files for the sake of other processes. If it
still drops them after that, there is no room for them."""


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


def warm(
    survey: Survey, *, observe: Callable[[WarmProgress], None] | None = None, stop: threading.Event | None = None
) -> WarmResult:
    """Bring the chosen files of `survey` into the page cache, and check meanwhile whether they are whole.

    A file that can't be read becomes a problem of the result, and the other files are read all the same.

    :param observe: called about twice a second in the calling thread, and once at the end.
    :param stop: when it is set, the warm-up ends within a moment and returns what has been done.
    :raises CheckpointError: when options.verify is set and the checksums can't be read.
    """
    stop = stop or threading.Event()
    first_pass = _first_pass(survey)
    check = DamageCheck(survey, on_damage=first_pass.skip_damaged)
    watch = ProgressWatch(survey, first_pass, check)
    check.start()
    _run_pass(watch, observe, stop)
    residency = _residency_now(survey, watch, stop)
    for _ in range(0 if survey.exceeds_headroom else MORE_PASSES):
        dropped = watch.dropped_files(residency)
        if not dropped or watch.gave_up or stop.is_set():
            break
        watch.passes.append(_transfer(survey, dropped, {}))
        _run_pass(watch, observe, stop)
        residency = _residency_now(survey, watch, stop)
    watch.raise_errors()
    examined = check.examined()
    resident = known_sum(residency.get(each.file.path) for each in examined.chosen)
    progress = replace(watch.progress(), resident=resident)
    if observe:
        observe(progress)
    return WarmResult(
        survey=examined,
        progress=progress,
        resident=resident,
        was_stopped=stop.is_set(),
        gave_up=watch.gave_up,
        num_verified=first_pass.num_verified,
        num_unverified=len(first_pass.files) - first_pass.num_verified if survey.options.verify else 0,
    )


def _residency_now(survey: Survey, watch: ProgressWatch, stop: threading.Event) -> Residency:
    """Nothing is known after the warm-up gave up: a storage that stalls would not answer this either."""
    return {} if watch.gave_up else ask_residency(survey.chosen, stop=stop, limit_s=survey.options.give_up_s)


def _run_pass(watch: ProgressWatch, observe: Callable[[WarmProgress], None] | None, stop: threading.Event) -> None:
    """Let the threads of the current pass run until they end, `stop` is set, or the storage has stalled too long."""
    watch.passes[-1].start()
    try:
        while not watch.wait_for_end(PERIOD_S) and not watch.should_give_up() and not stop.is_set():
            if observe:
                observe(watch.progress())
    finally:
        watch.passes[-1].stop()
    watch.passes[-1].ended.wait(PERIOD_S)  # for the steps under way; a thread that hangs is left alone


def _first_pass(survey: Survey) -> Transfer:
    checkpoints = survey.checkpoints if survey.options.verify else ()
    checksums = {path: sum_ for checkpoint in checkpoints for path, sum_ in expected_checksums(checkpoint).items()}
    # Files in memory (tmpfs) need no reading, unless their checksum is to be compared.
    files = [file for file in survey.chosen if file.file_system.reading.jobs or file.file.path in checksums]
    return _transfer(survey, files, checksums)


def _transfer(survey: Survey, files: Sequence[SurveyedFile], checksums: Mapping[Path, Checksum]) -> Transfer:
    limit = survey.options.rate_limit
    rate_limit = None if limit is None else limit / survey.num_working_shares
    return Transfer(files, jobs=survey.jobs, rate_limit=rate_limit, checksums=checksums)
