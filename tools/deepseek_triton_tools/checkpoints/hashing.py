"""Hashing whole files, with progress and a way to stop."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hashlib import _Hash

_PIECE = 4 * 2**20


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
