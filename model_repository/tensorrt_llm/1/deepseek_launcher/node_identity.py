"""Hashes of the files that a node is about to serve, so that nodes can be compared."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from deepseek_launcher.command import option

INDEX = "model.safetensors.index.json"
_WHOLE_FILE_BYTES = 4 << 20
"""Only the size of a larger file is hashed, such as weights that lie in the repository."""
_MODEL = re.compile(r"""^model:\s*(?:"([^"]+)"|'([^']+)'|([^\s#]+))""", re.MULTILINE)


def served_repository(command: Sequence[str]) -> Path | None:
    """Return the model repository that `command` gives to tritonserver."""
    folder = option(command, "--model-repository") or option(command, "--model-store")
    return Path(folder) if folder else None


def repository_hash(repository: Path) -> str:
    """Return a hash over the names and contents of the models' files, 16 hex digits.

    Files beside the models are left out: a log that grows there would give each rank another hash.

    :raises OSError: when a file can't be read.
    """
    digest = hashlib.sha256()
    for path in sorted(_files(repository)):
        digest.update(os.fsencode(path.relative_to(repository)) + f"\0{path.stat().st_size}\0".encode())
        if path.stat().st_size <= _WHOLE_FILE_BYTES:
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def checkpoint_hash(repository: Path) -> str | None:
    """Return a hash over the indexes of the checkpoints that the model.yaml files name; None without an index.

    :raises OSError: when a file can't be read.
    """
    digest = hashlib.sha256()
    found = False
    for path in sorted(repository.glob("*/*/model.yaml")):
        match = _MODEL.search(path.read_text(encoding="utf-8", errors="replace"))
        index = (path.parent / next(filter(None, match.groups())) / INDEX) if match else None
        if index is not None and index.is_file():
            digest.update(index.read_bytes())
            found = True
    return digest.hexdigest()[:16] if found else None


def _files(repository: Path) -> Iterator[Path]:
    for configuration in repository.glob("*/config.pbtxt"):
        for path in configuration.parent.rglob("*"):
            inside = path.relative_to(repository).parts
            if path.is_file() and not any(part == "__pycache__" or part.startswith(".") for part in inside):
                yield path
