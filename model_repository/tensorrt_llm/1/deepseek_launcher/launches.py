"""The launches of this user on this machine: a small JSON file for each supervisor, and the verbs `stop` and `list`.

They find launches by these records, in a folder that only the user can write, and by the tagged processes.
"""

import contextlib
import json
import math
import os
import signal
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from deepseek_launcher import launch_tag, processes
from deepseek_launcher.options import LauncherError, UsageError
from deepseek_launcher.processes import END_NOW, Process, look_up
from deepseek_launcher.server_watch import PATIENCE_S

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
    progress: str = ""
    """How far a load is, in words; empty in other states, and in the first seconds."""

    def supervisor(self) -> Process | None:
        """Return the supervisor's process; None when it has ended or can't be seen from here."""
        process = look_up(self.pid)
        same = process is not None and process.started == self.started and self.namespace == processes.namespace()
        return process if same else None


def record_folder() -> Path:
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
        _make_folder(record_folder())
        self._path = record_folder() / f"{record.id}.json"
        self._write()

    def update(self, **facts: Any) -> None:
        record = replace(self._record, **facts)
        if record == self._record:
            return
        self._record = record
        with contextlib.suppress(OSError):  # a full disk must not end a server
            self._write()

    def restore(self) -> None:
        """Write the file again if somebody has removed it."""
        with contextlib.suppress(OSError, LauncherError):
            if not self._path.exists():
                _make_folder(record_folder())
                self._write()

    def close(self) -> None:
        remove_record(self._record.id)

    def _write(self) -> None:
        unfinished = self._path.with_suffix(".new")  # no other process writes it: a launch has one supervisor
        try:
            unfinished.write_text(json.dumps(asdict(self._record)), encoding="utf-8")
            unfinished.replace(self._path)
        except OSError:
            # A full disk.
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)
            raise


def read_records() -> list[LaunchRecord]:
    """Return this user's records; a file that holds no record is skipped.

    :raises LauncherError: when the folder belongs to another user.
    """
    try:
        if not record_folder().is_dir():
            return []
    except OSError as error:
        raise LauncherError(f"{error}: set XDG_RUNTIME_DIR to a folder of this user, or unset it") from error
    for part in (record_folder().parent, record_folder()):
        _check_owner(part)
    records = []
    for path in sorted(record_folder().glob("*.json")):
        with contextlib.suppress(OSError, ValueError, TypeError, OverflowError, RecursionError):
            records.append(_parse(json.loads(path.read_text(encoding="utf-8"))))
    return records


def _parse(facts: dict[str, Any]) -> LaunchRecord:
    """Return the record that `facts` holds.

    :raises TypeError: for a missing or unknown key, or a value of another type.
    :raises ValueError: for a number that is not finite.
    :raises OverflowError: for a whole number that is larger than any finite one.
    """
    record = LaunchRecord(**facts)
    kinds: dict[str, type | tuple[type, ...]] = {
        **dict.fromkeys(("id", "namespace", "state", "progress"), str),
        **dict.fromkeys(("pid", "started", "restarts"), int),
        "ports": dict,
        "exit_timeout_s": (int, float),
        "repository": (str, type(None)),
    }
    if wrong := [name for name, kind in kinds.items() if not isinstance(getattr(record, name), kind)]:
        raise TypeError(f"of another type: {', '.join(wrong)}")
    if not math.isfinite(record.exit_timeout_s):
        raise ValueError("exit_timeout_s is not finite")
    return record


def remove_record(launch: str) -> None:
    """Remove a launch's record. One that can't be removed shows later as a launch without a supervisor."""
    with contextlib.suppress(OSError):
        (record_folder() / f"{launch}.json").unlink(missing_ok=True)


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


