"""The file system that a checkpoint lies on, and how it is best read.

Only a few threads read at once: sixteen threads of each rank have frozen NFS clients (NVIDIA/TensorRT-LLM pull request
14655). Where the kernel reads little ahead, posix_fadvise asks it for more. By mm/readahead.c each such call brings in
at most the larger one of read_ahead_kb and the device's largest request.
"""

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from deepseek_triton_tools.host.host_memory import Mount, mount_at, read_mounts, read_number

# Bytes that a thread asks for at once: 64 MiB.
WINDOW = 2**26
# Bytes that the kernel is asked to read ahead: 16 MiB. Azure NetApp Files' page on read-ahead has measured 128 KiB to
# 15 MiB for NFS, and the largest was the best.
READ_AHEAD = 2**24
# A kernel that reads this much ahead keeps a link busy: over NFS at 10 Gbit/s, 1 MiB gave 940 MB/s and 128 KiB gave 300
# MB/s (honnef.co, "NFS sequential read performance").
ENOUGH_READ_AHEAD_KB = 1024
MOST_JOBS = 8


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The way to read from a file system, unless options say otherwise."""

    kind: str
    """The kind of storage, for people: "local disk", "network", "object store" or "memory"."""
    jobs: int
    """Windows that a node reads at once; 0 where there is nothing to bring in (tmpfs)."""
    window: int = WINDOW
    """Bytes that a thread asks for at once."""
    read_ahead: int = READ_AHEAD
    """Bytes beyond the window that the kernel is asked to read ahead; 0: the kernel's own read-ahead is enough."""
    method: Literal["splice", "read"] = "splice"
    """splice copies nothing; read is for file systems that can't splice."""
    is_cached: bool = True
    """Whether what is read stays in the page cache. It does not on DAX, on ZFS and on others that have a cache of their
    own or none. For FUSE and BeeGFS it can't be known beforehand; the residency after the warm-up shows it."""
    reason: str
    """The reason for these values, in one line, with its source."""


@dataclass(frozen=True, kw_only=True)
class FileSystem:
    mount: Mount
    reading: Reading
    read_ahead_kb: int | None
    """The kernel's read-ahead in KiB, by /sys/class/bdi/<device>/read_ahead_kb; None where it can't be read. For an
    overlay it is that of the file system beneath."""


_local = partial(Reading, kind="local disk", jobs=4)
_network = partial(Reading, kind="network", jobs=4)
_objects = partial(Reading, kind="object store", jobs=MOST_JOBS)
_memory = partial(Reading, kind="memory", jobs=0, read_ahead=0)


def _with_own_cache(reading: Reading) -> Reading:
    return replace(reading, is_cached=False, read_ahead=0)


_DISK = _local(
    reason="4 threads read a quarter faster than one (tests/bench/warm.py), and keep the drives of an array busy"
)
_IMAGE = _local(reason="its blocks are decompressed by the thread that reads them, so 4 processors share that")
_NFS = _network(
    reason="one connection to the server; 16 threads a rank have frozen NFS clients (TensorRT-LLM PR 14655)"
)
_CIFS = _network(reason="one connection to the server (mount.cifs(8), max_channels)")
_VM_SHARE = _network(reason="the host reads for this machine, mostly over a network of its own (InferenceX PR 3134)")
_FUSE = _network(
    reason="each read is a request to a process, and the kernel queues 12 of them ahead (max_background of fuse)"
)
_FUSE_DISK = _local(reason="a local disk through a process that reads for it")
_BUCKET = _objects(reason="an object store gives each request little; its latency is hidden by more of them")
_STRIPED = _network(jobs=MOST_JOBS, reason="files are striped over several servers, each of which can be busy")
_SHARED_DISK = _local(reason="a disk that several hosts share: read as a disk")
_IN_MEMORY = _memory(reason="the files lie in memory already")
_UNKNOWN = _network(jobs=2, reason="an unknown file system is read as a slow network would be")

