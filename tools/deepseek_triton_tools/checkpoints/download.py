"""Download a checkpoint from the Hugging Face hub: verified as it lands, continued after any end, one process at a
time."""

from __future__ import annotations

import errno
import queue
import shutil
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Protocol

from deepseek_triton_build.text import first_names
from deepseek_triton_tools.checkpoints.download_lock import download_lock
from deepseek_triton_tools.checkpoints.download_target import DownloadTarget, FolderTarget, make_target
from deepseek_triton_tools.checkpoints.download_transfer import FileTransfer, GaveUpError, Patience, RateLimit
from deepseek_triton_tools.checkpoints.folder_files import StoppedError
from deepseek_triton_tools.checkpoints.hub import Hub, HubFile, HubListing, TryAgainError
from deepseek_triton_tools.host.units import sized
from deepseek_triton_tools.repository.checkpoint_manifest import MANIFEST_NAME
from deepseek_triton_tools.repository.hub_cache import HubName
from deepseek_triton_tools.tool_errors import CheckpointError, ToolError

SERVED = ("*.safetensors", "*.json", "*.py", "*.txt", "*.jinja", "*.model", "LICEN[CS]E*", "NOTICE*", "README.md")
"""The files that serving needs, and what may be done with them. Weights in other formats are left out."""
NOT_SERVED = ("original/*", "consolidated*.safetensors")
"""The same weights once more, as their maker stored them."""
_MARGIN = 1.01
_LEAST_MARGIN = 16 * 2**20
_RATE_OVER_S = 10.0
_TICK_S = 0.1


@dataclass(frozen=True, kw_only=True)
class DownloadOptions:
    name: HubName
    folder: Path | None = None
    """None: the hub's cache."""
    include: Sequence[str] = SERVED
    exclude: Sequence[str] = NOT_SERVED
    jobs: int = 4
    """Files at once."""
    rate_limit: float | None = None
    """Bytes a second."""
    give_up_s: float = 300.0
    """Seconds without a byte after which it ends."""
    first_wait_s: float = 1.0
    """Seconds before the second try of a request; later waits are longer."""


@dataclass(frozen=True, kw_only=True)
class DownloadProgress:
    total: int
    """Bytes of all files to have."""
    done: int
    num_files: int
    num_files_done: int
    rate: float
    """Bytes a second, over the last ten seconds."""

    @property
    def left_s(self) -> float | None:
        return (self.total - self.done) / self.rate if self.rate else None


@dataclass(frozen=True, kw_only=True)
class DownloadResult:
    folder: Path
    listing: HubListing
    files: tuple[HubFile, ...]
    received: int
    """Bytes that came now."""

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


class DownloadView(Protocol):
    """Receives what happens."""

    def say(self, text: str, /) -> None:
        """Take a line that stays."""

    def progress(self, progress: DownloadProgress, /) -> None:
        """Take the progress, about ten times a second."""

    def waits_for(self, holder: str, /) -> None:
        """Take who else downloads, while that lasts."""


def download(options: DownloadOptions, view: DownloadView, hub: Hub | None = None) -> DownloadResult:
    """Bring all files, and return when each is in its place and verified.

    :raises CheckpointError: naming every file that could not be brought, or what else is in the way.
    :raises OSError: when the target can't be written.
    """
    hub = hub or Hub()
    stop = threading.Event()
    patience = Patience(options.give_up_s, options.first_wait_s, stop, view.say)
    listing = _listing(hub, options.name, patience)
    files = choose(listing, options.include, options.exclude)
    target = make_target(listing, options.folder)
    received = 0
    if not all(map(target.is_done, files)):
        if isinstance(target, FolderTarget) and (num := target.num_pointers(files)):
            view.say(
                f"{target.folder} is a Git clone without its large files: the files replace {num} Git LFS pointers"
            )
        target.lock.parent.mkdir(parents=True, exist_ok=True)
        with download_lock(target.lock, view.waits_for):
            target.claim()
            if missing := [file for file in files if not target.is_done(file)]:  # others may have brought them
                _check_room(target, missing)
                received = _bring(hub, target, files, missing, options, stop, view)
            target.finish(files)
    else:
        target.finish(files)
    if isinstance(target, FolderTarget) and (strays := target.strays()):
        view.say(
            f"{target.folder} has weight files that are not of this revision: {first_names(strays)}; remove them: "
            "TensorRT-LLM reads them too"
        )
    return DownloadResult(folder=target.folder, listing=listing, files=files, received=received)


def choose(listing: HubListing, include: Sequence[str], exclude: Sequence[str]) -> tuple[HubFile, ...]:
    """Return the files whose path matches a pattern of `include` and none of `exclude`.

    The model's own manifest is left out, because the download writes another one in its place.

    :raises CheckpointError: when no file does.
    """
    files = tuple(
        file
        for file in listing.files
        if file.name != MANIFEST_NAME
        and any(fnmatchcase(file.name, pattern) for pattern in include)
        and not any(fnmatchcase(file.name, pattern) for pattern in exclude)
    )
    if not files:
        raise CheckpointError(
            f"{listing.name}: expected files like {', '.join(include)}, the hub lists "
            f"{first_names(file.name for file in listing.files) or 'none'}; correct --include, --exclude or the name"
        )
    return files


def _listing(hub: Hub, name: HubName, patience: Patience) -> HubListing:
    num_failed = 0
    while True:
        try:
            return hub.listing(name)
        except TryAgainError as error:
            patience.wait(str(name), error, num_failed)
            num_failed += 1


