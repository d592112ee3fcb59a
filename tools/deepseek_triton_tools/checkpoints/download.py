"""Download a checkpoint from the Hugging Face hub: verified as it lands, continued after any end, one process at a
time."""

import errno
import os
import queue
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from deepseek_triton_build.text import first_names
from deepseek_triton_tools.checkpoints.download_target import CacheTarget, DownloadTarget, FolderTarget, download_lock
from deepseek_triton_tools.checkpoints.folder_files import StoppedError, add_file
from deepseek_triton_tools.checkpoints.hub import Hub, HubFile, HubListing, TryAgainError
from deepseek_triton_tools.host.units import about, part_of, sized
from deepseek_triton_tools.repository.checkpoint_manifest import MANIFEST_NAME
from deepseek_triton_tools.repository.hub_cache import HubName
from deepseek_triton_tools.terminal.status_line import StatusLine
from deepseek_triton_tools.tool_errors import CheckpointError, ToolError
from deepseek_triton_tools.warming.transfer import Pace

if TYPE_CHECKING:
    from hashlib import _Hash

SERVED = ("*.safetensors", "*.json", "*.py", "*.txt", "*.jinja", "*.model", "LICEN[CS]E*", "NOTICE*", "README.md")
"""The files that serving needs, and what may be done with them. Weights in other formats are left out."""
NOT_SERVED = ("original/*", "consolidated*.safetensors")
"""The same weights once more, as their maker stored them."""
_MARGIN = 1.01
_LEAST_MARGIN = 16 * 2**20
_RATE_OVER_S = 10.0
_TICK_S = 0.1
_PLAIN_S = 15.0
_LONGEST_WAIT_S = 60.0
_MOST_WRONG = 3
"""Times that a file is downloaded before its bytes are said to be wrong."""
_T = TypeVar("_T")


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

    def __str__(self) -> str:
        done, rate = part_of(self.done, self.total), f"{sized(self.rate)}/s"
        text = f"files {self.num_files_done}/{self.num_files}, {done}, {rate}"
        left = self.total - self.done
        return f"{text}, {about(left / self.rate)} left" if left and self.rate else text


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


class DownloadView:
    """Shows what happens on stderr."""

    def __init__(self) -> None:
        self._status = StatusLine(_PLAIN_S)
        self._holder = ""
        self.clear = self._status.clear

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self._status.say(text)

    def progress(self, progress: DownloadProgress) -> None:
        """Take the progress, about ten times a second."""
        self._status.show(lambda: str(progress))

    def waits_for(self, holder: str) -> None:
        """Take who else downloads, while that lasts."""
        if holder != self._holder:
            self._holder = holder
            self.say(f"waits for {holder}, which downloads to the same place")
        self._status.show(lambda: f"still waits for {holder}")


def download(options: DownloadOptions, view: DownloadView, hub: Hub | None = None) -> DownloadResult:
    """Bring all files, and return when each is in its place and verified.

    :raises CheckpointError: naming every file that could not be brought, or what else is in the way.
    :raises OSError: when the target can't be written.
    """
    hub = hub or Hub()
    patience = _Patience(options, view.say)
    listing = patience.until_it_answers(str(options.name), lambda: hub.listing(options.name))
    files = _chosen(listing, options)
    target = CacheTarget(listing) if options.folder is None else FolderTarget(listing, options.folder)
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
            if isinstance(target, FolderTarget):
                target.claim()
            # Others may have brought them.
            if missing := [file for file in files if not target.is_done(file)]:
                received = _bring(hub, target, files, missing, options, view)
            target.finish(files)
    if isinstance(target, FolderTarget) and (strays := target.strays()):
        view.say(
            f"{target.folder} has weight files that are not of this revision: {first_names(strays)}; remove them: "
            "TensorRT-LLM reads them too"
        )
    return DownloadResult(folder=target.folder, listing=listing, files=files, received=received)


def _chosen(listing: HubListing, options: DownloadOptions) -> tuple[HubFile, ...]:
    """Return the files that match a pattern of `include` and none of `exclude`.

    The model's own manifest is left out, because the download writes another one in its place.

    :raises CheckpointError: when no file does.
    """
    files = tuple(
        file
        for file in listing.files
        if file.name != MANIFEST_NAME
        and any(fnmatchcase(file.name, pattern) for pattern in options.include)
        and not any(fnmatchcase(file.name, pattern) for pattern in options.exclude)
    )
    if not files:
        raise CheckpointError(
            f"{listing.name}: expected files like {', '.join(options.include)}, the hub lists "
            f"{first_names(file.name for file in listing.files) or 'none'}; correct --include, --exclude or the name"
        )
    return files


