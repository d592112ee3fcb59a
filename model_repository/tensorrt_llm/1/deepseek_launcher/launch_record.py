"""The record of each supervisor on this machine: a small JSON file in a folder that only its user can write."""

from __future__ import annotations

import contextlib
import json
import math
import os
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from deepseek_launcher.launcher_errors import LauncherError
from deepseek_launcher.process_table import Process, look_up

_MODE = 0o700


@dataclass(frozen=True, kw_only=True)
class LaunchRecord:
    """The facts about a launch that its supervisor writes down."""

    id: str
    pid: int
    started: int
    """Start time of the supervisor, in clock ticks after the machine's start: it tells a later process with the same
    number from this one."""
    namespace: str
    """Namespace of its process numbers, for two containers can share the folder."""
    state: str
    """`loading`, `ready`, `not ready`, `stopping` or `waiting` (for the next attempt)."""
    ports: Mapping[str, int]
    repository: str | None
    restarts: int
    exit_timeout_s: float

    def supervisor(self) -> Process | None:
        """Return the supervisor's process; None when it has ended or can't be seen from here."""
        process = look_up(self.pid)
        same = process is not None and process.started == self.started and self.namespace == namespace()
        return process if same else None


def namespace() -> str:
    """Return the name of this process's namespace of process numbers, as `pid:[4026531836]`."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def folder() -> Path:
    """Return the folder of this user's records."""
    base = os.environ.get("XDG_RUNTIME_DIR") or "/tmp"
    return Path(base) / f"deepseek-triton-{os.getuid()}" / "launches"


class LaunchRecordFile:
    """The file that holds one supervisor's record."""

    def __init__(self, record: LaunchRecord) -> None:
        """Write the file.

        :raises LauncherError: when the folder can't be used.
        """
        self._record = record
        _make_folder(folder())
        self._path = folder() / f"{record.id}.json"
        self._write()

    def update(self, *, state: str, restarts: int) -> None:
        if (state, restarts) == (self._record.state, self._record.restarts):
            return
        self._record = replace(self._record, state=state, restarts=restarts)
        with contextlib.suppress(OSError):  # a full disk must not end a server
            self._write()

    def restore(self) -> None:
        """Write the file again if somebody has removed it."""
        with contextlib.suppress(OSError, LauncherError):
            if not self._path.exists():
                _make_folder(folder())
                self._write()

    def close(self) -> None:
        remove(self._record.id)

    def _write(self) -> None:
        unfinished = self._path.with_suffix(".new")  # no other process writes it: a launch has one supervisor
        try:
            unfinished.write_text(json.dumps(asdict(self._record)), encoding="utf-8")
            unfinished.replace(self._path)
        except OSError:  # a full disk
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)
            raise


def read_all() -> list[LaunchRecord]:
    """Return this user's records; a file that holds no record is skipped.

    :raises LauncherError: when the folder belongs to another user.
    """
    try:
        if not folder().is_dir():
            return []
    except OSError as error:
        raise LauncherError(f"{error}: set XDG_RUNTIME_DIR to a folder of this user, or unset it") from error
    for part in (folder().parent, folder()):
        _check_owner(part)
    found = []
    for path in sorted(folder().glob("*.json")):
        with contextlib.suppress(OSError, ValueError, TypeError, OverflowError, RecursionError):
            found.append(_parse(json.loads(path.read_text(encoding="utf-8"))))
    return found


def _parse(facts: dict[str, Any]) -> LaunchRecord:
    """Return the record that `facts` holds.

    :raises TypeError: for a missing or unknown key, or a value of another type.
    :raises ValueError: for a number that is not finite.
    :raises OverflowError: for a whole number that is larger than any finite one.
    """
    record = LaunchRecord(**facts)
    wanted: dict[str, type | tuple[type, ...]] = {
        **dict.fromkeys(("id", "namespace", "state"), str),
        **dict.fromkeys(("pid", "started", "restarts"), int),
        "ports": dict,
        "exit_timeout_s": (int, float),
        "repository": (str, type(None)),
    }
    if wrong := [name for name, kind in wanted.items() if not isinstance(getattr(record, name), kind)]:
        raise TypeError(f"of another type: {', '.join(wrong)}")
    if not math.isfinite(record.exit_timeout_s):
        raise ValueError("exit_timeout_s is not finite")
    return record


def remove(launch: str) -> None:
    """Remove a launch's record. One that can't be removed shows later as a launch without a supervisor."""
    with contextlib.suppress(OSError):
        (folder() / f"{launch}.json").unlink(missing_ok=True)


def _make_folder(path: Path) -> None:
    try:
        for part in (path.parent, path):
            part.mkdir(mode=_MODE, parents=True, exist_ok=True)
            _check_owner(part)
    except OSError as error:
        raise LauncherError(f"launches can't be written down in {path}: {error.strerror}") from error


def _check_owner(folder: Path) -> None:
    """Refuse a folder that another user can write: its records decide which processes get a signal.

    Anybody can make a folder in /tmp.
    """
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise LauncherError(
            f"{folder} is not a folder that only this user can write: remove it, or set XDG_RUNTIME_DIR to one"
        )
