"""Opening what a stranger's folder holds: regular files only, for a pipe or a device is waited for without end."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


class NotAFileError(OSError):
    """It is there, and is a folder, a pipe, a device or a socket."""


def open_file(path: Path) -> BinaryIO:
    """`path` for reading.

    :raises NotAFileError: when it is no regular file.
    :raises OSError: when it can't be read.
    :raises ValueError: for a path that no file can have.
    """
    _require_file(os.stat(path))  # before it is opened: to open a device may do something
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    opened = os.fdopen(descriptor, "rb")
    try:
        _require_file(os.fstat(descriptor))
    except NotAFileError:
        opened.close()
        raise
    return opened


def read_bytes(path: Path, most: int) -> bytes | None:
    """The content of `path`; None when it has more than `most` bytes.

    :raises OSError, ValueError: as open_file.
    """
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(size + 1) if size <= most else b""  # and no more: it may be growing
    return content if size <= most else None


def is_inside(name: str) -> bool:
    """`name`, which a file gives, stays in the folder that it counts from."""
    return all(part not in ("", "..") for part in name.split("/"))


def _require_file(status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise NotAFileError(errno.EINVAL, "not a regular file")