def _bring(
    hub: Hub,
    target: DownloadTarget,
    files: Sequence[HubFile],
    missing: Sequence[HubFile],
    options: DownloadOptions,
    view: DownloadView,
) -> int:
    """Bring the missing files in several threads, and return the bytes that came from the hub."""
    # The cache has one partial file for all files with the same bytes, so that one thread brings these.
    groups: dict[Path, list[HubFile]] = {}
    for file in missing:
        groups.setdefault(target.partial(file), []).append(file)
    needed = sum(target.missing_bytes(group[0]) for group in groups.values())
    needed = max(round(needed * _MARGIN), needed + _LEAST_MARGIN) if needed else 0
    free = shutil.disk_usage(target.lock.parent).free
    if free < needed:
        raise CheckpointError(
            f"{target.folder}: expected {sized(needed)} of free room for what is missing, found {sized(free)}; free "
            f"{sized(needed - free)}, or choose another --to"
        )
    messages: queue.SimpleQueue[str] = queue.SimpleQueue()
    transfer = _Transfer(hub, target, list(groups.values()), options, messages.put)
    present = [file for file in files if file not in missing]
    try:
        is_last = False
        while not is_last:
            is_last = transfer.ended.wait(_TICK_S)
            while not messages.empty():
                view.say(messages.get())
            view.progress(transfer.progress(present))
    finally:
        transfer.stop.set()
    transfer.raise_errors()
    return transfer.received


class _GaveUpError(CheckpointError):
    """Nothing has come for too long."""


class _Patience:
    """Waits between tries, until no byte of any file has come for `give_up_s` seconds."""

    def __init__(self, options: DownloadOptions, say: Callable[[str], object]) -> None:
        self._options, self._say = options, say
        self.last_s = time.monotonic()
        """The time of the last byte."""
        self.stop = threading.Event()

    def until_it_answers(self, what: str, ask: Callable[[], _T]) -> _T:
        """Ask again and again, and return the answer.

        :raises _GaveUpError: when there was none for too long.
        """
        num_failed = 0
        while True:
            try:
                return ask()
            except TryAgainError as error:
                self.wait(what, error, num_failed)
                num_failed += 1

    def wait(self, what: str, error: TryAgainError, num_failed: int) -> None:
        """Wait before the next try, as long as the hub asks for, else longer each time.

        :raises _GaveUpError: when the next try would come too late.
        :raises StoppedError: when the work was told to stop.
        """
        give_up_s = self._options.give_up_s
        own_s = min(self._options.first_wait_s * 2 ** min(num_failed, 10), _LONGEST_WAIT_S)
        left_s = self.last_s + give_up_s - time.monotonic()
        wait_s = min(own_s, left_s) if error.wait_s is None else error.wait_s
        if left_s <= 0 or wait_s > left_s:
            asks = "" if error.wait_s is None else f", and asks to wait {about(error.wait_s)}"
            raise _GaveUpError(
                f"{what}: {error}{asks}; nothing came for {about(give_up_s - max(0.0, left_s))}, given up; start it "
                "again later, which continues, or raise --give-up"
            )
        self._say(f"{what}: {error}; next try in {about(wait_s)}")
        if self.stop.wait(wait_s):
            raise StoppedError


