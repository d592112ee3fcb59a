"""The memory that the page cache can take: samples of the layouts that occur, and a real memory cgroup."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from deepseek_triton_tools.host.host_memory import CgroupMemory, HostMemory, read_host_memory
from deepseek_triton_tools.warming.pagecache.residency import evict

GIB = 2**30
MIB = 2**20
NO_LIMIT_V1 = 2**63 - 4096

V2_MOUNT = "30 1 0:26 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw,nsdelegate"
V1_MOUNT = "31 30 0:31 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"


def machine(
    root: Path, *, cgroup: str, mountinfo: str, groups: Mapping[str, Mapping[str, object]], available: int = 900 * GIB
) -> HostMemory:
    """The memory read on a machine of 1000 GiB with these files; `groups` are below /sys/fs/cgroup."""
    meminfo = (
        f"MemTotal: {1000 * GIB // 1024} kB\nMemFree:  5 kB\nMemAvailable: {available // 1024} kB\nHugePages_Total: 0\n"
    )
    files = {"proc/meminfo": meminfo, "proc/self/cgroup": cgroup + "\n", "proc/self/mountinfo": mountinfo + "\n"}
    for folder, contents in groups.items():
        files |= {f"sys/fs/cgroup/{folder}/{name}": f"{value}\n" for name, value in contents.items()}
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return read_host_memory(root)


def v2(limit: object, usage: int = 0, *, high: object = "max", active: int = 0, inactive: int = 0) -> dict[str, object]:
    stat = f"anon {usage}\nfile {active + inactive}\nactive_anon 7\ninactive_file {inactive}\nactive_file {active}"
    return {"memory.max": limit, "memory.high": high, "memory.current": usage, "memory.stat": stat}


def v1(limit: int, usage: int = 0, *, active: int = 0, inactive: int = 0) -> dict[str, object]:
    stat = f"active_file 1\ninactive_file 1\ntotal_inactive_file {inactive}\ntotal_active_file {active}"
    return {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": usage, "memory.stat": stat}


def limits(memory: HostMemory) -> dict[str, int]:
    return {cgroup.path: cgroup.limit for cgroup in memory.cgroups}


def test_a_machine_without_cgroups(tmp_path: Path) -> None:
    memory = machine(tmp_path, cgroup="", mountinfo="1 0 8:1 / / rw - ext4 /dev/sda1 rw", groups={})

    assert (memory.total, memory.available, memory.headroom) == (1000 * GIB, 900 * GIB, 900 * GIB)
    assert (memory.cgroups, memory.tightest) == ((), None)


def test_v2_own_cgroup_and_all_above_it(tmp_path: Path) -> None:
    memory = machine(
        tmp_path,
        cgroup="0::/machine.slice/serving.service/main",
        mountinfo=V2_MOUNT,
        groups={
            ".": {"cgroup.procs": ""},  # the root has no limit
            "machine.slice": v2(700 * GIB, 650 * GIB, active=20 * GIB, inactive=580 * GIB),
            "machine.slice/serving.service": v2("max", 10 * GIB),
            "machine.slice/serving.service/main": v2(800 * GIB, 10 * GIB),
            "machine.slice/neighbour": v2(1 * GIB),
        },
    )

    assert memory.cgroups == (
        CgroupMemory(
            path="/sys/fs/cgroup/machine.slice/serving.service/main",
            version=2,
            limit=800 * GIB,
            usage=10 * GIB,
            file_cache=0,
        ),
        CgroupMemory(
            path="/sys/fs/cgroup/machine.slice",
            version=2,
            limit=700 * GIB,
            usage=650 * GIB,
            file_cache=600 * GIB,
        ),
    )
    assert memory.headroom == 650 * GIB
    assert memory.tightest == memory.cgroups[1]


@pytest.mark.parametrize(
    ("limit", "high", "expected"),
    [("max", 5 * GIB, 5), (9 * GIB, 5 * GIB, 5), (4 * GIB, 5 * GIB, 4), (3 * GIB, "max", 3)],
)
def test_v2_the_lower_one_of_max_and_high_counts(tmp_path: Path, limit: object, high: object, expected: int) -> None:
    memory = machine(tmp_path, cgroup="0::/a", mountinfo=V2_MOUNT, groups={"a": v2(limit, high=high)})

    assert limits(memory) == {"/sys/fs/cgroup/a": expected * GIB}


def test_v2_a_cgroup_whose_memory_is_not_controlled(tmp_path: Path) -> None:
    groups = {"a": v2(6 * GIB), "a/b": {"cgroup.procs": "1"}}
    memory = machine(tmp_path, cgroup="0::/a/b", mountinfo=V2_MOUNT, groups=groups)

    assert limits(memory) == {"/sys/fs/cgroup/a": 6 * GIB}


def test_v1_with_totals_of_the_groups_within(tmp_path: Path) -> None:
    memory = machine(
        tmp_path,
        cgroup="12:pids:/a/b\n4:memory:/a/b\n1:name=systemd:/c",
        mountinfo=f"28 1 0:28 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids\n{V1_MOUNT}",
        groups={
            "pids/a/b": {"pids.max": 5},
            "memory": v1(NO_LIMIT_V1),
            "memory/a": v1(500 * GIB, 400 * GIB, active=100 * GIB, inactive=200 * GIB),
            "memory/a/b": v1(NO_LIMIT_V1, 300 * GIB),
        },
    )

    assert memory.cgroups == (
        CgroupMemory(
            path="/sys/fs/cgroup/memory/a",
            version=1,
            limit=500 * GIB,
            usage=400 * GIB,
            file_cache=300 * GIB,
        ),
    )
    assert memory.headroom == 400 * GIB


def test_v1_together_with_another_controller(tmp_path: Path) -> None:
    memory = machine(
        tmp_path,
        cgroup="4:cpuset,memory:/a",
        mountinfo="31 30 0:31 / /sys/fs/cgroup/cm rw - cgroup cgroup rw,cpuset,memory",
        groups={"cm/a": v1(7 * GIB)},
    )

    assert limits(memory) == {"/sys/fs/cgroup/cm/a": 7 * GIB}


def test_hybrid_with_memory_on_v1(tmp_path: Path) -> None:
    memory = machine(
        tmp_path,
        cgroup="4:memory:/a\n1:name=systemd:/b\n0::/b",
        mountinfo=f"{V1_MOUNT}\n32 30 0:32 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw",
        groups={"memory/a": v1(7 * GIB), "unified/b": {"cgroup.procs": ""}},
    )

    assert limits(memory) == {"/sys/fs/cgroup/memory/a": 7 * GIB}


def test_hybrid_with_memory_on_v2(tmp_path: Path) -> None:
    memory = machine(
        tmp_path,
        cgroup="1:name=systemd:/b\n0::/b",
        mountinfo="32 30 0:32 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw",
        groups={"unified/b": v2(8 * GIB)},
    )

    assert limits(memory) == {"/sys/fs/cgroup/unified/b": 8 * GIB}


def test_a_container_with_a_cgroup_namespace(tmp_path: Path) -> None:
    memory = machine(tmp_path, cgroup="0::/", mountinfo=V2_MOUNT, groups={".": v2(64 * GIB, 60 * GIB, active=50 * GIB)})

    assert limits(memory) == {"/sys/fs/cgroup": 64 * GIB}
    assert memory.headroom == 54 * GIB


def test_a_docker_container_on_v1_that_sees_the_path_of_the_host(tmp_path: Path) -> None:
    memory = machine(
        tmp_path,
        cgroup="4:memory:/docker/c0ffee",
        mountinfo="31 30 0:31 /docker/c0ffee /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory",
        groups={"memory": v1(64 * GIB), "memory/inner": v1(1 * GIB)},
    )

    assert limits(memory) == {"/sys/fs/cgroup/memory": 64 * GIB}


def test_a_process_deeper_within_such_a_container(tmp_path: Path) -> None:
    memory = machine(
        tmp_path,
        cgroup="4:memory:/docker/c0ffee/inner",
        mountinfo="31 30 0:31 /docker/c0ffee /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory",
        groups={"memory": v1(64 * GIB), "memory/inner": v1(1 * GIB)},
    )

    assert limits(memory) == {"/sys/fs/cgroup/memory/inner": 1 * GIB, "/sys/fs/cgroup/memory": 64 * GIB}


@pytest.mark.parametrize("path", ["/kubepods/burstable/pod1/c0ffee", "/../../pod2/c0ffee", "/.."])
def test_a_path_that_does_not_exist_beneath_the_mount(tmp_path: Path, path: str) -> None:
    groups = {".": v2(32 * GIB)}
    memory = machine(tmp_path, cgroup=f"0::{path}", mountinfo=V2_MOUNT, groups=groups)

    assert limits(memory) == {"/sys/fs/cgroup": 32 * GIB}


def test_kubernetes_as_a_node_sees_it(tmp_path: Path) -> None:
    pod = "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1.slice"
    memory = machine(
        tmp_path,
        cgroup=f"0::/{pod}/cri-containerd-c0ffee.scope",
        mountinfo=V2_MOUNT,
        groups={
            "kubepods.slice": v2(990 * GIB, 300 * GIB, inactive=200 * GIB),
            "kubepods.slice/kubepods-burstable.slice": v2("max", 300 * GIB),
            pod: v2(750 * GIB, 120 * GIB, inactive=20 * GIB),
            f"{pod}/cri-containerd-c0ffee.scope": v2(700 * GIB, 60 * GIB, inactive=20 * GIB),
        },
    )

    assert [cgroup.limit // GIB for cgroup in memory.cgroups] == [700, 750, 990]
    assert [cgroup.headroom // GIB for cgroup in memory.cgroups] == [660, 650, 890]
    assert memory.tightest == memory.cgroups[1]


def test_the_mount_that_has_the_cgroup_is_taken_where_there_are_several(tmp_path: Path) -> None:
    memory = machine(
        tmp_path,
        cgroup="0::/a",
        mountinfo=f"29 1 0:26 /other /sys/fs/cgroup/elsewhere rw - cgroup2 cgroup2 rw\n{V2_MOUNT}",
        groups={"elsewhere": v2(1 * GIB), "a": v2(2 * GIB)},
    )

    assert limits(memory) == {"/sys/fs/cgroup/a": 2 * GIB}


def test_a_limit_above_the_machines_memory_is_no_limit(tmp_path: Path) -> None:
    memory = machine(tmp_path, cgroup="0::/a", mountinfo=V2_MOUNT, groups={"a": v2(1000 * GIB, 999 * GIB)})

    assert memory.cgroups == ()


def test_more_in_use_than_the_limit_leaves_nothing(tmp_path: Path) -> None:
    memory = machine(tmp_path, cgroup="0::/a", mountinfo=V2_MOUNT, groups={"a": v2(5 * GIB, 6 * GIB)})

    assert memory.headroom == 0


def test_the_machine_decides_when_it_has_less_than_the_cgroup(tmp_path: Path) -> None:
    memory = machine(tmp_path, cgroup="0::/a", mountinfo=V2_MOUNT, groups={"a": v2(50 * GIB)}, available=20 * GIB)

    assert (memory.headroom, memory.tightest) == (20 * GIB, None)


def test_files_that_are_missing_or_strange_are_no_limit(tmp_path: Path) -> None:
    groups = {"a": {"memory.max": "?", "memory.current": "1"}, "a/b": {"memory.max": 5 * GIB}}
    memory = machine(tmp_path, cgroup="0::/a/b", mountinfo=V2_MOUNT, groups=groups)

    assert memory.cgroups == ()


def test_without_a_memory_stat_nothing_counts_as_file_cache(tmp_path: Path) -> None:
    groups = {"a": {"memory.max": 5 * GIB, "memory.current": 4 * GIB}}
    memory = machine(tmp_path, cgroup="0::/a", mountinfo=V2_MOUNT, groups=groups)

    assert memory.headroom == GIB


def test_a_machine_that_does_not_say_what_memory_it_has(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_host_memory(tmp_path)


def test_this_machine() -> None:
    memory = read_host_memory()

    assert 0 < memory.available <= memory.total
    assert 0 <= memory.headroom <= memory.available


# --- a real cgroup

LIMIT = 64 * MIB
IN_IT = """
import json, os, sys
from pathlib import Path
from deepseek_triton_tools.host.host_memory import read_host_memory

