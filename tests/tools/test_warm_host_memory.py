"""The memory that the page cache can take: samples of the layouts that occur, and a real memory cgroup."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deepseek_triton_tools.host.host_memory import CgroupMemory, read_host_memory
from deepseek_triton_tools.warming.page_cache import evict
from support.waiting import wait_for

GIB = 2**30
MIB = 2**20
NO_LIMIT_V1 = 2**63 - 4096

V2_MOUNT = "30 1 0:26 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw,nsdelegate"
V1_MOUNT = "31 30 0:31 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"


def machine(root, *, cgroup, mountinfo, groups, available=900 * GIB):
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


def v2(limit, usage=0, *, high="max", active=0, inactive=0):
    stat = f"anon {usage}\nfile {active + inactive}\nactive_anon 7\ninactive_file {inactive}\nactive_file {active}"
    return {"memory.max": limit, "memory.high": high, "memory.current": usage, "memory.stat": stat}


def v1(limit, usage=0, *, active=0, inactive=0):
    stat = f"active_file 1\ninactive_file 1\ntotal_inactive_file {inactive}\ntotal_active_file {active}"
    return {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": usage, "memory.stat": stat}


def test_own_cgroup_and_all_above_it(tmp_path):
    memory = machine(
        tmp_path / "v2",
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
    inner, outer = "/sys/fs/cgroup/machine.slice/serving.service/main", "/sys/fs/cgroup/machine.slice"
    assert memory.cgroups == (
        CgroupMemory(path=inner, version=2, limit=800 * GIB, usage=10 * GIB, file_cache=0),
        CgroupMemory(path=outer, version=2, limit=700 * GIB, usage=650 * GIB, file_cache=600 * GIB),
    )
    assert [cgroup.headroom // GIB for cgroup in memory.cgroups] == [790, 650]
    assert (memory.headroom, memory.tightest) == (650 * GIB, memory.cgroups[1])
    memory = machine(  # version 1 has totals of the groups within
        tmp_path / "v1",
        cgroup="12:pids:/a/b\n4:memory:/a/b\n1:name=systemd:/c",
        mountinfo=f"28 1 0:28 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids\n{V1_MOUNT}",
        groups={
            "pids/a/b": {"pids.max": 5},
            "memory": v1(NO_LIMIT_V1),
            "memory/a": v1(500 * GIB, 400 * GIB, active=100 * GIB, inactive=200 * GIB),
            "memory/a/b": v1(NO_LIMIT_V1, 300 * GIB),
        },
    )
    path = "/sys/fs/cgroup/memory/a"
    expected = CgroupMemory(path=path, version=1, limit=500 * GIB, usage=400 * GIB, file_cache=300 * GIB)
    assert (memory.cgroups, memory.headroom) == ((expected,), 400 * GIB)


UNIFIED = "32 30 0:32 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw"
DOCKER_V1 = "31 30 0:31 /docker/c0ffee /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory"
IN_DOCKER = {"memory": 64, "memory/inner": 1}
ELSEWHERE = "29 1 0:26 /other /sys/fs/cgroup/elsewhere rw - cgroup2 cgroup2 rw"
BOTH = "31 30 0:31 / /sys/fs/cgroup/cm rw - cgroup cgroup rw,cpuset,memory"
HYBRID, ON_V1 = f"{V1_MOUNT}\n{UNIFIED}", {"memory/a": 7, "unified/b": {"cgroup.procs": ""}}
STRANGE = {"memory.max": "?", "memory.current": "1"}
LAYOUTS = {  # the cgroup and the mounts, the limits that are there in GiB, and those that count
    "max below high": ("0::/a", V2_MOUNT, {"a": v2(4 * GIB, high=5 * GIB)}, {"a": 4}),
    "high below max": ("0::/a", V2_MOUNT, {"a": v2(9 * GIB, high=5 * GIB)}, {"a": 5}),
    "high alone": ("0::/a", V2_MOUNT, {"a": v2("max", high=5 * GIB)}, {"a": 5}),
    "not controlled": ("0::/a/b", V2_MOUNT, {"a": 6, "a/b": {"cgroup.procs": "1"}}, {"a": 6}),
    "v1 with another controller": ("4:cpuset,memory:/a", BOTH, {"cm/a": 7}, {"cm/a": 7}),
    "hybrid with memory on v1": ("4:memory:/a\n1:name=systemd:/b\n0::/b", HYBRID, ON_V1, {"memory/a": 7}),
    "hybrid with memory on v2": ("1:name=systemd:/b\n0::/b", UNIFIED, {"unified/b": 8}, {"unified/b": 8}),
    "docker on v1 sees the path of the host": ("4:memory:/docker/c0ffee", DOCKER_V1, IN_DOCKER, {"memory": 64}),
    "deeper within": ("4:memory:/docker/c0ffee/inner", DOCKER_V1, IN_DOCKER, {"memory/inner": 1, "memory": 64}),
    "the mount that has the cgroup": ("0::/a", f"{ELSEWHERE}\n{V2_MOUNT}", {"elsewhere": 1, "a": 2}, {"a": 2}),
    "as much as the machine has": ("0::/a", V2_MOUNT, {"a": 1000}, {}),
    "strange files": ("0::/a/b", V2_MOUNT, {"a": STRANGE, "a/b": {"memory.max": 5 * GIB}}, {}),
}
# A cgroup namespace, and paths that do not exist beneath the mount.
for path in ("/", "/kubepods/burstable/pod1/c0ffee", "/../../pod2/c0ffee", "/.."):
    LAYOUTS[path] = (f"0::{path}", V2_MOUNT, {".": 32}, {"": 32})


def test_the_limits_that_count(tmp_path):
    found = {}
    for number, (name, (cgroup, mountinfo, groups, _)) in enumerate(LAYOUTS.items()):
        of_version = v1 if cgroup.startswith("4:") else v2
        files = {path: of_version(group * GIB) if isinstance(group, int) else group for path, group in groups.items()}
        memory = machine(tmp_path / str(number), cgroup=cgroup, mountinfo=mountinfo, groups=files)
        found[name] = {each.path: each.limit for each in memory.cgroups}
    assert found == {
        name: {f"/sys/fs/cgroup/{path}".rstrip("/"): limit * GIB for path, limit in limits.items()}
        for name, (*_, limits) in LAYOUTS.items()
    }


def test_the_room_in_a_cgroup(tmp_path):
    without_stat = {"memory.max": 5 * GIB, "memory.current": 4 * GIB}
    cases = {
        "more in use than the limit": (v2(5 * GIB, 6 * GIB), 900, 0),
        "file pages do not count": (v2(64 * GIB, 60 * GIB, active=50 * GIB), 900, 54),
        "without a memory.stat": (without_stat, 900, 1),
        "the machine has less": (v2(50 * GIB), 20, 20),
    }
    for number, (name, (files, available, room)) in enumerate(cases.items()):
        root = tmp_path / str(number)
        memory = machine(root, cgroup="0::/a", mountinfo=V2_MOUNT, groups={"a": files}, available=available * GIB)
        assert (memory.headroom, memory.tightest is None) == (room * GIB, "machine" in name), name


def test_this_machine_and_one_without_cgroups(tmp_path):
    memory = read_host_memory()
    assert 0 < memory.available <= memory.total
    assert 0 <= memory.headroom <= memory.available
    with pytest.raises(FileNotFoundError):  # a machine that does not say what memory it has
        read_host_memory(tmp_path)
    memory = machine(tmp_path, cgroup="", mountinfo="1 0 8:1 / / rw - ext4 /dev/sda1 rw", groups={})
    assert (memory.total, memory.available, memory.headroom) == (1000 * GIB, 900 * GIB, 900 * GIB)
    assert (memory.cgroups, memory.tightest) == ((), None)


# --- a real cgroup

LIMIT = 64 * MIB
IN_IT = """
import json, os, sys
from deepseek_triton_tools.host.host_memory import read_host_memory
with open(sys.argv[1], "rb", buffering=0) as file, open(os.devnull, "wb") as nowhere:
    for line in sys.stdin:
        memory = read_host_memory()
        own = memory.tightest
        print(json.dumps([memory.headroom, own.path, own.limit, own.usage, own.file_cache]), flush=True)
        while os.sendfile(nowhere.fileno(), file.fileno(), None, 2**21):
            pass
