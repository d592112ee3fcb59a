"""The checksums that the files of a checkpoint should have, where the checkpoint has them.

    blobs/HASH                                  a file in a Hugging Face cache is named after its hash
    .cache/huggingface/download/FILE.metadata   its second line, in a folder that `hf download` wrote into
    checkpoint.sha256.json                      our manifest: `checkpoint download` and `checkpoint quantize` write it
    SHA256SUMS, sha256sum.txt, *.sha256         what sha256sum writes, with and without --tag

A hash of the hub has 64 digits (the SHA-256 of a file that is stored apart from Git) or 40 (Git's SHA-1 of a blob).
"""

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from deepseek_triton_build.check import is_inside, read_bytes
from deepseek_triton_tools.repository.checkpoint_files import CheckpointFiles, WeightFile, list_folder
from deepseek_triton_tools.repository.checkpoint_manifest import MANIFEST_NAME, SUMS_FILE, read_manifest
from deepseek_triton_tools.tool_errors import CheckpointError

if TYPE_CHECKING:
    from hashlib import _Hash

_LINE = re.compile(r"(?P<escaped>\\?)(?P<digest>[0-9a-fA-F]{64})(?: [ *](?P<name>.+))?")
_TAGGED_LINE = re.compile(r"(?P<escaped>\\?)SHA256 \((?P<name>.+)\) ?= (?P<digest>[0-9a-fA-F]{64})")
_ESCAPES = {r"\\": "\\", r"\n": "\n", r"\r": "\r"}
# The most bytes that a file of checksums may have: the checksums of 163 files take 16 KB.
_MOST_BYTES = 2**20


@dataclass(frozen=True)
class Checksum:
    algorithm: str
    """hashlib's name of the algorithm."""
    digest: str
    """Hexadecimal digits in lower case."""
    source: str
    """The place where the digest was found, for people."""
    prefix: bytes = b""
    """Bytes that are hashed before the file's content."""

    def begin(self) -> "_Hash":
        """A new hash, to be updated with the file's content."""
        return hashlib.new(self.algorithm, self.prefix, usedforsecurity=False)


def expected_checksums(checkpoint: CheckpointFiles) -> Mapping[Path, Checksum]:
    """WeightFile.path -> checksum, for the files of the checkpoint that have one, and the listed ones that are missing.

    :raises CheckpointError: when a file of checksums can't be read, or two of them disagree.
    """
    checksums: dict[Path, Checksum] = {}
    conflicts = []
    folder = checkpoint.folder
    sums_files = [folder / name for name in list_folder(folder) if SUMS_FILE.fullmatch(name)]
    listed = [each for sums_file in sums_files for each in _checksums_in(sums_file)]
    if (manifest := read_manifest(folder)) is not None:
        source = str(folder / MANIFEST_NAME)
        records = manifest.files.items()
        listed += [(folder / name, Checksum("sha256", record.sha256, source)) for name, record in records]
    for path, checksum in listed:
        # A list may be of more folders than were copied; their files are not the checkpoint's.
        is_ours = is_inside(os.path.relpath(path, folder)) and os.path.isdir(path.parent)
        if is_ours and not os.path.lexists(path):
            checksums[path] = checksum
    for file in checkpoint.files:
        of_file = [checksum for path, checksum in listed if path == file.path]
        for checksum in [*_hub_checksums(file), *of_file]:
            first = checksums.setdefault(file.path, checksum)
            if first.algorithm == checksum.algorithm and first.digest != checksum.digest:
                conflicts.append(
                    f"{file.path}: its {checksum.algorithm} is {first.digest} by {first.source}, and {checksum.digest} "
                    f"by {checksum.source}"
                )
    if conflicts:
        raise CheckpointError(f"{'; '.join(conflicts)}; remove the file of checksums that is not of this checkpoint")
    return checksums


def _hub_checksums(file: WeightFile) -> Iterator[Checksum]:
    """The checksums that a download from the Hugging Face hub leaves."""
    blob = file.path.resolve()
    digests = {"its name in the Hugging Face cache": blob.name} if blob.parent.name == "blobs" else {}
    metadata = file.path.parent / ".cache" / "huggingface" / "download" / f"{file.path.name}.metadata"
    if os.path.exists(metadata):
        digests |= {str(metadata): line.strip() for line in _lines(metadata)[1:2]}
    for source, digest in digests.items():
        if re.fullmatch("[0-9a-f]{64}", digest):
            yield Checksum("sha256", digest, source)
        elif re.fullmatch("[0-9a-f]{40}", digest):
            yield Checksum("sha1", digest, source, b"blob %d\0" % file.size)


def _checksums_in(path: Path) -> Iterator[tuple[Path, Checksum]]:
    """(file, checksum) of each line in a file of checksums."""
    num_found = 0
    for number, line in enumerate(_lines(path), 1):
        if (match := _LINE.fullmatch(line) or _TAGGED_LINE.fullmatch(line)) is None:
            continue
        # A line without a name, in X.sha256, is about the file X.
        name = match["name"] or (path.stem if path.suffix.lower() == ".sha256" else "")
        if match["escaped"]:
            name = re.sub(r"\\[\\nr]", lambda escape: _ESCAPES[escape[0]], name)
        if name:
            num_found += 1
            yield path.parent / name, Checksum("sha256", match["digest"].lower(), f"{path}:{number}")
    if not num_found:  # other lines are comments, or a signature
        raise CheckpointError(
            f"{path}: expected lines as sha256sum writes them (64 digits, two spaces, a file's name), found none; "
            "correct it, or move it out of the folder"
        )


def _lines(path: Path) -> list[str]:
    try:
        content = read_bytes(path, _MOST_BYTES)
    except OSError as error:
        raise CheckpointError(
            f"{path}: can't be read: {error.strerror}; allow this user to read it, or move it out of the folder"
        ) from error
    if content is None:
        raise CheckpointError(
            f"{path}: expected checksums, found more than {_MOST_BYTES:,} bytes; move it out of the folder"
        )
    lines = content.decode("utf-8", "surrogateescape").split("\n")
    return [line.removesuffix("\r") for line in lines]
