"""One download at a time into one place, also for hosts that share a file system.

The lock is a file that its holder touches every few seconds. flock is not used: some network file systems lack it, and
others keep it from host to host. A holder that died is known at once on its own machine, and elsewhere when it has not
touched the file for a minute, by the clock of who waits. In the worst case two processes download the same bytes to the
same places, and each compares the hashes.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from deepseek_triton_build.text import printable_line

_TOUCH_S = 5.0
_DEAD_AFTER_S = 60.0
_POLL_S = 0.5
_MOST_CHARACTERS = 100


@dataclass(frozen=True)
class LockHolder:
    host: str
    pid: int
    machine: str
    """One name for each kernel and container, in which `pid` is a process."""
    started: str
    """The time at which the process began, in the kernel's ticks: another process may get the same number later."""
    token: str

    def __str__(self) -> str:
        return f"process {self.pid} on {printable_line(self.host)[:_MOST_CHARACTERS]}"


@contextmanager
def download_lock(path: Path, on_wait: Callable[[str], object]) -> Iterator[None]:
    """Hold the lock while the block runs. The folder of `path` has to be there.

    :param on_wait: called, again and again while others hold it, with who that is.
    :raises OSError: when the file can't be written.
    """
    own = LockHolder(socket.gethostname(), os.getpid(), _machine(), _started(os.getpid()), secrets.token_hex(8))
    seen: tuple[str, float] | None = None
    since_s = 0.0
    while not _create(path, own):
        state = _state(path)
        # It was released between the two looks.
        if state is None:
            continue
        if state != seen:
            seen, since_s = state, time.monotonic()
        holder = _parsed(state[0])
        has_died = holder and holder.machine == _machine() != "" and _started(holder.pid) != holder.started
        if has_died or time.monotonic() - since_s > _DEAD_AFTER_S:
            _remove(path, state[0])
            continue
        on_wait(str(holder or "another process"))
        time.sleep(_POLL_S)
    ended = threading.Event()
    toucher = threading.Thread(target=_touch, args=(path, ended), name="lock", daemon=True)
    toucher.start()
    try:
        yield
    finally:
        ended.set()
        toucher.join()
        _remove(path, json.dumps(asdict(own)))


def _create(path: Path, own: LockHolder) -> bool:
    try:
        # O_EXCL holds from host to host, on NFS from version 3 on.
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    except FileExistsError:
        return False
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(json.dumps(asdict(own)))
    except OSError:
        # The disk is full; a lock without a holder would be waited for.
        path.unlink(missing_ok=True)
        raise
    return True


def _state(path: Path) -> tuple[str, float] | None:
    """Return the lock's text and when it was touched; None where it is gone."""
    try:
        return _text(path), path.stat().st_mtime
    except FileNotFoundError:
        return None


def _parsed(text: str) -> LockHolder | None:
    """Return the holder; None while it is being written."""
    try:
        return LockHolder(**json.loads(text))
    except (ValueError, TypeError):
        return None


def _remove(path: Path, text: str) -> None:
    """Remove the lock if it still is the one with this text. Only one process can move it, so it is moved first."""
    scratch = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    with suppress(FileNotFoundError):
        if _text(path) != text:
            return
        os.rename(path, scratch)
        # Another took it over between the two lines above.
        if _text(scratch) != text:
            # A third has it by now, or the file system knows no links.
            with suppress(OSError):
                os.link(scratch, path)
        scratch.unlink()


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def _touch(path: Path, ended: threading.Event) -> None:
    while not ended.wait(_TOUCH_S):
        # Taken away, or the storage is away: the hashes are compared anyway.
        with suppress(OSError):
            os.utime(path)


def _machine() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _started(pid: int) -> str:
    """Return when a process began; "" where there is none, or only what its parent has not collected."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return ""
    return "" if state in ("Z", "X") else fields[18]
