"""`stop` and `list`: launches of this user on this machine, by their records and by the marks of processes."""

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
    SERVER_NAME,
    LaunchTag,
    is_launch,
    kill_all,
    launches,
    members,
    remove_shared_memory,
)
from deepseek_launcher.launcher_errors import UsageError
from deepseek_launcher.server_processes import PATIENCE_S
from deepseek_launcher.signals import END_NOW

ORPHANED = "no supervisor"
_MARGIN_S = 15
"""On top of what the supervisor itself waits: it kills, reaps and removes after that."""
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
        known = self.record
        return {
            "id": self.id,
            "pid": self.supervisor.pid if self.supervisor else None,
            "state": self.state,
            "ports": dict(known.ports) if known else {},
            "repository": known.repository if known else None,
            "restarts": known.restarts if known else 0,
            "processes": self.num_processes,
        }


def find_launches() -> list[FoundLaunch]:
    """:raises LauncherError: when the folder of the records is somebody else's."""
    marked = launches()
    records = {one.id: one for one in launch_record.read_all() if is_launch(one.id)}
    here = {name: one for name, one in records.items() if one.namespace == launch_record.namespace() or name in marked}
    found = []
    for name in sorted(marked.keys() | here.keys()):
        known = here.get(name)
        supervisor = known.supervisor() if known else None
        found.append(FoundLaunch(id=name, record=known, supervisor=supervisor, num_processes=len(marked.get(name, []))))
    return found


def show(*, as_json: bool, say: Callable[[str], None]) -> int:
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
    known = launch.record
    if known is None:
        return [launch.id, launch.state, who]
    ports = " ".join(f"{name} {port}" for name, port in known.ports.items())
    return [launch.id, launch.state, who, ports, f"{known.restarts} restarts", known.repository or ""]


def stop(
    ids: Sequence[str], repositories: Sequence[Path], *, everything: bool, now: bool, say: Callable[[str], None]
) -> int:
    """End launches, and wait until nothing of them is left. 0 also when there is none.

    :raises UsageError: for an id that is none, or when nothing says which.
    :raises StillRunningError: when something can't be killed.
    """
    if wrong := [name for name in ids if not is_launch(name)]:
        raise UsageError(f"{', '.join(wrong)}: expected the 8 hex digits that `supervise.py list` shows")
    if not ids and not repositories and not everything:
        raise UsageError("say which: an ID of `supervise.py list`, --repository DIR, or --all")
    folders = {folder.resolve() for folder in repositories}
    chosen = [launch for launch in find_launches() if everything or _is_meant(launch, ids, folders)]
    # All are asked before the first is waited for.
    for launch in chosen:
        _ask(launch, now=now)
    for name in ids:
        if name not in [launch.id for launch in chosen]:
            say(f"{name}: nothing runs")
    if not chosen and not ids:
        say("nothing runs")
    for launch in chosen:
        _finish(launch, now=now)
        say(f"{launch.id}: stopped")
    return 0


def _is_meant(launch: FoundLaunch, ids: Sequence[str], folders: Set[Path]) -> bool:
    if launch.id in ids:
        return True
    known = launch.record.repository if launch.record else None
    return known is not None and Path(known).resolve() in folders


def _ask(launch: FoundLaunch, *, now: bool) -> None:
    # To one that stops already, SIGTERM would say "at once".
    if launch.supervisor is not None and (now or launch.state != "stopping"):
        process_table.send(launch.supervisor, END_NOW if now else signal.SIGTERM)
        process_table.send(launch.supervisor, signal.SIGCONT)  # Ctrl-Z may have stopped it


def _finish(launch: FoundLaunch, *, now: bool) -> None:
    patience_s = _MARGIN_S
    if launch.record is not None and not now:
        patience_s += int(launch.record.exit_timeout_s) + PATIENCE_S
    give_up = time.monotonic() + patience_s
    while launch.supervisor is not None and process_table.runs(launch.supervisor) and time.monotonic() < give_up:
        time.sleep(_TICK_S)
    if launch.supervisor is not None:
        process_table.send(launch.supervisor, signal.SIGKILL)
    mark = LaunchTag(launch=launch.id)
    if launch.supervisor is None and not now:
        _ask_ranks(mark, give_up)
    kill_all(mark)
    remove_shared_memory(launch.id)
    launch_record.remove(launch.id)


def _ask_ranks(mark: LaunchTag, give_up: float) -> None:
    """Without a supervisor here, as on a further node, or after it was killed: each process for itself."""
    left = members(mark)
    # tritonserver drains, and its end ends the others; where there is none, there is nothing to drain.
    for process in [process for process in left if process.name == SERVER_NAME] or left:
        process_table.send(process, signal.SIGTERM)
    while members(mark) and time.monotonic() < give_up:
        time.sleep(_TICK_S)