def _check_room(target: DownloadTarget, missing: Sequence[HubFile]) -> None:
    needed = sum(target.missing_bytes(same[0]) for same in _by_partial(target, missing))
    if not needed:
        return
    needed = max(round(needed * _MARGIN), needed + _LEAST_MARGIN)
    free = shutil.disk_usage(target.lock.parent).free
    if free < needed:
        raise CheckpointError(
            f"{target.folder}: expected {sized(needed)} of free room for what is missing, found {sized(free)}; free "
            f"{sized(needed - free)}, or choose another --to"
        )


def _by_partial(target: DownloadTarget, files: Sequence[HubFile]) -> list[list[HubFile]]:
    """Put the files together that come by one partial file: the cache has one for all files with the same bytes."""
    found: dict[Path, list[HubFile]] = {}
    for file in files:
        found.setdefault(target.partial(file), []).append(file)
    return list(found.values())


def _bring(
    hub: Hub,
    target: DownloadTarget,
    files: Sequence[HubFile],
    missing: Sequence[HubFile],
    options: DownloadOptions,
    stop: threading.Event,
    view: DownloadView,
) -> int:
    """Bring the missing files in several threads, and return the bytes that came from the hub."""
    said: queue.SimpleQueue[str] = queue.SimpleQueue()
    transfer = FileTransfer(
        hub,
        target,
        rate_limit=RateLimit(options.rate_limit, stop),
        patience=Patience(options.give_up_s, options.first_wait_s, stop, said.put),
        stop=stop,
        say=said.put,
    )
    groups = _by_partial(target, missing)
    workers = _Workers(transfer, groups, min(options.jobs, len(groups)), stop)
    watch = _TransferWatch(sum(file.size for file in files), len(files), missing, transfer, workers)
    try:
        while not workers.ended.wait(_TICK_S):
            _pass_on(said, view)
            view.progress(watch.progress())
    finally:
        stop.set()
    _pass_on(said, view)
    view.progress(watch.progress())
    workers.raise_errors(target)
    return transfer.received


def _pass_on(said: queue.SimpleQueue[str], view: DownloadView) -> None:
    while not said.empty():
        view.say(said.get())


class _Workers:
    """Threads that bring files. They are daemons: they need no end, because any end can be continued from."""

    def __init__(self, transfer: FileTransfer, groups: list[list[HubFile]], num: int, stop: threading.Event) -> None:
        """`groups`: one thread brings the files of a group, one after another."""
        self._transfer, self._stop = transfer, stop
        # The largest first, so that no thread is left alone with one at the end.
        self._waiting = deque(sorted(groups, key=lambda files: -files[0].size))
        self._lock = threading.Lock()
        self._num_running = num
        self._errors: dict[str, Exception] = {}
        self.num_done = 0
        self.ended = threading.Event()
        for _ in range(num):
            threading.Thread(target=self._run, name="download", daemon=True).start()

    def raise_errors(self, target: DownloadTarget) -> None:
        """Raise what kept files away: all of it, in one error."""
        bugs = [error for error in self._errors.values() if not isinstance(error, ToolError | OSError)]
        if bugs:
            raise bugs[0]
        if self._errors:
            texts = dict.fromkeys(_text(name, error, target) for name, error in sorted(self._errors.items()))
            raise CheckpointError("; ".join(texts))

    def _run(self) -> None:
        try:
            while (files := self._next()) is not None:
                for file in files:
                    self._bring(file)
        except StoppedError:
            return
        finally:
            with self._lock:
                self._num_running -= 1
                if not self._num_running:
                    self.ended.set()

    def _bring(self, file: HubFile) -> None:
        try:
            self._transfer.bring(file)
            with self._lock:
                self.num_done += 1
        except StoppedError:
            raise
        except Exception as error:  # a bug, too, has to end the whole
            self._errors[file.name] = error
            if not isinstance(error, CheckpointError) or isinstance(error, GaveUpError):
                self._stop.set()

    def _next(self) -> list[HubFile] | None:
        with self._lock:
            return None if self._stop.is_set() or not self._waiting else self._waiting.popleft()


def _text(name: str, error: Exception, target: DownloadTarget) -> str:
    if not isinstance(error, OSError):
        return str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return (
            f"{target.folder}: {error.strerror}; make room and start it again: it continues with the bytes that are "
            "there"
        )
    return f"{error.filename or target.folder / name}: {error.strerror}; nothing else was lost: start it again then"


class _TransferWatch:
    """Knows the progress, for the thread that shows it."""

    def __init__(
        self, total: int, num_files: int, missing: Sequence[HubFile], transfer: FileTransfer, workers: _Workers
    ) -> None:
        self._total, self._num_files = total, num_files
        self._missing = missing
        self._transfer, self._workers = transfer, workers
        self._before = total - sum(file.size for file in missing)
        self._came: deque[tuple[float, int]] = deque([(time.monotonic(), 0)])

    def progress(self) -> DownloadProgress:
        now, came = time.monotonic(), self._transfer.received + self._transfer.checked
        self._came.append((now, came))
        while len(self._came) > 2 and now - self._came[1][0] > _RATE_OVER_S:
            self._came.popleft()
        then, came_then = self._came[0]
        return DownloadProgress(
            total=self._total,
            done=min(self._total, max(0, self._before + came)),
            num_files=self._num_files,
            num_files_done=self._num_files - len(self._missing) + self._workers.num_done,
            rate=max(0, came - came_then) / max(now - then, 1e-9),
        )