ORPHANED = "no supervisor"
# Seconds on top of the supervisor's own patience, after which it still kills, reaps and removes.
_MARGIN_S = 15
_TICK_S = 0.1


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A launch that has a supervisor, or processes, or both."""

    id: str
    record: LaunchRecord | None
    supervisor: processes.Process | None
    num_processes: int

    @property
    def state(self) -> str:
        return self.record.state if self.record and self.supervisor else ORPHANED

    def as_json(self) -> dict[str, object]:
        record = self.record
        return {
            "id": self.id,
            "pid": self.supervisor.pid if self.supervisor else None,
            "state": self.state,
            "progress": record.progress if record else "",
            "ports": dict(record.ports) if record else {},
            "repository": record.repository if record else None,
            "restarts": record.restarts if record else 0,
            "processes": self.num_processes,
        }


def find_launches() -> list[Launch]:
    """Return the launches of this user, sorted by id.

    :raises LauncherError: when the folder of the records belongs to another user.
    """
    tagged = launch_tag.processes_by_launch()
    records = {
        record.id: record
        for record in read_records()
        if launch_tag.is_launch_id(record.id) and (record.namespace == processes.namespace() or record.id in tagged)
    }
    launches = []
    for launch in sorted(tagged.keys() | records.keys()):
        record = records.get(launch)
        supervisor = record.supervisor() if record else None
        num_processes = len(tagged.get(launch, []))
        launches.append(Launch(id=launch, record=record, supervisor=supervisor, num_processes=num_processes))
    return launches


def show(*, as_json: bool, say: Callable[[str], None]) -> int:
    """Print the launches with `say`, a line each or as one JSON list; return the exit code."""
    launches = find_launches()
    if as_json:
        say(json.dumps([launch.as_json() for launch in launches], indent=2))
        return 0
    for launch in launches:
        who = f"process {launch.supervisor.pid}" if launch.supervisor else f"{launch.num_processes} processes left"
        columns = [launch.id, launch.state, who]
        if (record := launch.record) is not None:
            ports = " ".join(f"{name} {port}" for name, port in record.ports.items())
            columns += [record.progress, ports, f"{record.restarts} restarts", record.repository or ""]
        say("  ".join(filter(None, columns)))
    if not launches:
        say("nothing runs")
    return 0


def stop(
    ids: Sequence[str], repositories: Sequence[Path], *, everything: bool, now: bool, say: Callable[[str], None]
) -> int:
    """End launches and wait until no process of them is left; return 0, or 1 when nothing here has one of `ids`.

    :raises UsageError: when an id is no launch id, nothing runs from a folder that isn't there, or no launch was named.
    :raises StillRunningError: when a process can't be killed.
    """
    if wrong := [name for name in ids if not launch_tag.is_launch_id(name)]:
        raise UsageError(f"{', '.join(wrong)}: expected the 8 hex digits that `supervise.py list` shows")
    if bool(ids or repositories) == everything:
        raise UsageError("say which: an ID of `supervise.py list`, --repository DIR, or --all alone")
    folders = {folder.resolve() for folder in repositories}
    chosen, served = [], set()
    for launch in find_launches():
        repository = Path(launch.record.repository).resolve() if launch.record and launch.record.repository else None
        served.add(repository)
        if everything or launch.id in ids or repository in folders:
            chosen.append(launch)
    idle = sorted(folders - served)
    if gone := [str(folder) for folder in idle if not os.path.isdir(folder)]:
        raise UsageError(f"nothing runs from {', '.join(gone)}, which is no folder: `list` shows what runs")
    # Every supervisor gets its signal before the first one is waited for.
    for launch in chosen:
        # One that is stopping already would take a second SIGTERM for a request to end at once.
        if launch.supervisor is not None and (now or launch.state != "stopping"):
            processes.send(launch.supervisor, END_NOW if now else signal.SIGTERM)
            processes.send(launch.supervisor, signal.SIGCONT)  # Ctrl-Z may have stopped it
    unknown = [name for name in ids if name not in {launch.id for launch in chosen}]
    for name in unknown:
        say(f"{name}: nothing runs here, `list` shows what does; a container is ended by docker stop")
    for folder in idle:
        say(f"nothing runs here from {folder}; a container is ended by docker stop")
    if everything and not chosen:
        say("nothing runs")
    for launch in chosen:
        _finish(launch, now=now)
        say(f"{launch.id}: stopped")
    return 1 if unknown else 0


def _finish(launch: Launch, *, now: bool) -> None:
    """Wait for the supervisor to end, then kill and remove everything that is left of the launch."""
    patience_s = _MARGIN_S
    if launch.record is not None and not now:
        patience_s += int(launch.record.exit_timeout_s) + PATIENCE_S
    deadline = time.monotonic() + patience_s
    while launch.supervisor is not None and processes.runs(launch.supervisor) and time.monotonic() < deadline:
        time.sleep(_TICK_S)
    if launch.supervisor is not None:
        processes.send(launch.supervisor, signal.SIGKILL)
    tag = launch_tag.LaunchTag(launch=launch.id)
    if launch.supervisor is None and not now:  # on a further node, or after it was killed
        left = launch_tag.members(tag)
        # tritonserver drains, and its end ends the others. Without one there is nothing to drain.
        if not launch_tag.terminate_servers(left):
            for process in left:
                processes.send(process, signal.SIGTERM)
        while launch_tag.members(tag) and time.monotonic() < deadline:
            time.sleep(_TICK_S)
    launch_tag.kill_all(tag)
    launch_tag.remove_shared_memory(launch.id)
    remove_record(launch.id)