class _Transfer:
    """Threads that bring files. They are daemons: they need no end, because any end can be continued from."""

    def __init__(
        self,
        hub: Hub,
        target: DownloadTarget,
        groups: list[list[HubFile]],
        options: DownloadOptions,
        say: Callable[[str], object],
    ) -> None:
        """`groups`: one thread brings the files of a group, one after another."""
        self._hub, self._target, self._say = hub, target, say
        self._patience = _Patience(options, say)
        self.stop = self._patience.stop
        self._pace = Pace(options.rate_limit)
        self._files = [file for files in groups for file in files]
        # The largest first, so that no thread is left alone with one at the end.
        self._waiting = deque(sorted(groups, key=lambda files: -files[0].size))
        self._lock = threading.Lock()
        self._num_running = min(options.jobs, len(groups))
        self._num_done = 0
        self._errors: dict[str, Exception] = {}
        self.received = 0
        """Bytes that came from the hub."""
        self._checked = 0
        """Bytes of files, and of parts of files, that were there and were hashed."""
        self._came: deque[tuple[float, int]] = deque([(time.monotonic(), 0)])
        """Bytes at some times of the last seconds."""
        self.ended = threading.Event()
        for _ in range(self._num_running):
            threading.Thread(target=self._run, name="download", daemon=True).start()

    def progress(self, present: Sequence[HubFile]) -> DownloadProgress:
        """Return the progress of all files, `present` those that were there before."""
        now, came = time.monotonic(), self.received + self._checked
        self._came.append((now, came))
        while len(self._came) > 2 and now - self._came[1][0] > _RATE_OVER_S:
            self._came.popleft()
        then, came_then = self._came[0]
        before = sum(file.size for file in present)
        total = before + sum(file.size for file in self._files)
        return DownloadProgress(
            total=total,
            done=min(total, max(0, before + came)),
            num_files=len(present) + len(self._files),
            num_files_done=len(present) + self._num_done,
            rate=max(0, came - came_then) / max(now - then, 1e-9),
        )

    def raise_errors(self) -> None:
        """Raise what kept files away: all of it, in one error."""
        texts: dict[str, None] = {}
        for name, error in sorted(self._errors.items()):
            if isinstance(error, OSError):
                place = error.filename or self._target.folder / name
                fix = "nothing else was lost: start it again then"
                if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                    place = self._target.folder
                    fix = "make room and start it again: it continues with the bytes that are there"
                texts[f"{place}: {error.strerror}; {fix}"] = None
            elif isinstance(error, ToolError):
                texts[str(error)] = None
            else:
                # This is a bug, which the traceback should show.
                raise error
        if texts:
            raise CheckpointError("; ".join(texts))

    def _run(self) -> None:
        try:
            while not self.stop.is_set():
                for file in self._waiting.popleft():
                    self._bring_or_note(file)
        except (IndexError, StoppedError):
            return
        finally:
            with self._lock:
                self._num_running -= 1
                if not self._num_running:
                    self.ended.set()

    def _bring_or_note(self, file: HubFile) -> None:
        try:
            self._bring(file)
            with self._lock:
                self._num_done += 1
        except StoppedError:
            raise
        except Exception as error:
            # A bug, too, has to end the whole.
            self._errors[file.name] = error
            if not isinstance(error, CheckpointError) or isinstance(error, _GaveUpError):
                self.stop.set()

    def _bring(self, file: HubFile) -> None:
        """Put the verified file into its place.

        :raises CheckpointError: when the hub refuses it, keeps sending wrong bytes, or nothing comes.
        :raises OSError: when it can't be written.
        :raises StoppedError: when the work was told to stop.
        """
        if self._target.has_size(file):
            digest = file.checksum.begin()
            add_file(digest, self._target.path(file), self.stop, self._count_checked)
            if digest.hexdigest() == file.checksum.digest:
                self._target.keep(file)
                return
            self._count_checked(-file.size)
            self._say(f"{file.name}: the file there has other bytes than the hub's; it is replaced")
        partial = self._target.partial(file)
        partial.parent.mkdir(parents=True, exist_ok=True)
        for _ in range(_MOST_WRONG):
            digest = self._stream(file, partial)
            length = partial.stat().st_size
            if (length, digest.hexdigest()) == (file.size, file.checksum.digest):
                self._target.place(file)
                return
            self._count_received(-length)
            partial.unlink()
            self._say(f"{file.name}: its bytes are wrong by their {file.checksum.algorithm} or number; thrown away")
        raise CheckpointError(
            f"{file.name}: came {_MOST_WRONG} times, each time with another {file.checksum.algorithm} or size than the "
            "hub lists; a proxy or a mirror changes it: set HF_ENDPOINT to another, or try again later"
        )

    def _stream(self, file: HubFile, partial: Path) -> "_Hash":
        """Bring the bytes that the partial file lacks, and return the hash of all. It ends early if too many come."""
        digest, length = file.checksum.begin(), 0
        with suppress(FileNotFoundError):
            if partial.stat().st_size > file.size:
                partial.unlink()
            length = add_file(digest, partial, self.stop, self._count_checked)
        num_failed, farthest = 0, length
        # Not opened to append: should two processes write, they write the same bytes to the same places.
        with open(os.open(partial, os.O_CREAT | os.O_RDWR, 0o666), "r+b") as opened:
            while length < file.size:
                try:
                    with self._hub.bytes_of(self._target.listing, file, length) as (begin, pieces):
                        if begin != length:
                            self._count_received(begin - length)
                            digest, length = file.checksum.begin(), begin
                        # Nothing is cut off: another process may have lost the lock, and have hashed what is there.
                        opened.seek(length)
                        for piece in pieces:
                            opened.write(piece)
                            digest.update(piece)
                            length += len(piece)
                            self._count_received(len(piece))
                            # A server without ranges could send the same part for ever.
                            if length > farthest:
                                farthest, num_failed = length, 0
                                self._patience.last_s = time.monotonic()
                            self._pace.wait(len(piece), self.stop)
                            if self.stop.is_set():
                                raise StoppedError
                            if length > file.size:
                                return digest
                    if length < file.size:
                        raise TryAgainError(f"the connection ended at byte {length:,} of {file.size:,}")
                except TryAgainError as error:
                    opened.flush()
                    self._patience.wait(file.name, error, num_failed)
                    num_failed += 1
            opened.flush()
            # The record that it is verified must not outlive its bytes.
            os.fsync(opened.fileno())
        return digest

    def _count_received(self, num_bytes: int) -> None:
        with self._lock:
            self.received += num_bytes

    def _count_checked(self, num_bytes: int) -> None:
        self._patience.last_s = time.monotonic()
        with self._lock:
            self._checked += num_bytes
