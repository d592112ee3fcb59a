"""One file from the hub: continued where it ended, at a limited rate, tried again with waits, and compared."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from deepseek_triton_tools.checkpoints.download_target import DownloadTarget
from deepseek_triton_tools.checkpoints.folder_files import StoppedError, add_file
from deepseek_triton_tools.checkpoints.hub import Hub, HubFile, TryAgainError
from deepseek_triton_tools.host.units import about
from deepseek_triton_tools.tool_errors import CheckpointError

if TYPE_CHECKING:
    from hashlib import _Hash

_T = TypeVar("_T")

_LONGEST_WAIT_S = 60.0
_MOST_WRONG = 3
"""Times that a file is downloaded before its bytes are said to be wrong."""


class GaveUpError(CheckpointError):
    """Nothing has come for too long."""


class RateLimit:
    """Bytes a second, of all threads together."""

    def __init__(self, rate: float | None, stop: threading.Event) -> None:
        self._rate, self._stop = rate, stop
        self._lock = threading.Lock()
        self._free_s = 0.0
        """The time at which the bytes taken so far are paid for."""

    def take(self, num_bytes: int) -> None:
        """Wait until so many bytes more keep to the limit."""
        if self._rate is None:
            return
        with self._lock:
            self._free_s = max(self._free_s, time.monotonic()) + num_bytes / self._rate
            wait_s = self._free_s - time.monotonic()
        self._stop.wait(max(0.0, wait_s))


class Patience:
    """Waits between tries, until no byte of any file has come for `give_up_s` seconds."""

    def __init__(
        self, give_up_s: float, first_wait_s: float, stop: threading.Event, say: Callable[[str], object]
    ) -> None:
        self._give_up_s, self._first_wait_s, self._stop, self._say = give_up_s, first_wait_s, stop, say
        self._last_s = time.monotonic()

    def received(self) -> None:
        self._last_s = time.monotonic()

    def until_it_answers(self, what: str, ask: Callable[[], _T]) -> _T:
        """Ask again and again, and return the answer.

        :raises GaveUpError: when there was none for too long.
        """
        num_failed = 0
        while True:
            try:
                return ask()
            except TryAgainError as error:
                self.wait(what, error, num_failed)
                num_failed += 1

    def wait(self, what: str, error: TryAgainError, num_failed: int) -> None:
        """Wait before the next try, as long as the hub asks for, else longer each time.

        :raises GaveUpError: when the next try would come too late.
        :raises StoppedError: when the work was told to stop.
        """
        own_s = min(self._first_wait_s * 2 ** min(num_failed, 10), _LONGEST_WAIT_S)
        left_s = self._last_s + self._give_up_s - time.monotonic()
        wait_s = min(own_s, left_s) if error.wait_s is None else error.wait_s
        if left_s <= 0 or wait_s > left_s:
            asks = "" if error.wait_s is None else f", and asks to wait {about(error.wait_s)}"
            raise GaveUpError(
                f"{what}: {error}{asks}; nothing came for {about(self._give_up_s - max(0.0, left_s))}, given up; start "
                "it again later, which continues, or raise --give-up"
            )
        self._say(f"{what}: {error}; next try in {about(wait_s)}")
        if self._stop.wait(wait_s):
            raise StoppedError


class FileTransfer:
    """Brings files of a target, each in the thread that calls."""

    def __init__(
        self,
        hub: Hub,
        target: DownloadTarget,
        *,
        rate_limit: RateLimit,
        patience: Patience,
        stop: threading.Event,
        say: Callable[[str], object],
    ) -> None:
        self._hub, self._target = hub, target
        self._rate_limit, self._patience, self._stop, self._say = rate_limit, patience, stop, say
        self._lock = threading.Lock()
        self.received = 0
        """Bytes that came from the hub."""
        self.checked = 0
        """Bytes of files, and of parts of files, that were there and were hashed."""

    def bring(self, file: HubFile) -> None:
        """Put the verified file into its place.

        :raises CheckpointError: when the hub refuses it, keeps sending wrong bytes, or nothing comes.
        :raises OSError: when it can't be written.
        :raises StoppedError: when the work was told to stop.
        """
        if self._is_right_already(file):
            self._target.keep(file)
            return
        partial = self._target.partial(file)
        partial.parent.mkdir(parents=True, exist_ok=True)
        for _ in range(_MOST_WRONG):
            digest = self._stream(file, partial)
            length = partial.stat().st_size
            if (length, digest.hexdigest()) == (file.size, file.checksum.digest):
                self._target.place(file)
                return
            self._count_received(-length)
            partial.unlink()
            self._say(f"{file.name}: its bytes are wrong by their {file.checksum.algorithm} or number; thrown away")
        raise CheckpointError(
            f"{file.name}: came {_MOST_WRONG} times, each time with another {file.checksum.algorithm} or size than the "
            "hub lists; a proxy or a mirror changes it: set HF_ENDPOINT to another, or try again later"
        )

    def _is_right_already(self, file: HubFile) -> bool:
        if not self._target.has_size(file):
            return False
        digest = file.checksum.begin()
        add_file(digest, self._target.path(file), self._stop, self._count_checked)
        is_right = digest.hexdigest() == file.checksum.digest
        if not is_right:
            self._count_checked(-file.size)
            self._say(f"{file.name}: the file there has other bytes than the hub's; it is replaced")
        return is_right

    def _stream(self, file: HubFile, partial: Path) -> _Hash:
        """Bring the bytes that the partial file lacks, and return the hash of all. It ends early if too many come."""
        digest, length = self._hashed(file, partial)
        num_failed, farthest = 0, length
        # Not opened to append: should two processes write, they write the same bytes to the same places.
        with open(os.open(partial, os.O_CREAT | os.O_RDWR, 0o666), "r+b") as opened:
            while length < file.size:
                try:
                    with self._hub.bytes_of(self._target.listing, file, length) as (begin, pieces):
                        if begin != length:
                            self._count_received(begin - length)
                            digest, length = file.checksum.begin(), begin
                        # Nothing is cut off: another process may have lost the lock, and have hashed what is there.
                        opened.seek(length)
                        for piece in pieces:
                            opened.write(piece)
                            digest.update(piece)
                            length += len(piece)
                            self._count_received(len(piece))
                            # A server without ranges could send the same part for ever.
                            if length > farthest:
                                farthest, num_failed = length, 0
                                self._patience.received()
                            self._rate_limit.take(len(piece))
                            if self._stop.is_set():
                                raise StoppedError
                            if length > file.size:
                                return digest
                    if length < file.size:
                        raise TryAgainError(f"the connection ended at byte {length:,} of {file.size:,}")
                except TryAgainError as error:
                    opened.flush()
                    self._patience.wait(file.name, error, num_failed)
                    num_failed += 1
            opened.flush()
            # The record that it is verified must not outlive its bytes.
            os.fsync(opened.fileno())
        return digest

    def _hashed(self, file: HubFile, partial: Path) -> tuple[_Hash, int]:
        """Return the hash and the length of what an earlier download left. What is too long is removed."""
        digest = file.checksum.begin()
        with suppress(FileNotFoundError):
            if partial.stat().st_size <= file.size:
                return digest, add_file(digest, partial, self._stop, self._count_checked)
            partial.unlink()
        return digest, 0

    def _count_received(self, num_bytes: int) -> None:
        with self._lock:
            self.received += num_bytes

    def _count_checked(self, num_bytes: int) -> None:
        self._patience.received()
        with self._lock:
            self.checked += num_bytes
