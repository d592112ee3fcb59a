"""The places of a download: a plain folder, or the hub's cache, both as huggingface_hub has them; and their lock."""

import json
import os
import secrets
import socket
import threading
import time
from abc import ABC, abstractmethod
from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from hashlib import sha1, sha256
from pathlib import Path
from typing import TypeAlias

from deepseek_triton_build.text import printable_line, safe_name
from deepseek_triton_tools.checkpoints.folder_files import add_file, is_pointer, size_of
from deepseek_triton_tools.checkpoints.hub import HubFile, HubListing
from deepseek_triton_tools.host.processes import start_of
from deepseek_triton_tools.host.whole_file import whole_file
from deepseek_triton_tools.repository.checkpoint_manifest import (
    MANIFEST_NAME,
    CheckpointManifest,
    FileRecord,
    read_manifest,
    write_manifest,
)
from deepseek_triton_tools.repository.hub_cache import hub_cache
from deepseek_triton_tools.tool_errors import CheckpointError

_TOUCH_S = 5.0
_DEAD_AFTER_S = 60.0
_POLL_S = 0.5
_MOST_CHARACTERS = 100


class _Target(ABC):
    """A place for the files of one listing."""

    def __init__(self, listing: HubListing, folder: Path, lock: Path) -> None:
        self.listing = listing
        self.folder = folder
        """The folder that holds the checkpoint in the end."""
        self.lock = lock

    @abstractmethod
    def path(self, file: HubFile) -> Path:
        """Return the place of the file's bytes in the end."""

    @abstractmethod
    def partial(self, file: HubFile) -> Path:
        """Return the place of its bytes while they come."""

    @abstractmethod
    def keep(self, file: HubFile) -> None:
        """Note that the file at its path is verified."""

    def has_size(self, file: HubFile) -> bool:
        """Tell whether a file of the right size is in the place, verified or not."""
        return size_of(self.path(file)) == file.size

    def missing_bytes(self, file: HubFile) -> int:
        """Return the bytes that have to come."""
        return 0 if self.has_size(file) else max(0, file.size - (size_of(self.partial(file)) or 0))

    def place(self, file: HubFile) -> None:
        """Put the verified partial file into its place."""
        path = self.path(file)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Both are on one file system, so that the file appears whole or not at all.
        os.replace(self.partial(file), path)
        self.keep(file)


class FolderTarget(_Target):
    """A plain folder, with the records that `hf download --local-dir` keeps in it, and our manifest."""

    def __init__(self, listing: HubListing, folder: Path) -> None:
        """:raises CheckpointError: when another model is there, or a file."""
        self._records = folder / ".cache" / "huggingface" / "download"
        super().__init__(listing, folder, self._records / "deepseek-triton.lock")
        if folder.exists() and not folder.is_dir():
            raise CheckpointError(f"{folder}: expected a folder or nothing, found a file; choose another --to")
        self._claim = self._records / "deepseek-triton.source"
        self._check_source()

    def claim(self) -> None:
        """Note whose files come.

        :raises CheckpointError: when another model's files are there.
        """
        self._check_source()
        with whole_file(self._claim) as file:
            file.write(self.listing.name.model)

    def _check_source(self) -> None:
        # A manifest that came with the model, as in a Git clone, says what the model was made of.
        published = next((file for file in self.listing.files if file.name == MANIFEST_NAME), None)
        is_published = False
        if published is not None and self.has_size(published):
            digest = published.checksum.begin()
            add_file(digest, self.path(published), threading.Event())
            is_published = digest.hexdigest() == published.etag
        manifest = None if is_published else read_manifest(self.folder)
        model = self._claim.read_text(encoding="utf-8") if self._claim.is_file() else manifest and manifest.source
        if model and model != self.listing.name.model:
            raise CheckpointError(
                f"{self.folder}: expected {self.listing.name.model} or nothing there, found files of "
                f"{safe_name(model)}; choose another --to, or remove this folder"
            )

    def path(self, file: HubFile) -> Path:
        return self.folder / file.name

    def _record(self, file: HubFile) -> Path:
        return self._records / f"{file.name}.metadata"

    def partial(self, file: HubFile) -> Path:
        # The name that huggingface_hub gives it, so that each continues what the other began.
        record = self._record(file)
        digest = urlsafe_b64encode(sha1(record.name.encode(), usedforsecurity=False).digest()).decode()
        return record.with_name(f"{digest}.{file.etag}.incomplete")

    def is_done(self, file: HubFile) -> bool:
        """Tell whether the file is there and was verified."""
        try:
            _, etag, noted_s = self._record(file).read_text(encoding="utf-8").split()
            status = self.path(file).stat()
            # A file that was changed later is compared again. huggingface_hub allows this second too.
            return etag == file.etag and status.st_size == file.size and status.st_mtime - 1 <= float(noted_s)
        except (OSError, ValueError):
            return False

    def keep(self, file: HubFile) -> None:
        record = self._record(file)
        record.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(record) as opened:
            opened.write(f"{self.listing.commit}\n{file.etag}\n{time.time()}\n")

    def finish(self, files: tuple[HubFile, ...]) -> None:
        """Note in the manifest that all files are there."""
        before = read_manifest(self.folder)
        known = dict(before.files) if before and before.revision == self.listing.commit else {}
        # An older manifest may name itself, as one that came with the files would.
        known.pop(MANIFEST_NAME, None)
        for file in files:
            if file.checksum.algorithm == "sha256":
                known[file.name] = FileRecord(file.size, file.etag)
            else:
                known[file.name] = FileRecord(file.size, sha256(self.path(file).read_bytes()).hexdigest())
        manifest = CheckpointManifest(self.listing.name.model, self.listing.commit, known)
        if manifest != before:
            write_manifest(self.folder, manifest)

    def num_pointers(self, files: tuple[HubFile, ...]) -> int:
        """Count the Git LFS pointers in the place of files: it is a clone whose large files were never fetched."""
        return sum(is_pointer(self.path(file)) for file in files)

    def strays(self) -> list[str]:
        """Return the weight files that the model does not have: of another revision, say."""
        known = {file.name for file in self.listing.files}
        return [path.name for path in self.folder.glob("*.safetensors") if path.name not in known]


