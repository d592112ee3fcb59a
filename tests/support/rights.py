"""The rights of another user than root, for tests of files that can't be read or written."""

import contextlib
import ctypes
import os
from collections.abc import Iterator

_VERSION_3 = 0x20080522
"""Of the kernel's struct for capabilities (capget(2)), which has two halves of 32 bits."""


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Half(ctypes.Structure):
    _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))


@contextlib.contextmanager
def without_rights() -> Iterator[None]:
    """Let the permission bits of files hold for this thread also if it is root's. Programs that it runs have all
    rights again."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, halves = _Header(_VERSION_3, 0), (_Half * 2)()
    _check(libc.capget(ctypes.byref(header), halves))
    before = [half.effective for half in halves]
    try:
        for half in halves:
            half.effective = 0
        _check(libc.capset(ctypes.byref(header), halves))
        yield
    finally:
        for half, effective in zip(halves, before, strict=True):
            half.effective = effective
        _check(libc.capset(ctypes.byref(header), halves))


def _check(failed: int) -> None:
    if failed:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
