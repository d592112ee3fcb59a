"""The places of a download: a plain folder, or the hub's cache, both as huggingface_hub lays them out."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from base64 import urlsafe_b64encode
from contextlib import suppress
from hashlib import sha1, sha256
from pathlib import Path
from threading import Event

from deepseek_triton_build.text import safe_name
from deepseek_triton_tools.checkpoints.folder_files import add_file, is_pointer, size_of
from deepseek_triton_tools.checkpoints.hub import HubFile, HubListing
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


class DownloadTarget(ABC):
    """A place for the files of one listing."""

    def __init__(self, listing: HubListing, folder: Path) -> None:
        self.listing = listing
        self.folder = folder
        """The folder that holds the checkpoint in the end."""

    @property
    @abstractmethod
    def lock(self) -> Path: ...

    @abstractmethod
    def claim(self) -> None:
        """Note whose files come.

        :raises CheckpointError: when another model's files are there.
        """

    @abstractmethod
    def path(self, file: HubFile) -> Path:
        """Return the place of the file's bytes in the end."""

    @abstractmethod
    def partial(self, file: HubFile) -> Path:
        """Return the place of its bytes while they come."""

    @abstractmethod
    def is_done(self, file: HubFile) -> bool:
        """Tell whether the file is there and was verified."""

    @abstractmethod
    def keep(self, file: HubFile) -> None:
        """Note that the file at its path is verified."""

    @abstractmethod
    def finish(self, files: tuple[HubFile, ...]) -> None:
        """Note that all files are there."""

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


class FolderTarget(DownloadTarget):
    """A plain folder, with the records that `hf download --local-dir` keeps in it, and our manifest."""

    def __init__(self, listing: HubListing, folder: Path) -> None:
        """:raises CheckpointError: when another model is there, or a file."""
        super().__init__(listing, folder)
        self._records = folder / ".cache" / "huggingface" / "download"
        if folder.exists() and not folder.is_dir():
            raise CheckpointError(f"{folder}: expected a folder or nothing, found a file; choose another --to")
        self._claim = self._records / "deepseek-triton.source"
        self._check_source()

    @property
    def lock(self) -> Path:
        return self._records / "deepseek-triton.lock"

    def claim(self) -> None:
        self._check_source()
        with whole_file(self._claim) as file:
            file.write(self.listing.name.model)

    def _check_source(self) -> None:
        manifest = None if self._has_published_manifest() else read_manifest(self.folder)
        model = self._claim.read_text(encoding="utf-8") if self._claim.is_file() else manifest and manifest.source
        if model and model != self.listing.name.model:
            raise CheckpointError(
                f"{self.folder}: expected {self.listing.name.model} or nothing there, found files of "
                f"{safe_name(model)}; choose another --to, or remove this folder"
            )

    def _has_published_manifest(self) -> bool:
        """Tell whether the manifest came with the model, as in a Git clone: it says what the model was made of."""
        published = next((file for file in self.listing.files if file.name == MANIFEST_NAME), None)
        if published is None or not self.has_size(published):
            return False
        digest = published.checksum.begin()
        add_file(digest, self.path(published), Event())
        return digest.hexdigest() == published.checksum.digest

    def path(self, file: HubFile) -> Path:
        return self.folder / file.name

    def partial(self, file: HubFile) -> Path:
        # The name that huggingface_hub gives it, so that each continues what the other began.
        record = self._record(file)
        digest = urlsafe_b64encode(sha1(record.name.encode(), usedforsecurity=False).digest()).decode()
        return record.with_name(f"{digest}.{file.etag}.incomplete")

    def is_done(self, file: HubFile) -> bool:
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
        before = read_manifest(self.folder)
        known = dict(before.files) if before and before.revision == self.listing.commit else {}
        # An older manifest may name itself, as one that came with the files would.
        known.pop(MANIFEST_NAME, None)
        new = {file.name: FileRecord(file.size, self._sha256(file)) for file in files}
        manifest = CheckpointManifest(self.listing.name.model, self.listing.commit, {**known, **new})
        if manifest != before:
            write_manifest(self.folder, manifest)

    def num_pointers(self, files: tuple[HubFile, ...]) -> int:
        """Count the Git LFS pointers in the place of files: it is a clone whose large files were never fetched."""
        return sum(is_pointer(self.path(file)) for file in files)

    def strays(self) -> list[str]:
        """Return the weight files that the model does not have: of another revision, say."""
        known = {file.name for file in self.listing.files}
        return [path.name for path in self.folder.glob("*.safetensors") if path.name not in known]

    def _record(self, file: HubFile) -> Path:
        return self._records / f"{file.name}.metadata"

    def _sha256(self, file: HubFile) -> str:
        if file.checksum.algorithm == "sha256":
            return file.etag
        digest = sha256()
        add_file(digest, self.path(file), Event())
        return digest.hexdigest()


class CacheTarget(DownloadTarget):
    """The hub's cache, where each file is named after its hash. A branch is noted last, so that who finds it finds all
    of its files."""

    def __init__(self, listing: HubListing) -> None:
        cache, _ = hub_cache()
        self._model = cache / f"models--{listing.name.model.replace('/', '--')}"
        super().__init__(listing, self._model / "snapshots" / listing.commit)

    @property
    def lock(self) -> Path:
        return self._model / "deepseek-triton.lock"

    def claim(self) -> None:
        # Each model has a folder of its own.
        pass

    def path(self, file: HubFile) -> Path:
        return self._model / "blobs" / file.etag

    def partial(self, file: HubFile) -> Path:
        return self._model / "blobs" / f"{file.etag}.incomplete"

    def is_done(self, file: HubFile) -> bool:
        return self.has_size(file) and size_of(self.folder / file.name) == file.size

    def keep(self, file: HubFile) -> None:
        link = self.folder / file.name
        link.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            link.unlink()
        link.symlink_to(os.path.relpath(self.path(file), link.parent))

    def finish(self, files: tuple[HubFile, ...]) -> None:
        revision = self.listing.name.revision
        ref = self._model / "refs" / revision
        if revision == self.listing.commit or (ref.is_file() and ref.read_text() == self.listing.commit):
            return
        ref.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(ref) as file:
            file.write(self.listing.commit)


def make_target(listing: HubListing, folder: Path | None) -> DownloadTarget:
    """Return the plain folder, or without one the hub's cache.

    :raises CheckpointError: when the folder holds something else.
    """
    return CacheTarget(listing) if folder is None else FolderTarget(listing, folder)
