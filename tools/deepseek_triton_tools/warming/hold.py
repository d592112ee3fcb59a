"""Warmed files are locked in the page cache, watched and read again, or evicted from it."""

import os
import resource
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from deepseek_triton_tools.host.units import sized
from deepseek_triton_tools.tool_errors import LockError
from deepseek_triton_tools.warming import page_cache
from deepseek_triton_tools.warming.page_cache import evict
from deepseek_triton_tools.warming.survey import Survey, SurveyedFile
from deepseek_triton_tools.warming.warm_up import STAYED_SHARE, warm

# Bytes of one call: 64 MiB. A call reads what is not resident yet, and no signal interrupts it.
WINDOW = 2**26
# Number of the capability's bit in CapEff of /proc/self/status (linux/capability.h).
_CAP_IPC_LOCK = 14
_FIX = (
    "allow it with ulimit -l unlimited in a shell, LimitMEMLOCK=infinity in a systemd unit, --cap-add IPC_LOCK for a "
    "container, or hold by --hold=watch"
)


HoldMode = Literal["auto", "lock", "watch"]

# Rounds in a row after which most of what the round before had brought in was gone again. After that many rounds the
# watch brings nothing in any more.
_ROUNDS_LOST = 3
# Share of the time that may go into asking what is resident: mincore takes 17 ms a GiB.
_ASKING_SHARE = 0.05


class LockedFiles:
    """Files that are mapped and locked until `close`. Their page tables take 2 MiB for each GiB."""

    def __init__(self) -> None:
        self.size = 0
        """Bytes that are locked."""
        self._mappings: list[tuple[int, int]] = []
        """(address, length) of each mapping."""

    def lock(self, paths: Iterable[Path], stop: threading.Event) -> None:
        """Lock the files, one after the other, until all are locked or `stop` is set.

        :raises LockError: when this process may not lock that much, or a file can't be mapped.
        """
        for path in paths:
            try:
                # A pipe in its place must not block. The mapping outlives the descriptor.
                with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb", buffering=0) as file:
                    size = os.fstat(file.fileno()).st_size
                    address = page_cache.map_file(file.fileno(), 0, size) if size else 0
            except OSError as error:
                raise LockError(f"{path}: can't be mapped, which is needed to lock it: {error.strerror}") from error
            self._mappings += [(address, size)] if size else []
            for offset in range(0, size, WINDOW):
                if stop.is_set():
                    return
                length = min(WINDOW, size - offset)
                try:
                    page_cache.lock(address + offset, length)
                except OSError as error:
                    locked = f"{sized(self.size)} were locked, then {path.name} could not be: {error.strerror}"
                    raise LockError(f"{locked}; {_limits()}; {_FIX}") from error
                self.size += length

    def close(self) -> None:
        for address, size in self._mappings:
            page_cache.unmap(address, size)
        self._mappings.clear()


