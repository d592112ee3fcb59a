"""The file system that a path lies on, and how it is read: samples of mountinfo, and real mounts."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepseek_triton_tools.host.mounts import Mount, mount_at, parse_mountinfo, read_mounts
from deepseek_triton_tools.warming.pagecache.filesystem import (
    ENOUGH_READ_AHEAD_KB,
    MOST_JOBS,
    READ_AHEAD,
    FileSystem,
    Reading,
    file_system_of,
)
from support.mounting import loop_image, mounted, overlay

SAMPLES = Path(__file__).parent / "samples"
STORAGE = (SAMPLES / "storage.mountinfo").read_text()
NAMES = [mount.mount_point.removeprefix("/models/") for mount in parse_mountinfo(STORAGE) if mount.mount_point != "/"]


def system_of(folder: Path, name: str, *, read_ahead_kb: int | None = None) -> FileSystem:
    """The file system at /models/<name> of the sample, whose /models is `folder`."""
    (folder / name).mkdir()
    mounts = parse_mountinfo(STORAGE.replace("/models/", f"{folder}/"))
    sysfs = folder / "sysfs"
    if read_ahead_kb is not None:
        for mount in mounts:
            write(sysfs / f"class/bdi/{mount.device}/read_ahead_kb", read_ahead_kb)
    return file_system_of(folder / name, mounts, sysfs=sysfs)


def write(path: Path, number: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{number}\n")


def mount_of(line: str) -> Mount:
    (mount,) = parse_mountinfo(line)
    return mount


def kernel_mount_id(path: Path) -> int:
    """The id of the mount, from the kernel's own information about an open file."""
    fd = os.open(path, os.O_PATH)
    try:
        lines = Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines()
    finally:
        os.close(fd)
    return next(int(line.split()[1]) for line in lines if line.startswith("mnt_id:"))


# --- mountinfo


def test_a_line_with_everything() -> None:
    line = "36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 propagate_from:2 unbindable - ext3 /dev/root rw,errors=continue"

    assert mount_of(line) == Mount(
        id=36,
        parent=35,
        device="98:0",
        root="/mnt1",
        mount_point="/mnt2",
        type="ext3",
        source="/dev/root",
        options=("rw", "noatime", "rw", "errors=continue"),
    )


@pytest.mark.parametrize("optional", ["", "shared:7 ", "shared:7 master:3 ", "master:3 propagate_from:1 unbindable "])
def test_any_number_of_optional_fields(optional: str) -> None:
    mount = mount_of(f"1 2 0:5 / /models rw {optional}- nfs4 filer:/x rw,nconnect=4")

    assert (mount.type, mount.source, mount.option("nconnect")) == ("nfs4", "filer:/x", "4")


def test_escapes_are_undone_after_the_fields_were_split() -> None:
    mount = mount_of(r"1 2 0:5 /a\040-\040b /my\040models\011\134x rw - overlay a\040b rw,lowerdir=/one\054two:/three")

    assert mount.root == "/a - b"
    assert mount.mount_point == "/my models\t\\x"
    assert mount.source == "a b"
    assert mount.option("lowerdir") == "/one,two:/three"


def test_the_last_value_of_an_option_counts() -> None:
    mount = mount_of("1 2 0:5 / /x rw - nfs4 s rw,nconnect=2,nconnect=8")

    assert (mount.option("nconnect"), mount.option("rw"), mount.option("absent")) == ("8", "", None)


def test_a_source_or_options_that_are_empty() -> None:
    mount = mount_of("1 2 0:5 / /x rw - fuse  rw")

    assert (mount.type, mount.source, mount.options) == ("fuse", "", ("rw", "rw"))


@given(name=st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1))
def test_every_name_comes_back_as_the_kernel_escapes_it(name: str) -> None:
    escaped = "".join(f"\\{ord(each):03o}" if each in " \t\n\\" else each for each in name)

    assert mount_of(f"1 2 0:5 / /{escaped} rw - ext4 /dev/x rw").mount_point == f"/{name}"


def test_a_line_that_is_no_mountinfo_is_refused_and_shown() -> None:
    with pytest.raises(ValueError, match="expected a line of /proc/self/mountinfo, got '/dev/sda1 / ext4 rw 0 0'"):
        parse_mountinfo("/dev/sda1 / ext4 rw 0 0\n")


# --- which mount a path is on


def tree(*mounts: tuple[int, int, str]) -> tuple[Mount, ...]:
    return parse_mountinfo(
        "\n".join(f"{id_} {parent} 0:{id_} / {point} rw - t{id_} s rw" for id_, parent, point in mounts)
    )


