"""The file system that a path lies on, and how it is read: samples of mountinfo, and real mounts."""

import os
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepseek_triton_tools.host.host_memory import Mount, mount_at, parse_mountinfo
from deepseek_triton_tools.warming.filesystem import ENOUGH_READ_AHEAD_KB, MOST_JOBS, READ_AHEAD, file_system_of
from support.mounting import mounted, overlay

SAMPLES = Path(__file__).parent / "samples"
STORAGE = (SAMPLES / "storage.mountinfo").read_text()
NAMES = [mount.mount_point.removeprefix("/models/") for mount in parse_mountinfo(STORAGE) if mount.mount_point != "/"]


def system_of(folder, name, *, read_ahead_kb=None):
    """The file system at /models/<name> of the sample, whose /models is `folder`."""
    (folder / name).mkdir()
    mounts = parse_mountinfo(STORAGE.replace("/models/", f"{folder}/"))
    sysfs = folder / "sysfs"
    if read_ahead_kb is not None:
        device = mount_at(folder / name, mounts).device
        write(sysfs / f"class/bdi/{device}/read_ahead_kb", read_ahead_kb)
    return file_system_of(folder / name, mounts, sysfs=sysfs)


def write(path, number):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{number}\n")


def mount_of(line):
    (mount,) = parse_mountinfo(line)
    return mount


def test_lines_of_mountinfo():
    line = "36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 propagate_from:2 unbindable - ext3 /dev/root rw,errors=continue"
    fields = {"root": "/mnt1", "mount_point": "/mnt2", "type": "ext3", "source": "/dev/root"}
    options = ("rw", "noatime", "rw", "errors=continue")
    assert mount_of(line) == Mount(id=36, parent=35, device="98:0", options=options, **fields)
    for optional in ("", "shared:7 ", "shared:7 master:3 ", "master:3 propagate_from:1 unbindable "):
        mount = mount_of(f"1 2 0:5 / /models rw {optional}- nfs4 filer:/x rw,nconnect=2,nconnect=4")
        assert (mount.type, mount.source) == ("nfs4", "filer:/x")
        assert [mount.option(name) for name in ("nconnect", "rw", "absent")] == ["4", "", None]  # the last counts
    mount = mount_of("1 2 0:5 / /x rw - fuse  rw")  # an empty source
    assert (mount.type, mount.source, mount.options) == ("fuse", "", ("rw", "rw"))
    line = r"1 2 0:5 /a\040-\040b /my\040models\011\134x rw - overlay a\040b rw,lowerdir=/one\054two:/three"
    mount = mount_of(line)  # escapes are undone after the fields were split
    assert (mount.root, mount.mount_point, mount.source) == ("/a - b", "/my models\t\\x", "a b")
    assert mount.option("lowerdir") == "/one,two:/three"
    with pytest.raises(ValueError, match="got '/dev/sda1 / ext4 rw 0 0'"):
        parse_mountinfo("/dev/sda1 / ext4 rw 0 0\n")


@settings(max_examples=40)
@given(name=st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1))
def test_every_name_comes_back_as_the_kernel_escapes_it(name):
    escaped = "".join(f"\\{ord(each):03o}" if each in " \t\n\\" else each for each in name)
    assert mount_of(f"1 2 0:5 / /{escaped} rw - ext4 /dev/x rw").mount_point == f"/{name}"


def test_the_mount_of_a_path():
    cases = {
        "the deeper one": ([(1, 0, "/"), (2, 1, "/a")], "/a/file", 2),
        "a name that only begins alike": ([(1, 0, "/"), (2, 1, "/a")], "/ab/file", 1),
        "the root listed last, after pivot_root": ([(2, 1, "/a"), (1, 0, "/")], "/a/file", 2),
        "over another": ([(1, 0, "/"), (2, 1, "/a"), (3, 2, "/a")], "/a/file", 3),
        "over another, listed first": ([(3, 2, "/a"), (2, 1, "/a"), (1, 0, "/")], "/a/file", 3),
        "hidden by a later one above": ([(1, 0, "/"), (2, 1, "/a/b"), (3, 1, "/a")], "/a/b/file", 3),
        "on a mount, not beneath it": ([(1, 0, "/"), (3, 1, "/a"), (2, 3, "/a/b")], "/a/b/file", 2),
        "a root over the first root": ([(1, 0, "/"), (2, 1, "/"), (3, 2, "/a")], "/a/file", 3),
        "a root that is its own parent": ([(1, 1, "/"), (2, 1, "/a")], "/a/file", 2),
        "a chroot whose own mount is outside": ([(2, 1, "/proc")], "/models", None),
    }
    found = {}
    for name, (mounts, path, _) in cases.items():
        lines = (f"{id_} {parent} 0:{id_} / {point} rw - t{id_} s rw" for id_, parent, point in mounts)
        found[name] = mount_at(Path(path), parse_mountinfo("\n".join(lines)))
    expected = {name: number for name, (_, _, number) in cases.items()}
    assert {name: mount and mount.id for name, mount in found.items()} == expected


