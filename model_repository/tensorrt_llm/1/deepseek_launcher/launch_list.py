"""The verbs `stop` and `list`. They find this user's launches on this machine by records and by tagged processes."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from deepseek_launcher import launch_record, process_table
from deepseek_launcher.launch_record import LaunchRecord
from deepseek_launcher.launch_tag import (
    LaunchTag,
    is_launch_id,
    kill_all,
    members,
    processes_by_launch,
    remove_shared_memory,
    terminate_servers,
)
from deepseek_launcher.launcher_errors import UsageError
from deepseek_launcher.server_processes import PATIENCE_S
from deepseek_launcher.signals import END_NOW

ORPHANED = "no supervisor"
_MARGIN_S = 15
"""Seconds on top of the supervisor's own patience, after which it still kills, reaps and removes."""
_TICK_S = 0.1


@dataclass(frozen=True, kw_only=True)
class FoundLaunch:
    """A launch that has a supervisor, or processes, or both."""

    id: str
    record: LaunchRecord | None
    supervisor: process_table.Process | None
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
            "ports": dict(record.ports) if record else {},
            "repository": record.repository if record else None,
            "restarts": record.restarts if record else 0,
            "processes": self.num_processes,
        }


def find_launches() -> list[FoundLaunch]:
    """Return the launches of this user, sorted by id.

    :raises LauncherError: when the folder of the records belongs to another user.
    """
    tagged = processes_by_launch()
    records = {
        record.id: record
        for record in launch_record.read_all()
        if is_launch_id(record.id) and (record.namespace == launch_record.namespace() or record.id in tagged)
    }
    found = []
    for launch in sorted(tagged.keys() | records.keys()):
        record = records.get(launch)
        supervisor = record.supervisor() if record else None
        num_processes = len(tagged.get(launch, []))
        found.append(FoundLaunch(id=launch, record=record, supervisor=supervisor, num_processes=num_processes))
    return found


def show(*, as_json: bool, say: Callable[[str], None]) -> int:
    """Print the launches with `say`, a line each or as one JSON list; return the exit code."""
    found = find_launches()
    if as_json:
        say(json.dumps([launch.as_json() for launch in found], indent=2))
        return 0
    for launch in found:
        say("  ".join(filter(None, _columns(launch))))
    if not found:
        say("nothing runs")
    return 0


def _columns(launch: FoundLaunch) -> list[str]:
    who = f"process {launch.supervisor.pid}" if launch.supervisor else f"{launch.num_processes} processes left"
    record = launch.record
    if record is None:
        return [launch.id, launch.state, who]
    ports = " ".join(f"{name} {port}" for name, port in record.ports.items())
    return [launch.id, launch.state, who, ports, f"{record.restarts} restarts", record.repository or ""]


def stop(
    ids: Sequence[str], repositories: Sequence[Path], *, everything: bool, now: bool, say: Callable[[str], None]
) -> int:
    """End launches and wait until no process of them is left; return 0, also when there was no such launch.

    :raises UsageError: when an id is no launch id, or when no launch was named.
    :raises StillRunningError: when a process can't be killed.
    """
    if wrong := [name for name in ids if not is_launch_id(name)]:
        raise UsageError(f"{', '.join(wrong)}: expected the 8 hex digits that `supervise.py list` shows")
    if not ids and not repositories and not everything:
        raise UsageError("say which: an ID of `supervise.py list`, --repository DIR, or --all")
    folders = {folder.resolve() for folder in repositories}
    chosen = [launch for launch in find_launches() if everything or _is_chosen(launch, ids, folders)]
    # Every supervisor gets its signal before the first one is waited for.
    for launch in chosen:
        _request_stop(launch, now=now)
    for name in ids:
        if name not in [launch.id for launch in chosen]:
            say(f"{name}: nothing runs")
    if not chosen and not ids:
        say("nothing runs")
    for launch in chosen:
        _finish(launch, now=now)
        say(f"{launch.id}: stopped")
    return 0


def _is_chosen(launch: FoundLaunch, ids: Sequence[str], folders: Set[Path]) -> bool:
    if launch.id in ids:
        return True
    repository = launch.record.repository if launch.record else None
    return repository is not None and Path(repository).resolve() in folders


def _request_stop(launch: FoundLaunch, *, now: bool) -> None:
    # A supervisor that is stopping already would take a second SIGTERM for a request to end at once.
    if launch.supervisor is not None and (now or launch.state != "stopping"):
        process_table.send(launch.supervisor, END_NOW if now else signal.SIGTERM)
        process_table.send(launch.supervisor, signal.SIGCONT)  # Ctrl-Z may have stopped it


def _finish(launch: FoundLaunch, *, now: bool) -> None:
    """Wait for the supervisor to end, then kill and remove everything that is left of the launch."""
    patience_s = _MARGIN_S
    if launch.record is not None and not now:
        patience_s += int(launch.record.exit_timeout_s) + PATIENCE_S
    deadline = time.monotonic() + patience_s
    while launch.supervisor is not None and process_table.runs(launch.supervisor) and time.monotonic() < deadline:
        time.sleep(_TICK_S)
    if launch.supervisor is not None:
        process_table.send(launch.supervisor, signal.SIGKILL)
    tag = LaunchTag(launch=launch.id)
    if launch.supervisor is None and not now:
        _stop_members(tag, deadline)
    kill_all(tag)
    remove_shared_memory(launch.id)
    launch_record.remove(launch.id)


def _stop_members(tag: LaunchTag, deadline: float) -> None:
    """Stop the processes themselves where no supervisor is here: on a further node, or after it was killed."""
    left = members(tag)
    # tritonserver drains, and its end ends the others. Without one there is nothing to drain.
    if not terminate_servers(left):
        for process in left:
            process_table.send(process, signal.SIGTERM)
    while members(tag) and time.monotonic() < deadline:
        time.sleep(_TICK_S)