@pytest.mark.parametrize(
    ("mounts", "path", "expected"),
    [
        pytest.param([(1, 0, "/"), (2, 1, "/a")], "/a/file", 2, id="the deeper one"),
        pytest.param([(1, 0, "/"), (2, 1, "/a")], "/ab/file", 1, id="a name that only begins alike"),
        pytest.param([(2, 1, "/a"), (1, 0, "/")], "/a/file", 2, id="the root listed last, after pivot_root"),
        pytest.param([(1, 0, "/"), (2, 1, "/a"), (3, 2, "/a")], "/a/file", 3, id="over another"),
        pytest.param([(3, 2, "/a"), (2, 1, "/a"), (1, 0, "/")], "/a/file", 3, id="over another, listed first"),
        pytest.param([(1, 0, "/"), (2, 1, "/a/b"), (3, 1, "/a")], "/a/b/file", 3, id="hidden by a later one above"),
        pytest.param([(1, 0, "/"), (3, 1, "/a"), (2, 3, "/a/b")], "/a/b/file", 2, id="on a mount, not beneath it"),
        pytest.param([(1, 0, "/"), (2, 1, "/"), (3, 2, "/a")], "/a/file", 3, id="a root over the first root"),
        pytest.param([(1, 1, "/"), (2, 1, "/a")], "/a/file", 2, id="a root that is its own parent"),
        pytest.param([(2, 1, "/proc")], "/models", None, id="a chroot whose own mount is outside"),
    ],
)
def test_the_mount_of_a_path(mounts: list[tuple[int, int, str]], path: str, expected: int | None) -> None:
    found = mount_at(Path(path), tree(*mounts))

    assert (found.id if found else None) == expected


def test_every_mount_of_this_machine_is_found_where_the_kernel_has_it() -> None:
    mounts = read_mounts()
    places = {Path(mount.mount_point) for mount in mounts if os.access(mount.mount_point, os.R_OK)}

    found = {place: mount_at(place, mounts) for place in places}

    assert found
    assert {place: mount.id for place, mount in found.items() if mount} == {p: kernel_mount_id(p) for p in places}


def test_real_mounts_over_under_and_beside_each_other(tmp_path: Path) -> None:
    with ExitStack() as stack:
        outer = stack.enter_context(mounted("-t", "tmpfs", "one", on=tmp_path / "a b"))
        stack.enter_context(mounted("-t", "tmpfs", "two", on=outer / "c"))
        (tmp_path / "d\\040e\r\n\u2028").mkdir()
        bound = stack.enter_context(mounted("--bind", outer / "c", on=tmp_path / "d\\040e\r\n\u2028"))
        places = [outer, outer / "c", bound, tmp_path]
        check_against_kernel(places)
        stack.enter_context(mounted("-t", "tmpfs", "three", on=outer))
        (outer / "c").mkdir()

        check_against_kernel([*places, outer / "c"])
        assert file_system_of(outer / "c").mount.source == "three"
        assert file_system_of(bound).mount.source == "two"


def check_against_kernel(places: list[Path]) -> None:
    for place in places:
        assert file_system_of(place).mount.id == kernel_mount_id(place), place


def test_links_are_followed(tmp_path: Path) -> None:
    with mounted("-t", "tmpfs", "linked", on=tmp_path / "memory") as memory:
        (memory / "weights").touch()
        (tmp_path / "link").symlink_to(memory / "weights")

        assert file_system_of(tmp_path / "link").mount.source == "linked"


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        file_system_of(tmp_path / "missing")


def test_a_place_that_no_mount_is_listed_for_is_read_carefully(tmp_path: Path) -> None:
    system = file_system_of(tmp_path, [])

    assert (system.mount.type, system.reading.kind, system.reading.jobs) == ("unknown", "network", 2)


# --- how it is read


@pytest.mark.parametrize(
    ("names", "kind", "jobs"),
    [
        ("ext2 ext3 ext4 xfs btrfs f2fs zfs squashfs erofs iso9660 fuseblk mergerfs overlay", "local disk", 4),
        ("xfs-dax-never", "local disk", 4),
        ("nfs nfs4 nfs4-2 cifs smb3 9p 9p-bits virtiofs virtiofs-dax fuse newfuse", "network", 4),
        ("nfs4-6", "network", 6),
        ("nfs4-16 lustre gpfs beegfs ceph glusterfs wekafs", "network", 8),
        ("sshfs unheardof", "network", 2),
        ("juicefs s3fs gcsfuse blobfuse2 mountpoint-s3", "object store", 8),
        ("tmpfs ramfs hugetlbfs ext4-dax xfs-dax", "memory", 0),
    ],
)
def test_kind_and_jobs(tmp_path: Path, names: str, kind: str, jobs: int) -> None:
    readings = {name: system_of(tmp_path, name).reading for name in names.split()}

    assert {name: (reading.kind, reading.jobs) for name, reading in readings.items()} == dict.fromkeys(
        readings, (kind, jobs)
    )


