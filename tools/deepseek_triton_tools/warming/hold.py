"""Keeping warmed files in the page cache: by locking them, or by watching them and reading again what was evicted."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Literal

from deepseek_triton_tools.host.units import sized
from deepseek_triton_tools.tool_errors import LockError
from deepseek_triton_tools.warming.checkpoint.survey import Survey, SurveyedFile
from deepseek_triton_tools.warming.pagecache.locking import LockedFiles, allow_locking
from deepseek_triton_tools.warming.warm_files import warm
from deepseek_triton_tools.warming.warm_progress import STAYED_SHARE

HoldMode = Literal["auto", "lock", "watch"]

_ROUNDS_LOST = 3
"""Rounds in a row after which most of what the round before had brought in was gone again. After that many rounds
the watch brings nothing in any more."""
_ASKING_SHARE = 0.05
"""Share of the time that may go into asking what is resident: mincore takes 17 ms a GiB."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """The state of the hold after one round."""

    mode: HoldMode
    """"lock" or "watch", never "auto"."""
    resident: int | None
    rewarmed: int
    """Bytes brought in again since the hold began."""
    problem: str | None = None
    """The reason why the hold does not work as it should, in one line."""


Observe = Callable[[Held], None]


def check_hold(survey: Survey, mode: HoldMode) -> None:
    """Check before the files are warmed that they can be held.

    :raises LockError: when it is already clear that they can't be held in this mode.
    """
    if survey.exceeds_headroom:
        raise LockError(
            f"no more can be held than the {sized(survey.memory.headroom)} that fit, and --budget is "
            f"{sized(survey.budget)}; leave --budget or --hold out"
        )
    resident = [each.resident for each in survey.chosen]
    if mode == "watch":
        _check_watchable(resident)
        return
    try:
        allow_locking(survey.chosen_size)
    except LockError as error:
        if mode == "lock":
            raise
        _check_watchable(resident, error)


def _check_watchable(resident: Sequence[int | None], not_locked: LockError | None = None) -> None:
    """
    :param resident: resident bytes of each file.
    :param not_locked: why they can't be locked instead.
    :raises LockError: when the kernel tells of no file what is resident.
    """
    if resident and all(each is None for each in resident):
        why = (
            "the kernel does not say what of these files is in the page cache: they belong to another user, or their "
            "file system does not keep them there"
        )
        if not_locked is not None:
            raise LockError(f"they can be neither watched nor locked; {why}; {not_locked}")
        raise LockError(f"they can't be watched; {why}; run as their owner, or hold by --hold=lock")


def hold(
    survey: Survey, *, mode: HoldMode, stop: threading.Event, observe: Observe | None = None, period_s: float = 15.0
) -> None:
    """Hold the chosen files until `stop` is set. "auto" locks them, and watches them where locking is not allowed.

    :param observe: called when the files are held, and after each round of a watch.
    :raises LockError: when mode is "lock" and the limit on locked memory is too low or a file can't be mapped; or when
        the files can't be watched, because the kernel does not say what of them is resident.
    """
    observe = observe or (lambda held: None)
    not_locked = None
    if mode != "watch":
        try:
            _lock(survey, stop, observe)
            return
        except LockError as error:
            if mode == "lock":
                raise
            not_locked = error
    _Watch(survey, stop, observe, not_locked).run(period_s)


def _lock(survey: Survey, stop: threading.Event, observe: Observe) -> None:
    allow_locking(survey.chosen_size)
    with closing(LockedFiles()) as locked:
        locked.lock((each.file.path for each in survey.chosen), stop)
        if not stop.is_set():
            observe(Held(mode="lock", resident=locked.size, rewarmed=0))
        stop.wait()


class _Watch:
    """Rounds of asking what was evicted and bringing it in again."""

    def __init__(self, survey: Survey, stop: threading.Event, observe: Observe, not_locked: LockError | None) -> None:
        # Headers and checksums were checked by the first warm-up; they are not checked again.
        self._survey = replace(survey, checkpoints=(), options=replace(survey.options, verify=False, give_up_s=None))
        self._stop = stop
        self._observe = observe
        self._not_locked = not_locked
        self._problem = None if not_locked is None else f"watching, not locking: {not_locked}"
        self._rewarmed = self._rewarmed_last = self._rounds_lost = 0

    def run(self, period_s: float) -> None:
        began = time.monotonic()
        evicted = self._evicted()
        wait_s = max(period_s, (time.monotonic() - began) / _ASKING_SHARE)
        self._notify(evicted)
        while not self._stop.wait(wait_s):
            evicted = self._evicted()
            self._count_lost_rounds(sum(evicted.values()))
            if evicted and self._rounds_lost < _ROUNDS_LOST:
                self._bring_in_again(tuple(evicted))
                evicted = self._evicted()
            self._notify(evicted)

    def _evicted(self) -> dict[SurveyedFile, int]:
        """File -> its bytes that are not resident. Fully resident files and those of unknown residency are left out."""
        asked = {each: each.ask_resident() for each in self._survey.chosen}
        _check_watchable(list(asked.values()), self._not_locked)
        missing = {each: each.file.size - resident for each, resident in asked.items() if resident is not None}
        return {each: num_bytes for each, num_bytes in missing.items() if num_bytes > 0}

    def _count_lost_rounds(self, missing: int) -> None:
        """Count the rounds in a row whose work did not stay.

        :param missing: bytes that are not resident now.
        """
        if self._rounds_lost >= _ROUNDS_LOST:
            return
        is_noise = missing <= (1 - STAYED_SHARE) * self._survey.chosen_size
        is_lost = not is_noise and bool(self._rewarmed_last) and 2 * missing >= self._rewarmed_last
        self._rounds_lost = self._rounds_lost + 1 if is_lost else 0
        if self._rounds_lost == _ROUNDS_LOST:
            self._problem = (
                f"evicted faster than it can be brought in: {sized(missing)} are gone again, {_ROUNDS_LOST} times "
                "in a row, and now left alone; give this node more memory, lower --budget, or hold by --hold=lock"
            )

    def _bring_in_again(self, files: tuple[SurveyedFile, ...]) -> None:
        result = warm(replace(self._survey, files=files), stop=self._stop)
        self._rewarmed_last = result.progress.done - result.progress.found
        self._rewarmed += self._rewarmed_last
        for problem in result.progress.problems:
            self._problem = str(problem)

    def _notify(self, evicted: dict[SurveyedFile, int]) -> None:
        resident = self._survey.chosen_size - sum(evicted.values())
        self._observe(Held(mode="watch", resident=resident, rewarmed=self._rewarmed, problem=self._problem))