def allow_locking(size: int) -> None:
    """Raise the soft limit on locked memory to the hard one.

    :raises LockError: when `size` bytes are more than the hard limit allows.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))
    if hard != resource.RLIM_INFINITY and hard < size and not _may_lock_all():
        raise LockError(f"locking {sized(size)} needs a higher limit: {_limits()}; {_FIX}")


def _limits() -> str:
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "unlimited" if hard == resource.RLIM_INFINITY else sized(hard)
    return f"RLIMIT_MEMLOCK is {limit}, CAP_IPC_LOCK is {'there' if _may_lock_all() else 'not there'}"


def _may_lock_all() -> bool:
    """Whether no limit holds. In a user namespace the kernel lists CAP_IPC_LOCK but does not honour it."""
    status = Path("/proc/self/status").read_text()
    [effective] = [line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")]
    return bool(int(effective, 16) >> _CAP_IPC_LOCK & 1)


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
    survey: Survey,
    *,
    mode: HoldMode,
    stop: threading.Event,
    observe: Callable[[Held], None] = lambda held: None,
    period_s: float = 15.0,
) -> None:
    """Hold the chosen files until `stop` is set. "auto" locks them, and watches them where locking is not allowed.

    :param observe: called when the files are held, and after each round of a watch.
    :raises LockError: when mode is "lock" and the limit on locked memory is too low or a file can't be mapped; or when
        the files can't be watched, because the kernel does not say what of them is resident.
    """
    not_locked = None
    if mode != "watch":
        try:
            allow_locking(survey.chosen_size)
            with closing(LockedFiles()) as locked:
                locked.lock((each.file.path for each in survey.chosen), stop)
                if not stop.is_set():
                    observe(Held(mode="lock", resident=locked.size, rewarmed=0))
                stop.wait()
            return
        except LockError as error:
            if mode == "lock":
                raise
            not_locked = error
    _Watch(survey, stop, observe, not_locked).run(period_s)


class _Watch:
    """Rounds of asking what was evicted and bringing it in again."""

    def __init__(
        self, survey: Survey, stop: threading.Event, observe: Callable[[Held], None], not_locked: LockError | None
    ) -> None:
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
                result = warm(replace(self._survey, files=tuple(evicted)), stop=self._stop)
                self._rewarmed_last = result.progress.done - result.progress.found
                self._rewarmed += self._rewarmed_last
                for problem in result.progress.problems:
                    self._problem = str(problem)
                evicted = self._evicted()
            self._notify(evicted)

    def _evicted(self) -> dict[SurveyedFile, int]:
        """File -> its bytes that are not resident. Fully resident files and those of unknown residency are left out."""
        resident_of = {each: each.ask_resident() for each in self._survey.chosen}
        _check_watchable(list(resident_of.values()), self._not_locked)
        missing = {each: each.file.size - resident for each, resident in resident_of.items() if resident is not None}
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

    def _notify(self, evicted: dict[SurveyedFile, int]) -> None:
        resident = self._survey.chosen_size - sum(evicted.values())
        self._observe(Held(mode="watch", resident=resident, rewarmed=self._rewarmed, problem=self._problem))


@dataclass(frozen=True, kw_only=True)
class Evicted:
    """One file after the attempt to evict it."""

    path: Path
    left: int | None
    """Bytes that are still in the page cache; None: unknown."""
    reason: str = ""
    """The reason why some of them stayed, for people."""


def evict_all(survey: Survey) -> tuple[Evicted, ...]:
    """Drop every file of the survey, whatever its share or selection."""
    done = []
    for each in survey.files:
        path, left, reason = each.file.path, None, ""
        if not each.file_system.reading.jobs:
            left, reason = each.file.size, f"it lies in memory itself, on {each.file_system.mount.type}"
        else:
            try:
                left = evict(path)
            except OSError as error:
                reason = f"can't be opened: {error.strerror}"
        done.append(Evicted(path=path, left=left, reason=reason))
    users = _users([file.path for file in done if file.left and not file.reason])
    for number, file in enumerate(done):
        if file.left and not file.reason:
            names = ", ".join(users.get(file.path, ()))
            by = f"mapped by {names}" if names else "mapped or locked by a process, or not written back yet"
            done[number] = replace(file, reason=f"{sized(file.left)} stayed: {by}")
    return tuple(done)


def _users(paths: Sequence[Path]) -> Mapping[Path, list[str]]:
    """The processes that have one of the files mapped, as far as this user may see them."""
    by_name = {str(path.resolve()): path for path in paths}
    users: dict[Path, list[str]] = {}
    for pid in filter(str.isdecimal, os.listdir("/proc") if paths else ()):
        try:
            name, maps = Path("/proc", pid, "comm").read_text().strip(), Path("/proc", pid, "maps").read_text()
        except OSError:  # it has ended, or belongs to another user
            continue
        # The file's name is the sixth column (proc(5)).
        mapped = {columns[5] for line in maps.splitlines() if len(columns := line.split(maxsplit=5)) == 6}
        for file in mapped & by_name.keys():
            users.setdefault(by_name[file], []).append(f"{name} ({pid})")
    return users
