"""Open the files of a folder that others wrote. Only regular files are opened: reading a pipe may never end."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


class NotAFileError(OSError):
    """The path exists, but is a folder, a pipe, a device or a socket."""


def open_file(path: Path) -> BinaryIO:
    """Open `path` for reading.

    :raises NotAFileError: when it is no regular file.
    :raises OSError: when it can't be read.
    :raises ValueError: for a path that no file can have.
    """
    _require_file(os.stat(path))  # checked before opening, because opening a device may already have an effect
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    opened = os.fdopen(descriptor, "rb")
    try:
        _require_file(os.fstat(descriptor))
    except NotAFileError:
        opened.close()
        raise
    return opened


def read_bytes(path: Path, most: int) -> bytes | None:
    """Return the content of `path`; None when it has more than `most` bytes.

    :raises OSError, ValueError: as open_file raises them.
    """
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(size + 1) if size <= most else b""  # the file may be growing, so the read is limited
    return content if size <= most else None


def is_inside(name: str) -> bool:
    """Tell whether the relative path `name`, which a file gives, stays inside its folder, and can be a path at all."""
    return "\0" not in name and all(part not in ("", "..") for part in name.split("/"))


def _require_file(status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise NotAFileError(errno.EINVAL, "not a regular file")