@pytest.mark.parametrize("name", NAMES)
def test_nothing_reads_with_many_threads_and_everything_says_why(tmp_path: Path, name: str) -> None:
    reading = system_of(tmp_path, name).reading

    assert 0 <= reading.jobs <= MOST_JOBS
    assert reading.window <= 2**26
    assert reading.reason
    assert "\n" not in reading.reason


def test_file_systems_that_keep_nothing_in_the_page_cache(tmp_path: Path) -> None:
    uncached = {name for name in NAMES if not system_of(tmp_path, name).reading.is_cached}

    assert uncached == {"zfs", "gpfs", "9p", "9p-mmap", "smb3", "virtiofs-dax", "ext4-dax", "xfs-dax"}


def test_little_kernel_read_ahead_is_helped(tmp_path: Path) -> None:
    system = system_of(tmp_path, "nfs4", read_ahead_kb=128)

    assert system.read_ahead_kb == 128
    assert system.reading.read_ahead == READ_AHEAD
    assert "the kernel reads 128 KiB ahead" in system.reading.reason


def test_enough_kernel_read_ahead_is_left_alone(tmp_path: Path) -> None:
    assert system_of(tmp_path, "nfs4", read_ahead_kb=ENOUGH_READ_AHEAD_KB).reading.read_ahead == 0
    assert system_of(tmp_path, "nfs", read_ahead_kb=ENOUGH_READ_AHEAD_KB - 1).reading.read_ahead == READ_AHEAD


def test_unknown_kernel_read_ahead_is_helped(tmp_path: Path) -> None:
    system = system_of(tmp_path, "virtiofs")

    assert system.read_ahead_kb is None
    assert system.reading.read_ahead == READ_AHEAD


@pytest.mark.parametrize("name", ["lustre", "zfs", "gpfs", "tmpfs", "ext4-dax"])
def test_a_file_system_that_reads_ahead_itself_or_lies_in_memory_is_left_alone(tmp_path: Path, name: str) -> None:
    assert system_of(tmp_path, name, read_ahead_kb=0).reading.read_ahead == 0


def test_the_read_ahead_of_a_partition_is_its_disks(tmp_path: Path) -> None:
    partition = tmp_path / "sysfs/devices/nvme0n1/nvme0n1p2"
    partition.mkdir(parents=True)
    write(partition.parent / "queue/read_ahead_kb", 512)
    (tmp_path / "sysfs/dev/block").mkdir(parents=True)
    (tmp_path / "sysfs/dev/block/259:903").symlink_to(partition)

    assert system_of(tmp_path, "ext4").read_ahead_kb == 512


def test_the_read_ahead_of_a_numbered_device_is_the_smallest_of_its_type(tmp_path: Path) -> None:
    for number, kb in enumerate([4096, 256, 8192]):
        write(tmp_path / f"sysfs/class/bdi/btrfs-{number}/read_ahead_kb", kb)

    assert system_of(tmp_path, "btrfs").read_ahead_kb == 256


def test_the_read_ahead_of_fuseblk(tmp_path: Path) -> None:
    write(tmp_path / "sysfs/class/bdi/8:901-fuseblk/read_ahead_kb", 128)

    assert system_of(tmp_path, "fuseblk").read_ahead_kb == 128


def test_a_real_disk(tmp_path: Path) -> None:
    with loop_image(tmp_path / "image", tmp_path / "disk", make="mkfs.ext4") as disk:
        system = file_system_of(disk)
        device = os.stat(disk).st_dev

        assert (system.mount.type, system.mount.mount_point) == ("ext4", str(disk))
        assert system.mount.device == f"{os.major(device)}:{os.minor(device)}"
        assert (system.reading.kind, system.reading.jobs) == ("local disk", 4)
        path = Path(f"/sys/class/bdi/{system.mount.device}/read_ahead_kb")
        assert system.read_ahead_kb == (int(path.read_text()) if path.exists() else None)


def test_a_real_file_system_in_memory(tmp_path: Path) -> None:
    with mounted("-t", "tmpfs", "memory", on=tmp_path / "memory") as memory:
        assert file_system_of(memory).reading.jobs == 0


# --- overlays


def test_an_overlay_in_a_container_is_read_as_a_disk(tmp_path: Path) -> None:
    reading = system_of(tmp_path, "overlay").reading

    assert reading.kind == "local disk"
    assert "layers can't be seen from here" in reading.reason


