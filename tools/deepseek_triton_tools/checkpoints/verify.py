"""Verify a checkpoint's files offline, by the sizes and hashes that its download or its maker left, and its headers."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from deepseek_triton_build.check import Header, HeaderError, instead_of_checkpoint, is_inside, read_header
from deepseek_triton_build.text import first_names, safe_name
from deepseek_triton_tools.checkpoints.folder_files import UNFINISHED, add_file, is_pointer, is_unfinished, size_of
from deepseek_triton_tools.host.units import sized
from deepseek_triton_tools.repository.checkpoint_files import CheckpointFiles, WeightFile, find_damage
from deepseek_triton_tools.repository.checkpoint_manifest import MANIFEST_NAME, read_manifest
from deepseek_triton_tools.tool_errors import CheckpointError
from deepseek_triton_tools.warming.checksums import Checksum, expected_checksums

SCHEMA = "deepseek-triton/checkpoint-verify/1"
_TICK_S = 0.1
_AGAIN = "download it again"


@dataclass(frozen=True)
class Damage:
    """One file, or the folder, that is not what it should be."""

    file: str
    """Path in the folder."""
    problem: str
    fix: str = _AGAIN
    tensors: tuple[str, ...] = ()
    """The tensors that are cut, or that may be damaged, where the file's header can be read."""

    def __str__(self) -> str:
        held = f"; {len(self.tensors)} tensors: {first_names(self.tensors)}" if self.tensors else ""
        return f"{safe_name(self.file)}: {self.problem}{held}; {self.fix}"


@dataclass(frozen=True, kw_only=True)
class VerifyReport:
    folder: Path
    compared_with: str
    """The place of the hashes, for people; empty where only the headers and the index could be looked at."""
    source: str
    """The model on the hub, or what the files were made of; empty where the folder doesn't say."""
    revision: str
    num_files: int
    """Files that were compared; without hashes, the weight files."""
    num_bytes: int
    damages: tuple[Damage, ...]
    unverified: tuple[str, ...]
    """Weight files without a hash."""

    def summary(self) -> str:
        """Say it in one line."""
        files = f"{self.num_files} files, {sized(self.num_bytes)}"
        of = f" of {safe_name(self.source)}" if self.source else ""
        ending = f"{len(self.damages)} damaged" if self.damages else "nothing is damaged"
        if not self.compared_with:
            return (
                f"{self.folder}: there are no hashes: only the index and the headers of {files} were looked at; "
                f"{ending}"
            )
        rest = f"; {len(self.unverified)} weight files have no hash there" if self.unverified else ""
        return f"{self.folder}: {files}{of}, compared with {self.compared_with}{rest}; {ending}"


def verify(folder: Path, *, jobs: int, observe: Callable[[int, int], object]) -> VerifyReport:
    """Compare all files, several at once.

    :param observe: called in this thread, about ten times a second and at the end, with the bytes that were read, and
        those of all files.
    :raises CheckpointError: when there is no such folder, it holds no weights, or its manifest can't be read.
    """
    if is_unfinished(folder):
        raise CheckpointError(f"{folder}: {UNFINISHED}")
    manifest = read_manifest(folder)
    if manifest is None and (found := instead_of_checkpoint(folder)):
        raise CheckpointError(f"{folder}: expected a checkpoint's folder, found {found}; correct the path")
    weights = _files(folder, ".safetensors")
    source, revision, compared_with = "", "", ""
    expected: dict[str, tuple[Checksum, int | None]] = {}
    if manifest:
        source, revision, compared_with = manifest.source, manifest.revision, MANIFEST_NAME
        for name, record in manifest.files.items():
            expected[name] = (Checksum("sha256", record.sha256, MANIFEST_NAME), record.size)
    else:
        sums_files = set()
        for path, checksum in expected_checksums(_checkpoint(folder, _files(folder))).items():
            sums_file, _, line = checksum.source.rpartition(":")
            # A hash of the hub's download has no line. `sha256sum * > checksums.sha256` lists its own output, as it
            # was before its end.
            if line.isdecimal() and sums_file == str(path):
                continue
            sums_files.update([os.path.basename(sums_file)] if line.isdecimal() else [])
            expected[path.relative_to(folder).as_posix()] = (checksum, None)
        if expected:
            compared_with = first_names(sums_files) or "the hashes of its download"
    damages = _compare(folder, expected, jobs, observe)
    # A manifest of other files only, in a folder without weights, is one of `checkpoint download --include`.
    if not manifest or weights or any(name.endswith(".safetensors") for name in manifest.files):
        known = {damage.file for damage in damages}
        for finding in find_damage(_checkpoint(folder, weights)):
            name = os.path.relpath(finding.file, folder)
            if finding.severity == "error" and name not in known:
                header = _header(folder / name)
                cut = header.tensors_beyond(header.found) if header else ()
                damages.append(Damage(name, finding.message, finding.fix, tuple(cut)))
    weight_names = [file.path.relative_to(folder).as_posix() for file in weights]
    compared = expected.keys() or weight_names
    return VerifyReport(
        folder=folder,
        compared_with=compared_with,
        source=source,
        revision=revision,
        num_files=len(compared),
        num_bytes=sum(size_of(folder / name) or 0 for name in compared),
        damages=tuple(sorted(damages, key=lambda damage: damage.file)),
        unverified=tuple(name for name in weight_names if name not in expected),
    )


