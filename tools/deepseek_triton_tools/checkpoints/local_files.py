"""Files on this machine: their sizes and hashes, and whether they are the pointers of Git LFS."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hashlib import _Hash

_PIECE = 4 * 2**20
_LFS = b"version https://git-lfs"


class StoppedError(Exception):
    """The work was told to stop."""


def add_file(
    digest: _Hash, path: Path, stop: threading.Event, on_bytes: Callable[[int], object] = lambda _: None
) -> int:
    """Hash the file's content and return its length in bytes.

    :param on_bytes: called with the length of each piece.
    :raises StoppedError: when `stop` was set.
    :raises OSError: when the file can't be read.
    """
    buffer = bytearray(_PIECE)
    view = memoryview(buffer)
    total = 0
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            if stop.is_set():
                raise StoppedError
            digest.update(view[:count])
            total += count
            on_bytes(count)
    return total


def is_pointer(path: Path) -> bool:
    """Tell whether the file is what Git LFS leaves in the place of a large file that was not fetched."""
    try:
        with path.open("rb") as file:
            return file.read(len(_LFS)) == _LFS
    except OSError:
        return False


def size_of(path: Path) -> int | None:
    """Return the file's bytes; None where there is none."""
    try:
        return path.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return None
