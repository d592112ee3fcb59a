"""How much of this machine's memory the page cache can take: MemAvailable, and what the memory cgroups leave."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from deepseek_triton_tools.host.mounts import Mount, read_mounts

Version = Literal[1, 2]

_LIMITS: Mapping[Version, Sequence[str]] = {1: ("memory.limit_in_bytes",), 2: ("memory.max", "memory.high")}
_USAGE: Mapping[Version, str] = {1: "memory.usage_in_bytes", 2: "memory.current"}
_FILE_PAGES: Mapping[Version, Sequence[str]] = {
    1: ("total_active_file", "total_inactive_file"),  # without total_: of the group, less those in it
    2: ("active_file", "inactive_file"),
}


@dataclass(frozen=True, kw_only=True)
class CgroupMemory:
    """One memory cgroup with a limit, this process's own or one above it."""

    path: str
    """Its folder, as this process sees it."""
    version: Version
    limit: int
    """Bytes: the lowest of memory.max and memory.high (v2), memory.limit_in_bytes (v1)."""
    usage: int
    file_cache: int
    """Bytes of `usage` that are file pages the kernel can drop: active_file + inactive_file of memory.stat."""

    @property
    def headroom(self) -> int:
        """Bytes that the page cache may take in it: file pages count against the limit, but can be replaced."""
        return max(0, self.limit - (self.usage - self.file_cache))


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    total: int
    available: int
    """MemAvailable; bytes."""
    cgroups: tuple[CgroupMemory, ...]
    """Those with a limit, the innermost first."""

    @property
    def headroom(self) -> int:
        """Bytes that the page cache may take."""
        return min([self.available, *(cgroup.headroom for cgroup in self.cgroups)])

    @property
    def tightest(self) -> CgroupMemory | None:
        """The cgroup that decides; None when the machine's memory does."""
        tightest = min(self.cgroups, key=lambda cgroup: cgroup.headroom, default=None)
        return tightest if tightest and tightest.headroom < self.available else None


def read_host_memory(root: Path = Path("/")) -> HostMemory:
    """By /proc and /sys/fs/cgroup under `root` (proc(5), the kernel's cgroup-v2.rst and cgroup-v1/memory.rst).

    :raises OSError: when /proc/meminfo can't be read. Cgroup files that can't be read are no limit.
    """
    meminfo = _numbers((root / "proc/meminfo").read_text())
    total = meminfo["MemTotal"] * 1024
    folders = _memory_cgroups(root)
    cgroups = (_read_cgroup(folder, root, version) for folder, version in folders)
    return HostMemory(
        total=total,
        available=meminfo["MemAvailable"] * 1024,
        # A limit of all memory and more is none; version 1 writes 2**63 less a page for it.
        cgroups=tuple(cgroup for cgroup in cgroups if cgroup and cgroup.limit < total),
    )


def _memory_cgroups(root: Path) -> Iterator[tuple[Path, Version]]:
    """The folders of this process's cgroup and of those above it. A machine has the memory controller in one of the
    versions, though it may have both mounted."""
    try:
        lines = os.fsdecode((root / "proc/self/cgroup").read_bytes()).split("\n")
        mounts = read_mounts(root)
    except OSError:
        return
    for line in filter(None, lines):
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            of_memory = [mount for mount in mounts if mount.type == "cgroup" and "memory" in mount.options]
            yield from ((folder, 1) for folder in _folders(Path(path), of_memory, root))
        elif not controllers:
            unified = [mount for mount in mounts if mount.type == "cgroup2"]
            yield from ((folder, 2) for folder in _folders(Path(path), unified, root))


def _folders(cgroup: Path, mounts: Sequence[Mount], root: Path) -> Sequence[Path]:
    """From the cgroup's own folder up to the mount point.

    A container may see its own cgroup as all there is, while /proc/self/cgroup has the path from the host's: then it
    is the mount point.
    """
    for mount in mounts:
        top = root / mount.mount_point.lstrip("/")
        if cgroup.is_relative_to(mount.root):
            inside = cgroup.relative_to(mount.root)
            if (top / inside).is_dir():
                return [top / each for each in (inside, *inside.parents)]
    return [root / mount.mount_point.lstrip("/") for mount in mounts[:1]]


def _read_cgroup(folder: Path, root: Path, version: Version) -> CgroupMemory | None:
    """None where it has no limit, or doesn't say."""
    limits = [limit for name in _LIMITS[version] if (limit := _read_number(folder / name)) is not None]
    usage = _read_number(folder / _USAGE[version])
    if not limits or usage is None:
        return None
    try:
        stat = _numbers((folder / "memory.stat").read_text())
    except OSError:
        stat = {}
    return CgroupMemory(
        path=f"/{folder.relative_to(root)}",
        version=version,
        limit=min(limits),
        usage=usage,
        file_cache=sum(stat.get(name, 0) for name in _FILE_PAGES[version]),
    )


def _read_number(file: Path) -> int | None:
    """None where there is none: "max"."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _numbers(text: str) -> Mapping[str, int]:
    """Of lines as "MemTotal: 123 kB" and "active_file 123"."""
    fields = (line.replace(":", " ").split() for line in text.splitlines())
    return {name: int(number) for name, number, *_ in fields}
