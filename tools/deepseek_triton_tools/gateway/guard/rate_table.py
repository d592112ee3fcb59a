"""The use of each key in the last minute, in a file that all processes of a gateway map into their memory.

A budget is a bucket that holds what a minute allows and is refilled steadily. Its whole state is the time at which it
will be full again. So a row whose times have passed says nothing, and another key may have it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_NUM_ROWS = 16_384
"""How many keys can be used within the same minute or two. 512 KiB."""
_ROW = struct.Struct("=16sdd")
"""The beginning of the key's digest; when the budgets of requests and of tokens will be full, in seconds of
time.monotonic(), which is the same in all processes."""
_NUM_PROBED = 16
"""How many rows a key may be in."""
_MINUTE_S = 60.0
_ROUNDING_S = 1e-6
"""Sums of floating-point seconds may miss by this much."""


@dataclass(frozen=True, slots=True)
class RateBudget:
    """One budget after a charge, in its own unit: requests or tokens."""

    limit: int
    remaining: int
    """0 also where more was used than there was."""
    full_in_s: float
    missing_for_s: float
    """How long until the refused charge would fit; 0 where it was made."""


class RateTable:
    """The budgets of all keys. Charges take the file's lock for microseconds; it ends with the process that has it."""

    def __init__(self, path: Path | None) -> None:
        """Open the table at `path`, and make it where there is none; None for a table of this process only."""
        if path is None:
            self._file = os.memfd_create("rate_table")
        else:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._file, _NUM_ROWS * _ROW.size)
        self._rows = mmap.mmap(self._file, _NUM_ROWS * _ROW.size)
        self._known: dict[bytes, int] = {}

    def close(self) -> None:
        self._rows.close()
        os.close(self._file)

    def charge(
        self, digest: bytes, limits: tuple[int | None, int | None], amounts: tuple[int, int], *, force: bool = False
    ) -> list[RateBudget | None]:
        """Take `amounts` of requests and tokens from the budgets that have a limit: all of them, or none where one
        lacks it. An amount above the limit needs a full budget.

        force: take them even so, which may leave a debt; a negative amount gives back.
        """
        with self._locked():
            now = time.monotonic()
            offset = self._row(digest, now)
            key, *times = _ROW.unpack_from(self._rows, offset)
            full_at = [max(now, at) for at in times] if key == digest[:16] else [now, now]
            missing_s = [
                0.0 if limit is None or force else at + _MINUTE_S * min(amount / limit, 1) - now - _MINUTE_S
                for at, limit, amount in zip(full_at, limits, amounts, strict=True)
            ]
            refused = max(missing_s) > _ROUNDING_S
            if not refused:
                full_at = [
                    at if limit is None else at + _MINUTE_S * amount / limit
                    for at, limit, amount in zip(full_at, limits, amounts, strict=True)
                ]
                _ROW.pack_into(self._rows, offset, digest[:16], *full_at)
        return [
            None if limit is None else _budget(limit, max(0.0, at - now), missing)
            for limit, at, missing in zip(limits, full_at, missing_s, strict=True)
        ]

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def _row(self, digest: bytes, now: float) -> int:
        """The offset of the key's row, or of one that it may have."""
        known = self._known.get(digest)
        if known is not None and self._rows[known : known + 16] == digest[:16]:
            return known
        first = int.from_bytes(digest[16:20], "big")
        offsets = [(first + step) % _NUM_ROWS * _ROW.size for step in range(_NUM_PROBED)]
        mine = next((offset for offset in offsets if self._rows[offset : offset + 16] == digest[:16]), None)
        if mine is None:
            # The row that is full soonest. With fewer keys than rows it is full already.
            mine = min(offsets, key=lambda offset: max(_ROW.unpack_from(self._rows, offset)[1:]))
        self._known[digest] = mine
        return mine


def _budget(limit: int, full_in_s: float, missing_s: float) -> RateBudget:
    remaining = limit * (1 - full_in_s / _MINUTE_S)
    return RateBudget(limit, max(0, int(remaining + 1e-6)), full_in_s, missing_s if missing_s > _ROUNDING_S else 0.0)