def tell():
    memory = read_host_memory()
    own = memory.tightest
    print(json.dumps([memory.headroom, own and [own.path, own.limit, own.usage, own.file_cache]]), flush=True)

tell()
with open(sys.argv[1], "rb", buffering=0) as file, open(os.devnull, "wb") as nowhere:
    while os.sendfile(nowhere.fileno(), file.fileno(), None, 2**21):
        pass
for line in sys.stdin:
    tell()
"""


@pytest.fixture
def real_cgroup() -> Iterator[Path]:
    """A new memory cgroup with a limit of LIMIT bytes, empty."""
    name = f"warm-test-{os.getpid()}"
    places = {"/sys/fs/cgroup/memory": "memory.limit_in_bytes", "/sys/fs/cgroup": "memory.max"}
    for place, limit in places.items():
        folder = Path(place, name)
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            if (folder / limit).exists():
                (folder / limit).write_text(str(LIMIT))
                yield folder
                return
        finally:
            remove(folder)
    pytest.skip("no memory cgroup can be made here")


def remove(folder: Path) -> None:
    for _ in range(100):
        with contextlib.suppress(OSError):  # busy for a moment after its last process
            folder.rmdir()
            return
        time.sleep(0.05)
    folder.rmdir()


def test_a_process_in_a_real_cgroup_reads_its_headroom_which_file_pages_do_not_lessen(
    real_cgroup: Path, tmp_path: Path
) -> None:
    weights = tmp_path / "weights"
    weights.write_bytes(bytes(2 * LIMIT))
    if evict(weights):
        pytest.skip("nothing can be evicted here: its pages belong to another cgroup")
    command = ["sh", "-c", f'echo $$ > "{real_cgroup}/cgroup.procs" && exec "$@"', "sh"]
    child = subprocess.Popen(
        [*command, sys.executable, "-c", IN_IT, weights], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with child:
        assert child.stdin
        assert child.stdout
        before, (path, limit, usage, _) = json.loads(child.stdout.readline())
        after, file_cache = before, 0
        for _ in range(50):  # the kernel gathers memory.stat about every two seconds
            child.stdin.write("\n")
            child.stdin.flush()
            after, (_, _, _, file_cache) = json.loads(child.stdout.readline())
            if file_cache > LIMIT // 2:
                break
            time.sleep(0.1)
        child.stdin.close()

    assert child.returncode == 0
    assert (path, limit) == (str(real_cgroup), LIMIT)
    assert 0 < usage < LIMIT
    assert 0 < before <= LIMIT
    assert file_cache > LIMIT // 2
    assert after > before - 8 * MIB