class CacheTarget(_Target):
    """The hub's cache, where each file is named after its hash. A branch is noted last, so that who finds it finds all
    of its files."""

    def __init__(self, listing: HubListing) -> None:
        cache, _ = hub_cache()
        self._model = cache / f"models--{listing.name.model.replace('/', '--')}"
        super().__init__(listing, self._model / "snapshots" / listing.commit, self._model / "deepseek-triton.lock")

    def path(self, file: HubFile) -> Path:
        return self._model / "blobs" / file.etag

    def partial(self, file: HubFile) -> Path:
        return self._model / "blobs" / f"{file.etag}.incomplete"

    def is_done(self, file: HubFile) -> bool:
        """Tell whether the file is there and was verified."""
        return self.has_size(file) and size_of(self.folder / file.name) == file.size

    def keep(self, file: HubFile) -> None:
        link = self.folder / file.name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(os.path.relpath(self.path(file), link.parent))

    def finish(self, files: tuple[HubFile, ...]) -> None:
        """Note that all files are there."""
        revision = self.listing.name.revision
        ref = self._model / "refs" / revision
        if revision == self.listing.commit or (ref.is_file() and ref.read_text() == self.listing.commit):
            return
        ref.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(ref) as file:
            file.write(self.listing.commit)


DownloadTarget: TypeAlias = FolderTarget | CacheTarget


# --- The lock ---


@dataclass(frozen=True)
class LockHolder:
    host: str
    pid: int
    machine: str
    """One name for each kernel and container, in which `pid` is a process."""
    start: int | None
    """When the process began, which tells it from a later one that got its number."""
    token: str

    def __str__(self) -> str:
        return f"process {self.pid} on {printable_line(self.host)[:_MOST_CHARACTERS]}"


@contextmanager
def download_lock(path: Path, on_wait: Callable[[str], object]) -> Iterator[None]:
    """Hold the lock while the block runs: one download at a time into one place, also for hosts that share it.

    The lock is a file that its holder touches every few seconds. A holder that died is known at once on its own
    machine, and elsewhere when it has not touched the file for a minute, by the clock of who waits. The folder of
    `path` has to be there.

    :param on_wait: called, again and again while others hold it, with who that is.
    :raises OSError: when the file can't be written.
    """
    own = LockHolder(socket.gethostname(), os.getpid(), _machine(), start_of(os.getpid()), secrets.token_hex(8))
    seen: tuple[str, float] | None = None
    since_s = 0.0
    # flock is not used: some network file systems lack it, and others keep it from host to host.
    while not _create(path, json.dumps(asdict(own))):
        try:
            state = _text(path), path.stat().st_mtime
        except FileNotFoundError:
            # It was released between the two looks.
            continue
        if state != seen:
            seen, since_s = state, time.monotonic()
        holder = parsed_holder(state[0])
        has_died = holder is not None and holder.machine == own.machine != "" and start_of(holder.pid) != holder.start
        if has_died or time.monotonic() - since_s > _DEAD_AFTER_S:
            _remove(path, state[0])
            continue
        on_wait(str(holder or "another process"))
        time.sleep(_POLL_S)
    ended = threading.Event()
    toucher = threading.Thread(target=_touch, args=(path, ended), name="lock", daemon=True)
    toucher.start()
    try:
        yield
    finally:
        ended.set()
        toucher.join()
        _remove(path, json.dumps(asdict(own)))


def _create(path: Path, text: str) -> bool:
    try:
        # It fails where the file is there, also from host to host, on NFS from version 3 on.
        file = path.open("x", encoding="utf-8")
    except FileExistsError:
        return False
    try:
        with file:
            file.write(text)
    except OSError:
        # The disk is full; a lock without a holder would be waited for.
        path.unlink(missing_ok=True)
        raise
    return True


def parsed_holder(text: str) -> LockHolder | None:
    """Return the holder; None while it is being written."""
    try:
        return LockHolder(**json.loads(text))
    except (ValueError, TypeError):
        return None


def _remove(path: Path, text: str) -> None:
    """Remove the lock if it still is the one with this text.

    Another may take it over just then. Both download then, the same bytes to the same places, and compare the hashes.
    """
    with suppress(FileNotFoundError):
        if _text(path) == text:
            path.unlink()


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def _touch(path: Path, ended: threading.Event) -> None:
    while not ended.wait(_TOUCH_S):
        # Taken away, or the storage is away: the hashes are compared anyway.
        with suppress(OSError):
            os.utime(path)


def _machine() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
