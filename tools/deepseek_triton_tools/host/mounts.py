"""The mounts that this process sees, by /proc/self/mountinfo (proc_pid_mountinfo(5))."""

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