def _compare(
    folder: Path, expected: dict[str, tuple[Checksum, int | None]], jobs: int, observe: Callable[[int, int], object]
) -> list[Damage]:
    """Compare the files with their hash, and their size where that is known."""
    stop = threading.Event()
    lock = threading.Lock()
    total, done = sum(size_of(folder / name) or 0 for name in expected), 0

    def count(num_bytes: int) -> None:
        nonlocal done
        with lock:
            done += num_bytes

    with ThreadPoolExecutor(jobs, "verify") as threads:
        futures = [
            threads.submit(_damage_of, folder, name, checksum, size, stop, count)
            for name, (checksum, size) in sorted(expected.items())
            # A file of checksums may list others, which are not the checkpoint's.
            if is_inside(name)
        ]
        try:
            while wait(futures, _TICK_S).not_done:
                observe(done, total)
        except BaseException:
            stop.set()
            threads.shutdown(wait=False, cancel_futures=True)
            raise
    observe(done, total)
    return [damage for future in futures if (damage := future.result())]


def _damage_of(
    folder: Path,
    name: str,
    checksum: Checksum,
    expected_size: int | None,
    stop: threading.Event,
    count: Callable[[int], object],
) -> Damage | None:
    path = folder / name
    try:
        if (size := size_of(path)) is None:
            return Damage(name, "it is missing")
        digest = checksum.begin()
        has_size = expected_size in (None, size)
        if has_size:
            add_file(digest, path, stop, count)
    except OSError as error:
        return Damage(name, f"can't be read: {error.strerror}", f"make it readable, or {_AGAIN}")
    if has_size and digest.hexdigest() == checksum.digest:
        return None
    if is_pointer(path):
        size_text = "" if expected_size is None else f" of {expected_size:,} bytes"
        problem = f"it is a Git LFS pointer, not the file{size_text}"
        return Damage(name, problem, "download it, which replaces the pointer")
    header = _header(path)
    if header and header.found < header.length:
        problem = f"truncated: it ends at byte {header.found:,}, expected {header.length:,}"
        return Damage(name, problem, tensors=tuple(header.tensors_beyond(header.found)))
    if not has_size:
        return Damage(name, f"expected {expected_size:,} bytes, found {size:,}")
    # A hash of the whole file can't say which of its tensors is damaged.
    problem = f"its {checksum.algorithm} is {digest.hexdigest()}, expected {checksum.digest}"
    return Damage(name, problem, tensors=tuple(header.tensors) if header else ())


def _checkpoint(folder: Path, files: tuple[WeightFile, ...]) -> CheckpointFiles:
    return CheckpointFiles(source=str(folder), folder=folder, found_by="a folder", files=files)


def _files(folder: Path, ending: str = "") -> tuple[WeightFile, ...]:
    """Return the regular files in the folder and below, those of hidden folders apart."""
    files = []
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        paths = (Path(parent, name) for name in sorted(names) if name.endswith(ending))
        files += [WeightFile(path=path, size=path.stat().st_size) for path in paths if path.is_file()]
    return tuple(files)


def _header(path: Path) -> Header | None:
    if path.suffix != ".safetensors":
        return None
    try:
        with path.open("rb") as file:
            return read_header(file)
    except (OSError, HeaderError):
        return None
