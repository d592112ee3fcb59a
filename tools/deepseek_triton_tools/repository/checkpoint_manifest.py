"""The manifest of a checkpoint's folder: what it is, and the size and SHA-256 of each file, to verify it offline."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deepseek_triton_build.check import is_inside, read_bytes
from deepseek_triton_build.text import short_repr
from deepseek_triton_tools.host.whole_file import whole_file
from deepseek_triton_tools.tool_errors import CheckpointError

MANIFEST_NAME = "checkpoint.sha256.json"
SUMS_FILE = re.compile(r"sha256sums?(\.txt)?|.+\.sha256", re.IGNORECASE)
"""Names of the files that sha256sum writes."""
SCHEMA = "deepseek-triton/checkpoint-manifest/1"
_MOST_BYTES = 64 * 2**20
_SHA256 = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class FileRecord:
    size: int
    """Bytes."""
    sha256: str
    """64 hexadecimal digits in lower case."""


@dataclass(frozen=True)
class CheckpointManifest:
    source: str
    """The place that the files came from, or what they were made of: "deepseek-ai/DeepSeek-R1"."""
    revision: str
    """The commit on the hub; empty where the files are not from the hub."""
    files: Mapping[str, FileRecord]
    """Path in the folder, with slashes -> what the file should be."""


def write_manifest(folder: Path, manifest: CheckpointManifest) -> None:
    """Write it in the place of the one that was there.

    :raises ToolError: when it can't be written.
    """
    document = {
        "schema": SCHEMA,
        "source": manifest.source,
        "revision": manifest.revision,
        "files": {name: asdict(record) for name, record in sorted(manifest.files.items())},
    }
    with whole_file(folder / MANIFEST_NAME) as file:
        json.dump(document, file, indent=1)
        file.write("\n")


def record_of(path: Path) -> FileRecord:
    """Return the record of a small file, which is read at once."""
    content = path.read_bytes()
    return FileRecord(len(content), hashlib.sha256(content).hexdigest())


def source_of(folder: Path) -> str:
    """Return where a checkpoint came from by its manifest, or else its folder's name.

    :raises CheckpointError: when the manifest can't be read.
    """
    manifest = read_manifest(folder)
    return manifest.source if manifest else folder.absolute().name


def read_manifest(folder: Path) -> CheckpointManifest | None:
    """Return the folder's manifest, or None where it has none.

    :raises CheckpointError: when it can't be read, or is not what `write_manifest` writes.
    """
    path = folder / MANIFEST_NAME
    try:
        content = read_bytes(path, _MOST_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CheckpointError(f"{path}: can't be read: {error.strerror}") from error
    try:
        return _parsed(json.loads(content or b""))
    except (ValueError, RecursionError) as error:
        # Deeply nested JSON.
        raise CheckpointError(
            f"{path}: expected a manifest ({SCHEMA}): {error}; remove it, and download again"
        ) from error


def _parsed(document: Any) -> CheckpointManifest:
    """:raises ValueError: saying what is wrong."""
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        schema = document.get("schema") if isinstance(document, dict) else document
        raise ValueError(f"found {short_repr(schema)}")
    source, revision, files = (document.get(key) for key in ("source", "revision", "files"))
    if not isinstance(source, str) or not isinstance(revision, str) or not isinstance(files, dict):
        raise ValueError("source and revision have to be text, and files an object")
    return CheckpointManifest(source, revision, {name: _record(name, entry) for name, entry in files.items()})


def _record(name: str, entry: Any) -> FileRecord:
    size, sha256 = (entry.get("size"), entry.get("sha256")) if isinstance(entry, dict) else (None, None)
    if type(size) is not int or size < 0 or not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
        raise ValueError(f"the entry of {short_repr(name)} has no size or no sha256")
    if not is_inside(name):
        raise ValueError(f"{short_repr(name)} is no name in this folder")
    return FileRecord(size, sha256)