def test_real_mounts_over_under_and_beside_each_other(tmp_path):
    with ExitStack() as stack:
        outer = stack.enter_context(mounted("-t", "tmpfs", "one", on=tmp_path / "a b"))
        stack.enter_context(mounted("-t", "tmpfs", "two", on=outer / "c"))
        strange = tmp_path / "d\\040e\r\n\u2028"
        strange.mkdir()
        bound = stack.enter_context(mounted("--bind", outer / "c", on=strange))
        (tmp_path / "link").symlink_to(outer / "c")
        places = [outer, outer / "c", bound, tmp_path]
        check_against_kernel(places)
        assert file_system_of(tmp_path / "link").mount.source == "two"
        stack.enter_context(mounted("-t", "tmpfs", "three", on=outer))
        (outer / "c").mkdir()
        check_against_kernel([*places, outer / "c"])
        assert (file_system_of(outer / "c").mount.source, file_system_of(outer / "c").reading.jobs) == ("three", 0)
        assert file_system_of(bound).mount.source == "two"
        lower, merged = stack.enter_context(overlay(outer))
        (lower / "weights").touch()
        (tmp_path / "empty").mkdir()
        layers = f"lowerdir={merged}:{tmp_path / 'empty'}"
        over_it = stack.enter_context(mounted("-t", "overlay", "second", "-o", layers, on=tmp_path / "second"))
        systems = [file_system_of(folder / "weights") for folder in (merged, over_it)]
        assert [(each.mount.source, each.reading.kind, each.reading.jobs) for each in systems] == [
            ("overlay", "memory", 0),
            ("second", "memory", 0),
        ]


def check_against_kernel(places):
    """The mount is the one in the kernel's own information about an open file."""
    for place in places:
        fd = os.open(place, os.O_PATH)
        lines = Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines()
        os.close(fd)
        assert f"mnt_id:\t{file_system_of(place).mount.id}" in lines, place


def test_a_place_or_layer_that_is_not_found_is_read_carefully(tmp_path):
    system = file_system_of(tmp_path, [])
    assert (system.mount.type, system.reading.kind, system.reading.jobs) == ("unknown", "network", 2)
    with pytest.raises(FileNotFoundError):
        file_system_of(tmp_path / "missing")
    mounts = parse_mountinfo("1 0 0:901 / / rw - overlay o rw,lowerdir=/,upperdir=/upper")
    assert "layers can't be seen" in file_system_of(tmp_path, mounts).reading.reason


LOCAL = "ext2 ext3 ext4 xfs btrfs f2fs zfs squashfs erofs iso9660 fuseblk mergerfs overlay xfs-dax-never"
KINDS = {
    ("local disk", 4): LOCAL,
    ("network", 4): "nfs nfs4 nfs4-2 cifs smb3 9p 9p-bits virtiofs virtiofs-dax fuse newfuse",
    ("network", 6): "nfs4-6",
    ("network", 8): "nfs4-16 lustre gpfs beegfs ceph glusterfs wekafs",
    ("network", 2): "sshfs unheardof",
    ("object store", 8): "juicefs s3fs gcsfuse blobfuse2 mountpoint-s3",
    ("memory", 0): "tmpfs ramfs hugetlbfs ext4-dax xfs-dax",
}
UNCACHED = {"zfs", "gpfs", "9p", "9p-mmap", "smb3", "virtiofs-dax", "ext4-dax", "xfs-dax"}


