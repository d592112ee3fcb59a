"""The memory of this machine that the page cache can take, by MemAvailable and by the limits of memory cgroups.

Where the cgroups are is told by the mounts that this process sees, by /proc/self/mountinfo (proc_pid_mountinfo(5)).
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

_ESCAPE = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, kw_only=True)
class Mount:
    """One line of mountinfo."""

    id: int
    parent: int
    """The id of the mount that this one is mounted on; a process does not always see that one."""
    device: str
    """major:minor of the device. The files of btrfs and overlays have other device numbers."""
    root: str
    """The folder of the file system that is mounted; "/" for the whole file system."""
    mount_point: str
    type: str
    """The type with its subtype: "ext4", "nfs4", "fuse.sshfs"."""
    source: str
    options: tuple[str, ...]
    """Options of the mount and of its super block."""

    def __str__(self) -> str:
        return f"{self.type} {self.source} on {self.mount_point}"

    def option(self, name: str) -> str | None:
        """The value of the option `name=value`; the last one where there are several."""
        values = [value for key, is_set, value in (option.partition("=") for option in self.options) if key == name]
        return values[-1] if values else None

    def contains(self, path: Path) -> bool:
        """Whether `path` is below the mount point. Another mount may hide it all the same."""
        return path.is_relative_to(self.mount_point)


def parse_mountinfo(text: str) -> tuple[Mount, ...]:
    """The mounts in the text of /proc/<pid>/mountinfo, in its order.

    :raises ValueError: when a line is not in the kernel's format.
    """
    return tuple(_parse_line(line) for line in text.split("\n") if line)


def read_mounts(root: Path = Path("/")) -> tuple[Mount, ...]:
    """The mounts that this process sees, by /proc under `root`.

    :raises OSError: when they can't be read.
    """
    return parse_mountinfo(os.fsdecode((root / "proc/self/mountinfo").read_bytes()))  # a name may hold any byte


def mount_at(path: Path, mounts: Sequence[Mount]) -> Mount | None:
    """The mount that `path` lies on; None where this process does not see it (in a chroot).

    This walks down as the kernel does: from the outermost mount to the first mount on it that lies on the way, and so
    on. Neither the order of the lines nor the length of the mount points would decide it, because a later mount hides
    what lies beneath.

    :param path: an absolute path without links.
    """
    on_the_way = [mount for mount in mounts if mount.contains(path)]
    ids = {mount.id for mount in on_the_way}
    found = None
    ahead = [mount for mount in on_the_way if mount.parent not in ids or mount.parent == mount.id]
    while ahead:
        found = min(ahead, key=lambda mount: len(mount.mount_point))
        ahead = [mount for mount in on_the_way if mount.parent == found.id != mount.id]
    return found


def _parse_line(line: str) -> Mount:
    """Parse a line such as `36 35 98:0 /root /point rw,noatime master:1 - ext3 /dev/sda1 rw,errors=continue`.

    There may be no field like master:1, or several. A character that would end a field is escaped.
    """
    mount, dash, system = line.partition(" - ")
    fields, system_fields = mount.split(" "), system.split(" ")
    if not dash or len(fields) < 6 or len(system_fields) < 2:
        raise ValueError(f"expected a line of /proc/self/mountinfo, got {line!r}")
    type_, source, options = system_fields[0], system_fields[1], " ".join(system_fields[2:])
    return Mount(
        id=int(fields[0]),
        parent=int(fields[1]),
        device=fields[2],
        root=_unescaped(fields[3]),
        mount_point=_unescaped(fields[4]),
        type=_unescaped(type_),
        source=_unescaped(source),
        options=tuple(_unescaped(option) for option in [*fields[5].split(","), *options.split(",")] if option),
    )


def _unescaped(field: str) -> str:
    return _ESCAPE.sub(lambda escape: chr(int(escape[1], 8)), field)


BUDGET_SHARE = 0.9
"""Share of the headroom that weights may fill. The engine too reads ahead only while the checkpoint is smaller than
this share of the available memory (TensorRT-LLM's weight_loader.py), and its own processes need the rest."""

Version = Literal[1, 2]

_LIMITS: Mapping[Version, Sequence[str]] = {1: ("memory.limit_in_bytes",), 2: ("memory.max", "memory.high")}
_USAGE: Mapping[Version, str] = {1: "memory.usage_in_bytes", 2: "memory.current"}
_FILE_PAGES: Mapping[Version, Sequence[str]] = {
    1: ("total_active_file", "total_inactive_file"),  # the names without total_ leave out the cgroups below
    2: ("active_file", "inactive_file"),
}


@dataclass(frozen=True, kw_only=True)
class CgroupMemory:
    """A memory cgroup with a limit: this process's own cgroup or one above it."""

    path: str
    """The cgroup's folder, as this process sees it."""
    version: Version
    limit: int
    """Bytes: the lower one of memory.max and memory.high (v2), or memory.limit_in_bytes (v1)."""
    usage: int
    file_cache: int
    """Bytes of `usage` that are file pages the kernel can drop: active_file + inactive_file of memory.stat."""

    @property
    def headroom(self) -> int:
        """Bytes that page cache may take in this cgroup. File pages count against the limit, but can be replaced."""
        return max(0, self.limit - (self.usage - self.file_cache))


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    total: int
    available: int
    """Bytes of MemAvailable."""
    cgroups: tuple[CgroupMemory, ...]
    """The cgroups that have a limit, the innermost first."""

    @property
    def headroom(self) -> int:
        """Bytes that the page cache may take on this machine."""
        return min([self.available, *(cgroup.headroom for cgroup in self.cgroups)])

    @property
    def tightest(self) -> CgroupMemory | None:
        """The cgroup that decides the headroom; None when the machine's memory decides it."""
        tightest = min(self.cgroups, key=lambda cgroup: cgroup.headroom, default=None)
        return tightest if tightest and tightest.headroom < self.available else None


def read_host_memory(root: Path = Path("/")) -> HostMemory:
    """Read the memory from /proc and /sys/fs/cgroup under `root` (proc(5), the kernel's cgroup-v2.rst and
    cgroup-v1/memory.rst).

    A cgroup whose files can't be read counts as one without a limit.

    :raises OSError: when /proc/meminfo can't be read.
    """
    meminfo = _numbers((root / "proc/meminfo").read_text())
    total = meminfo["MemTotal"] * 1024
    cgroups = (_read_cgroup(folder, root, version) for folder, version in _memory_cgroups(root))
    return HostMemory(
        total=total,
        available=meminfo["MemAvailable"] * 1024,
        # A limit above the machine's memory is no limit; version 1 writes 2**63 less a page for "no limit".
        cgroups=tuple(cgroup for cgroup in cgroups if cgroup and cgroup.limit < total),
    )


def _memory_cgroups(root: Path) -> Iterator[tuple[Path, Version]]:
    """The folders of this process's cgroup and of the cgroups above it. A machine has the memory controller in one of
    the two versions, though both may be mounted."""
    try:
        lines = os.fsdecode((root / "proc/self/cgroup").read_bytes()).split("\n")
        mounts = read_mounts(root)
    except OSError:
        return
    for line in filter(None, lines):
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            memory_mounts = [mount for mount in mounts if mount.type == "cgroup" and "memory" in mount.options]
            yield from ((folder, 1) for folder in _folders(Path(path), memory_mounts, root))
        elif not controllers:
            unified = [mount for mount in mounts if mount.type == "cgroup2"]
            yield from ((folder, 2) for folder in _folders(Path(path), unified, root))


def _folders(cgroup: Path, mounts: Sequence[Mount], root: Path) -> Sequence[Path]:
    """The folders from the cgroup's own one up to the mount point.

    A container may see nothing but its own cgroup, while /proc/self/cgroup has the path that the host sees. The
    cgroup's folder is the mount point then.
    """
    for mount in mounts:
        top = root / mount.mount_point.lstrip("/")
        if cgroup.is_relative_to(mount.root):
            inside = cgroup.relative_to(mount.root)
            if (top / inside).is_dir():
                return [top / each for each in (inside, *inside.parents)]
    return [root / mount.mount_point.lstrip("/") for mount in mounts[:1]]


def _read_cgroup(folder: Path, root: Path, version: Version) -> CgroupMemory | None:
    """None where the cgroup has no limit, or can't be read."""
    limits = [limit for name in _LIMITS[version] if (limit := read_number(folder / name)) is not None]
    usage = read_number(folder / _USAGE[version])
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


def read_number(file: Path) -> int | None:
    """The number in a file of /proc or /sys; None where the file can't be read or holds a word, such as "max"."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _numbers(text: str) -> Mapping[str, int]:
    """Name -> number, for lines such as "MemTotal: 123 kB" and "active_file 123"."""
    fields = (line.replace(":", " ").split() for line in text.splitlines())
    return {name: int(number) for name, number, *_ in fields}