def test_an_overlay_is_read_as_the_layer_that_has_the_file(tmp_path: Path) -> None:
    for folder in ("upper", "one", "two", "merged"):
        (tmp_path / folder).mkdir()
    for file in ("one/weights", "two/weights", "two/config", "upper/new", "one/changed", "upper/changed"):
        (tmp_path / file).touch()
        (tmp_path / "merged" / Path(file).name).touch()
    mounts = parse_mountinfo(
        f"""\
1 0 0:901 / / rw - ext4 /dev/x rw
2 1 0:902 / {tmp_path}/one rw - nfs4 filer:/one rw
3 1 0:903 / {tmp_path}/two rw - virtiofs two rw
4 1 0:904 / {tmp_path}/merged rw - overlay o rw,lowerdir={tmp_path}/one:{tmp_path}/two,upperdir={tmp_path}/upper
"""
    )
    reasons = {
        name: file_system_of(tmp_path / "merged" / name, mounts).reading.reason
        for name in ("weights", "config", "new", "changed")
    }

    assert reasons["weights"].startswith("an overlay over nfs4: ")
    assert reasons["config"].startswith("an overlay over virtiofs: ")
    assert reasons["new"].startswith("an overlay over ext4: ")
    assert reasons["changed"].startswith("an overlay over ext4: ")


def over(layers: str, folder: Path) -> Reading:
    """The reading of <folder>/merged/weights, with nfs4 at <folder>/lower."""
    (folder / "merged").mkdir()
    (folder / "merged/weights").touch()
    lines = (
        "1 0 0:901 / / rw - ext4 /dev/x rw",
        f"2 1 0:902 / {folder}/lower rw - nfs4 filer:/one rw",
        f"3 1 0:903 / {folder}/merged rw - overlay o rw,{layers}",
    )
    return file_system_of(folder / "merged/weights", parse_mountinfo("\n".join(lines))).reading


@pytest.mark.parametrize(
    ("layer", "written"),
    [
        pytest.param("lower", "lowerdir={}", id="old option"),
        pytest.param("lower", "lowerdir+=/nowhere,lowerdir+={}", id="since Linux 6.8"),
        pytest.param("lower", "lowerdir=/nowhere::{}", id="data-only layer"),
        pytest.param("lower/a:b", "lowerdir={}", id="a colon"),
        pytest.param("lower/a,b", "lowerdir={}", id="a comma"),
    ],
)
def test_how_the_kernel_writes_the_layers(tmp_path: Path, layer: str, written: str) -> None:
    (tmp_path / layer).mkdir(parents=True)
    (tmp_path / layer / "weights").touch()
    name = str(tmp_path / layer).replace(":", r"\134:").replace(",", r"\054")

    assert over(written.format(name), tmp_path).kind == "network"


def test_relative_layers_are_not_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lower").mkdir()
    (tmp_path / "lower/weights").touch()
    monkeypatch.chdir(tmp_path)

    assert "layers can't be seen" in over("lowerdir=lower", tmp_path).reason


def test_layers_whose_paths_mean_the_overlay_itself(tmp_path: Path) -> None:
    mounts = parse_mountinfo("1 0 0:901 / / rw - overlay o rw,lowerdir=/,upperdir=/upper")

    assert "layers can't be seen" in file_system_of(tmp_path, mounts).reading.reason


def test_a_folder_of_an_overlay_mounted_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "lower/deep").mkdir(parents=True)
    (tmp_path / "lower/deep/weights").touch()
    (tmp_path / "bound").mkdir()
    (tmp_path / "bound/weights").touch()
    mounts = parse_mountinfo(
        f"""\
1 0 0:901 / / rw - xfs /dev/x rw
2 1 0:902 /deep {tmp_path}/bound rw - overlay o rw,lowerdir={tmp_path}/lower
"""
    )

    assert "an overlay over xfs" in file_system_of(tmp_path / "bound/weights", mounts).reading.reason


def test_a_real_overlay_over_memory_and_one_over_it(tmp_path: Path) -> None:
    with mounted("-t", "tmpfs", "memory", on=tmp_path / "memory") as memory, overlay(memory) as (lower, merged):
        (lower / "weights").touch()
        system = file_system_of(merged / "weights")
        assert (system.mount.type, system.reading.kind, system.reading.jobs) == ("overlay", "memory", 0)

        (tmp_path / "empty").mkdir()
        layers = f"lowerdir={merged}:{tmp_path / 'empty'}"
        with mounted("-t", "overlay", "second", "-o", layers, on=tmp_path / "second") as second:
            system = file_system_of(second / "weights")
            assert (system.mount.source, system.reading.kind) == ("second", "memory")