_BY_TYPE: Mapping[str, Reading] = {
    **dict.fromkeys(("ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "bcachefs", "jfs", "nilfs2"), _DISK),
    **dict.fromkeys(("vfat", "exfat", "ntfs3", "ntfs", "udf", "iso9660", "hfsplus"), _DISK),
    **dict.fromkeys(("squashfs", "erofs"), _IMAGE),
    **dict.fromkeys(("ocfs2", "gfs2"), _SHARED_DISK),
    "zfs": _with_own_cache(_local(reason="it caches in its ARC, not in the page cache, and reads ahead by itself")),
    **dict.fromkeys(("nfs", "nfs4"), _NFS),
    **dict.fromkeys(("cifs", "smb3", "smbfs"), _CIFS),
    "lustre": replace(_STRIPED, read_ahead=0, reason=f"{_STRIPED.reason}; its client reads ahead (max_read_ahead_mb)"),
    "gpfs": _with_own_cache(
        _network(jobs=MOST_JOBS, reason="it caches in its page pool, not in the page cache, and reads ahead by itself")
    ),
    "beegfs": replace(
        _STRIPED,
        reason=f"{_STRIPED.reason}; only tuneFileCacheType=native keeps files in the page cache (doc.beegfs.io)",
    ),
    **dict.fromkeys(("ceph", "wekafs", "orangefs", "pvfs2"), _STRIPED),
    **dict.fromkeys(("9p", "virtiofs", "vboxsf", "prl_fs"), _VM_SHARE),
    "afs": _network(reason="one server a volume"),
    "fuse": _FUSE,
    "fuse.sshfs": _network(jobs=2, reason="one ssh connection, whose encryption is the limit"),
    **{f"fuse.{name}": _BUCKET for name in ("s3fs", "mountpoint-s3", "goofys", "geesefs", "gcsfuse", "blobfuse")},
    **{f"fuse.{name}": _BUCKET for name in ("blobfuse2", "ossfs", "juicefs", "JuiceFS", "rclone")},
    **dict.fromkeys(("fuse.glusterfs", "fuse.ceph-fuse", "fuse.daos", "fuse.dfuse", "fuse.quobyte"), _STRIPED),
    **dict.fromkeys(("fuseblk", "fuse.mergerfs", "fuse.bindfs", "fuse.fuse-overlayfs", "fuse.squashfuse"), _FUSE_DISK),
    "overlay": _local(reason="an overlay whose layers can't be seen from here is read as a disk"),
    **dict.fromkeys(("tmpfs", "ramfs", "rootfs", "devtmpfs", "hugetlbfs"), _IN_MEMORY),
}
"""Type in mountinfo -> how it is read. "fuse" stands for every FUSE type that is not listed, "overlay" for overlays
whose layers can't be seen."""

_MEMORY_OF_DEVICE = replace(_memory(reason="DAX: it is read where it lies, without the page cache"), is_cached=False)


_UNKNOWN_MOUNT = Mount(
    id=0, parent=0, device="", root="/", mount_point="/", type="unknown", source="unknown", options=()
)


def file_system_of(path: Path, mounts: Sequence[Mount] | None = None, *, sysfs: Path = Path("/sys")) -> FileSystem:
    """The file system that the file or folder at `path` (links followed) lies on.

    :param mounts: None: the mounts that this process sees.
    :raises OSError: when the path or mountinfo can't be read.
    """
    place = Path(os.path.realpath(path, strict=True))
    mounts = read_mounts() if mounts is None else mounts
    mount = mount_at(place, mounts)
    if mount is None:  # in a chroot, the mount of the root may lie outside
        number = os.stat(place).st_dev
        mount = replace(_UNKNOWN_MOUNT, device=f"{os.major(number)}:{os.minor(number)}")
    storage = mount
    layers: list[Mount] = []
    while storage.type == "overlay" and (beneath := _beneath(storage, place, mounts, [mount, *layers])):
        storage, place = beneath
        layers.append(storage)
    read_ahead_kb = _read_ahead_kb(storage, sysfs)
    reading = _BY_TYPE.get(storage.type) or (_FUSE if storage.type.startswith("fuse.") else _UNKNOWN)
    reading = _by_options(storage, reading)
    if reading.read_ahead:
        if read_ahead_kb is None:
            reading = _because(reading, "how far the kernel reads ahead can't be seen, so it is asked to")
        elif read_ahead_kb >= ENOUGH_READ_AHEAD_KB:
            reading = replace(reading, read_ahead=0)
        else:
            reading = _because(reading, f"the kernel reads {read_ahead_kb} KiB ahead, so it is asked for more")
    if layers:
        reading = replace(reading, reason=f"an overlay over {storage.type}: {reading.reason}")
    return FileSystem(mount=mount, reading=reading, read_ahead_kb=read_ahead_kb)


def _beneath(overlay: Mount, place: Path, mounts: Sequence[Mount], seen: Sequence[Mount]) -> tuple[Mount, Path] | None:
    """The mount and path where a file of an overlay really lies: in the first of its layers that has the file."""
    inside = Path(overlay.root.lstrip("/")) / place.relative_to(overlay.mount_point)
    for layer in _layers(overlay):
        file = Path(os.path.realpath(layer / inside))
        mount = mount_at(file, mounts)
        # In a container the layers are named by paths of the host. Such a path may lead to the overlay itself here.
        if mount and mount not in seen and os.path.lexists(file):
            return mount, file
    return None


def _layers(overlay: Mount) -> Iterator[Path]:
    """The folders of an overlay's layers, the upper one first. In the options a colon within a name has a backslash
    before it. Relative paths are left out, because nothing says what they are relative to."""
    folders: list[str] = []
    for option in overlay.options:
        name, _, value = option.partition("=")
        if name == "upperdir":
            folders.insert(0, value)
        elif name in ("lowerdir", "lowerdir+", "datadir+"):
            folders += re.split(r"(?<!\\):", value)
    paths = (Path(folder.replace("\\:", ":")) for folder in folders)
    return (path for path in paths if path.is_absolute())


def _by_options(mount: Mount, reading: Reading) -> Reading:
    if "dax" in mount.options or mount.option("dax") == "always":
        return replace(reading, is_cached=False) if mount.type == "virtiofs" else _MEMORY_OF_DEVICE
    nconnect = mount.option("nconnect") or ""
    if reading is _NFS and nconnect.isdecimal() and int(nconnect) > 1:
        # Requests are spread over that many connections, at most 16 (nfs(5)).
        jobs = min(MOST_JOBS, max(reading.jobs, int(nconnect)))
        return replace(reading, jobs=jobs, reason=f"{nconnect} connections to the server (nconnect)")
    if (mount.type == "9p" and not _caches_9p(mount)) or (reading is _CIFS and mount.option("cache") == "none"):
        return _because(replace(reading, is_cached=False), "mounted without a cache (option cache=...)")
    return reading


def _caches_9p(mount: Mount) -> bool:
    """Whether a 9p mount caches files, by fs/9p/v9fs.c: only where the option cache=... says so. Since Linux 6.4 its
    value is a hexadecimal number whose lowest bit is the cache for files; before, it was a name."""
    cache = (mount.option("cache") or "0").lower()
    with contextlib.suppress(ValueError):  # the value is a name
        return bool(int(cache, 16) & 1)
    return cache in ("loose", "fscache", "readahead")


def _because(reading: Reading, why: str) -> Reading:
    return replace(reading, reason=f"{reading.reason}; {why}")


def _read_ahead_kb(mount: Mount, sysfs: Path) -> int | None:
    """The kernel's read-ahead of a mount; None where /sys does not have it.

    It is found by the device's number (disks, NFS, FUSE), for a partition by the number of its disk. Others are named
    by their type and a running number, such as btrfs-1. Nothing links that name to the mount, so the smallest value of
    the type is taken.
    """
    devices, block = sysfs / "class/bdi", Path(os.path.realpath(sysfs / "dev/block" / mount.device))
    by_number = (devices / mount.device, devices / f"{mount.device}-fuseblk", block / "queue", block.parent / "queue")
    choices: list[Iterable[Path]] = [*([folder] for folder in by_number), devices.glob(f"{mount.type}-*")]
    for folders in choices:
        values = [kb for folder in folders if (kb := read_number(folder / "read_ahead_kb")) is not None]
        if values:
            return min(values)
    return None
