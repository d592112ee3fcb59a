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
from deepseek_triton_tools.checkpoints.hub import Hub, HubFile, HubListing
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
    listing = patience.until_it_answers(str(options.name), lambda: hub.listing(options.name))
    files = choose(listing, options.include, options.exclude)
    target = make_target(listing, options.folder)
    received = 0
    if all(map(target.is_done, files)):
        target.finish(files)
    else:
        if isinstance(target, FolderTarget) and (num := target.num_pointers(files)):
            view.say(
                f"{target.folder} is a Git clone without its large files: the files replace {num} Git LFS pointers"
            )
        target.lock.parent.mkdir(parents=True, exist_ok=True)
        with download_lock(target.lock, view.waits_for):
            target.claim()
            # Others may have brought them.
            if missing := [file for file in files if not target.is_done(file)]:
                received = _bring(hub, target, files, missing, options, stop, view)
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
    # The cache has one partial file for all files with the same bytes, so that one thread brings these.
    groups: dict[Path, list[HubFile]] = {}
    for file in missing:
        groups.setdefault(target.partial(file), []).append(file)
    _check_room(target, sum(target.missing_bytes(group[0]) for group in groups.values()))
    messages: queue.SimpleQueue[str] = queue.SimpleQueue()
    transfer = FileTransfer(
        hub,
        target,
        rate_limit=RateLimit(options.rate_limit, stop),
        patience=Patience(options.give_up_s, options.first_wait_s, stop, messages.put),
        stop=stop,
        say=messages.put,
    )
    workers = _Workers(transfer, list(groups.values()), options.jobs, stop)
    present = [file for file in files if file not in missing]

    def show() -> None:
        while not messages.empty():
            view.say(messages.get())
        view.progress(workers.progress(present))

    try:
        while not workers.ended.wait(_TICK_S):
            show()
    finally:
        stop.set()
    show()
    workers.raise_errors(target)
    return transfer.received


def _check_room(target: DownloadTarget, needed: int) -> None:
    """:raises CheckpointError: when so many bytes and a margin have no room."""
    free = shutil.disk_usage(target.lock.parent).free
    needed = max(round(needed * _MARGIN), needed + _LEAST_MARGIN) if needed else 0
    if free < needed:
        raise CheckpointError(
            f"{target.folder}: expected {sized(needed)} of free room for what is missing, found {sized(free)}; free "
            f"{sized(needed - free)}, or choose another --to"
        )


class _Workers:
    """Threads that bring files. They are daemons: they need no end, because any end can be continued from."""

    def __init__(self, transfer: FileTransfer, groups: list[list[HubFile]], most: int, stop: threading.Event) -> None:
        """`groups`: one thread brings the files of a group, one after another. `most`: threads."""
        self._transfer, self._stop = transfer, stop
        self._total = sum(file.size for files in groups for file in files)
        self._num_files = sum(map(len, groups))
        # The largest first, so that no thread is left alone with one at the end.
        self._waiting = deque(sorted(groups, key=lambda files: -files[0].size))
        self._lock = threading.Lock()
        self._num_running = min(most, len(groups))
        self._num_done = 0
        self._errors: dict[str, Exception] = {}
        self._came: deque[tuple[float, int]] = deque([(time.monotonic(), 0)])
        """Bytes at some times of the last seconds."""
        self.ended = threading.Event()
        for _ in range(self._num_running):
            threading.Thread(target=self._run, name="download", daemon=True).start()

    def progress(self, present: Sequence[HubFile]) -> DownloadProgress:
        """Return the progress of all files, `present` those that were there before."""
        now, came = time.monotonic(), self._transfer.received + self._transfer.checked
        self._came.append((now, came))
        while len(self._came) > 2 and now - self._came[1][0] > _RATE_OVER_S:
            self._came.popleft()
        then, came_then = self._came[0]
        before = sum(file.size for file in present)
        total = before + self._total
        return DownloadProgress(
            total=total,
            done=min(total, max(0, before + came)),
            num_files=len(present) + self._num_files,
            num_files_done=len(present) + self._num_done,
            rate=max(0, came - came_then) / max(now - then, 1e-9),
        )

    def raise_errors(self, target: DownloadTarget) -> None:
        """Raise what kept files away: all of it, in one error."""
        for error in self._errors.values():
            if not isinstance(error, ToolError | OSError):
                # This is a bug, which the traceback should show.
                raise error
        if self._errors:
            texts = dict.fromkeys(_text(name, error, target) for name, error in sorted(self._errors.items()))
            raise CheckpointError("; ".join(texts))

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                try:
                    files = self._waiting.popleft()
                except IndexError:
                    return
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
                self._num_done += 1
        except StoppedError:
            raise
        except Exception as error:
            # A bug, too, has to end the whole.
            self._errors[file.name] = error
            if not isinstance(error, CheckpointError) or isinstance(error, GaveUpError):
                self._stop.set()


def _text(name: str, error: Exception, target: DownloadTarget) -> str:
    if not isinstance(error, OSError):
        return str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return (
            f"{target.folder}: {error.strerror}; make room and start it again: it continues with the bytes that are "
            "there"
        )
    return f"{error.filename or target.folder / name}: {error.strerror}; nothing else was lost: start it again then"
