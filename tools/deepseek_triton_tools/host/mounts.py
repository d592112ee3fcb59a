"""What is mounted where, by /proc/self/mountinfo (proc_pid_mountinfo(5))."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_ESCAPE = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, kw_only=True)
class Mount:
    """One line of mountinfo."""

    id: int
    parent: int
    """The id of the mount that it is mounted on; not always among those that a process sees."""
    device: str
    """major:minor. Btrfs and overlays number their files differently."""
    root: str
    """Which folder of the file system is mounted; "/" for all of it."""
    mount_point: str
    type: str
    """With the subtype: "ext4", "nfs4", "fuse.sshfs"."""
    source: str
    options: tuple[str, ...]
    """Of the mount and of its super block."""

    def option(self, name: str) -> str | None:
        """The value of `name=value`; the last one where there are several."""
        values = [value for key, is_set, value in (option.partition("=") for option in self.options) if key == name]
        return values[-1] if values else None

    def contains(self, path: Path) -> bool:
        """By its mount point alone: another mount may hide it."""
        return path.is_relative_to(self.mount_point)


def parse_mountinfo(text: str) -> tuple[Mount, ...]:
    """The mounts of /proc/<pid>/mountinfo, in its order.

    :raises ValueError: when a line is not as the kernel writes it.
    """
    return tuple(_parse_line(line) for line in text.split("\n") if line)


def read_mounts(root: Path = Path("/")) -> tuple[Mount, ...]:
    """Those that this process sees, by /proc under `root`.

    :raises OSError: when they can't be read.
    """
    return parse_mountinfo(os.fsdecode((root / "proc/self/mountinfo").read_bytes()))  # a name may hold any byte


def mount_at(path: Path, mounts: Sequence[Mount]) -> Mount | None:
    """The mount on which `path`, absolute and without links, is found; None where a process sees none (in a chroot).

    Walks down as the kernel does, from the outermost mount to the first one on it that lies on the way, and so on: the
    order of the lines tells nothing for sure, and neither does the length of the mount points, for a later mount hides
    what lies beneath.
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
    """36 35 98:0 /root /point rw,noatime master:1 - ext3 /dev/sda1 rw,errors=continue; no or several fields like
    master:1, and escapes for what would part the fields."""
    mount, dash, system = line.partition(" - ")
    fields, system_fields = mount.split(" "), system.split(" ")
    if not dash or len(fields) < 6 or len(system_fields) < 2:
        raise ValueError(f"expected a line as of /proc/self/mountinfo, got {line!r}")
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