"""


@pytest.fixture
def real_cgroup():
    """A new memory cgroup with a limit of LIMIT bytes, empty."""
    for limit in ("memory/{}/memory.limit_in_bytes", "{}/memory.max"):
        path = Path("/sys/fs/cgroup", limit.format(f"warm-test-{os.getpid()}"))
        with contextlib.suppress(OSError):
            path.parent.mkdir()
            path.write_text(str(LIMIT))
            break
    else:
        pytest.skip("no memory cgroup can be made here")
    yield path.parent
    wait_for(lambda: removed(path.parent))


def removed(folder):
    with contextlib.suppress(OSError):  # busy for a moment after its last process
        folder.rmdir()
    return not folder.exists()


@pytest.mark.slow
def test_a_process_in_a_real_cgroup_reads_its_headroom_which_file_pages_do_not_lessen(real_cgroup, tmp_path):
    weights = tmp_path / "weights"
    weights.write_bytes(bytes(2 * LIMIT))
    if evict(weights):
        pytest.skip("nothing can be evicted here: its pages belong to another cgroup")
    command = ["sh", "-c", f'echo $$ > "{real_cgroup}/cgroup.procs" && exec "$@"', "sh", sys.executable, "-c", IN_IT]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([*command, weights], **pipes) as child:

        def tell():
            child.stdin.write("\n")
            child.stdin.flush()
            return json.loads(child.stdout.readline())

        before, path, limit, usage, _ = tell()
        # The kernel gathers memory.stat about every two seconds.
        after = wait_for(lambda: told[0] if (told := tell())[-1] > LIMIT // 2 else None)
        child.stdin.close()
    assert (child.returncode, path, limit) == (0, str(real_cgroup), LIMIT)
    assert 0 < usage < LIMIT
    assert 0 < before <= LIMIT
    assert after > before - 8 * MIB
