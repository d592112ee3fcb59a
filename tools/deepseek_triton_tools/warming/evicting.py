"""Dropping files from the page cache, and why some of their pages stay."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from deepseek_triton_tools.host.units import sized
from deepseek_triton_tools.warming.checkpoint.survey import Survey, SurveyedFile
from deepseek_triton_tools.warming.pagecache.residency import evict


@dataclass(frozen=True, kw_only=True)
class Evicted:
    """One file after the attempt to evict it."""

    path: Path
    left: int | None
    """Bytes that are still in the page cache; None: unknown."""
    reason: str = ""
    """The reason why some of them stayed, for people."""


def evict_all(survey: Survey) -> tuple[Evicted, ...]:
    """Drop every file of the survey, whatever its share or selection."""
    done = {each.file.path: _evict(each) for each in survey.files}
    stayed = [path for path, evicted in done.items() if evicted.left and not evicted.reason]
    users = _users(stayed) if stayed else {}
    return tuple(_explained(evicted, users.get(evicted.path, [])) for evicted in done.values())


def _evict(each: SurveyedFile) -> Evicted:
    path = each.file.path
    if not each.file_system.reading.jobs:
        reason = f"it lies in memory itself, on {each.file_system.mount.type}"
        return Evicted(path=path, left=each.file.size, reason=reason)
    try:
        return Evicted(path=path, left=evict(path))
    except OSError as error:
        return Evicted(path=path, left=None, reason=f"can't be opened: {error.strerror}")


def _explained(evicted: Evicted, users: list[str]) -> Evicted:
    if evicted.reason or not evicted.left:
        return evicted
    by = f"mapped by {', '.join(users)}" if users else "mapped or locked by a process, or not written back yet"
    return Evicted(path=evicted.path, left=evicted.left, reason=f"{sized(evicted.left)} stayed: {by}")


def _users(paths: list[Path]) -> Mapping[Path, list[str]]:
    """The processes that have one of the files mapped, as far as this user may see them."""
    by_name = {str(path.resolve()): path for path in paths}
    users: dict[Path, list[str]] = {}
    for pid, name, maps in _processes():
        for path in {by_name[mapped] for mapped in _mapped_files(maps) if mapped in by_name}:
            users.setdefault(path, []).append(f"{name} ({pid})")
    return users


def _processes() -> Iterator[tuple[str, str, str]]:
    """(pid, name, content of /proc/<pid>/maps) of each process."""
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            yield pid, Path("/proc", pid, "comm").read_text().strip(), Path("/proc", pid, "maps").read_text()
        except OSError:  # it has ended, or belongs to another user
            continue


def _mapped_files(maps: str) -> Iterator[str]:
    """The file names in /proc/<pid>/maps, which are its sixth column (proc(5))."""
    for line in maps.splitlines():
        columns = line.split(maxsplit=5)
        if len(columns) == 6:
            yield columns[5]