def test_how_each_file_system_is_read(tmp_path):
    readings = {name: system_of(tmp_path, name).reading for name in NAMES}
    expected = {name: kind for kind, names in KINDS.items() for name in names.split()}
    assert {name: (readings[name].kind, readings[name].jobs) for name in expected} == expected
    assert {name for name, reading in readings.items() if not reading.is_cached} == UNCACHED
    assert "layers can't be seen from here" in readings["overlay"].reason  # as in a container
    for reading in readings.values():
        assert (0 <= reading.jobs <= MOST_JOBS, reading.window <= 2**26, bool(reading.reason)) == (True, True, True)


def test_little_kernel_read_ahead_is_helped(tmp_path):
    system = system_of(tmp_path, "virtiofs")
    assert (system.read_ahead_kb, system.reading.read_ahead) == (None, READ_AHEAD)
    system = system_of(tmp_path, "nfs4", read_ahead_kb=128)
    assert (system.read_ahead_kb, system.reading.read_ahead) == (128, READ_AHEAD)
    assert "the kernel reads 128 KiB ahead" in system.reading.reason
    cases = {"9p": ENOUGH_READ_AHEAD_KB, "nfs": ENOUGH_READ_AHEAD_KB - 1}
    # These read ahead themselves, or lie in memory.
    cases |= dict.fromkeys(["lustre", "zfs", "gpfs", "tmpfs", "ext4-dax"], 0)
    found = {name: system_of(tmp_path, name, read_ahead_kb=kb).reading.read_ahead for name, kb in cases.items()}
    assert found == dict.fromkeys(cases, 0) | {"nfs": READ_AHEAD}


def test_where_the_read_ahead_is_found(tmp_path):
    partition = tmp_path / "sysfs/devices/nvme0n1/nvme0n1p2"
    partition.mkdir(parents=True)
    write(partition.parent / "queue/read_ahead_kb", 512)
    (tmp_path / "sysfs/dev/block").mkdir(parents=True)
    (tmp_path / "sysfs/dev/block/259:903").symlink_to(partition)
    for number, kb in enumerate([4096, 256, 8192]):  # of a numbered device, the smallest of its type
        write(tmp_path / f"sysfs/class/bdi/btrfs-{number}/read_ahead_kb", kb)
    write(tmp_path / "sysfs/class/bdi/8:901-fuseblk/read_ahead_kb", 128)
    expected = {"ext4": 512, "btrfs": 256, "fuseblk": 128}
    assert {name: system_of(tmp_path, name).read_ahead_kb for name in expected} == expected


def test_an_overlay_is_read_as_the_layer_that_has_the_file(tmp_path):
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
    for name, layer in {"weights": "nfs4", "config": "virtiofs", "new": "ext4", "changed": "ext4"}.items():
        reason = file_system_of(tmp_path / "merged" / name, mounts).reading.reason
        assert reason.startswith(f"an overlay over {layer}: "), name


def over(layers, folder, root="/"):
    """The reading of <folder>/merged/weights, with nfs4 at <folder>/lower."""
    (folder / "merged").mkdir(exist_ok=True)
    (folder / "merged/weights").touch()
    lines = (
        "1 0 0:901 / / rw - ext4 /dev/x rw",
        f"2 1 0:902 / {folder}/lower rw - nfs4 filer:/one rw",
        f"3 1 0:903 {root} {folder}/merged rw - overlay o rw,{layers}",
    )
    return file_system_of(folder / "merged/weights", parse_mountinfo("\n".join(lines))).reading


def test_how_the_kernel_writes_the_layers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cases = [
        ("lower/a:b", "lowerdir={}"),
        ("lower/a,b", "lowerdir={}"),
        ("lower", "lowerdir={}"),
        ("lower", "lowerdir+=/nowhere,lowerdir+={}"),  # since Linux 6.8
        ("lower", "lowerdir=/nowhere::{}"),  # a data-only layer
    ]
    for layer, written in cases:
        (tmp_path / layer).mkdir(parents=True, exist_ok=True)
        (tmp_path / layer / "weights").touch()
        name = str(tmp_path / layer).replace(":", r"\134:").replace(",", r"\054")
        assert over(written.format(name), tmp_path).kind == "network", written
    assert "layers can't be seen" in over("lowerdir=lower", tmp_path).reason  # relative layers are not looked for
    (tmp_path / "other/deep").mkdir(parents=True)
    (tmp_path / "other/deep/weights").touch()  # a folder of the overlay, mounted by itself
    assert "an overlay over ext4" in over(f"lowerdir={tmp_path}/other", tmp_path, root="/deep").reason
