"""Page cache residency of real files."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepseek_triton_tools.warming.pagecache import linux
from deepseek_triton_tools.warming.pagecache.linux import PAGE_SIZE
from deepseek_triton_tools.warming.pagecache.residency import WINDOW, ResidentFile, evict
from support.mounting import NOBODY, as_nobody, mounted, overlay
from support.page_cache import resident_bytes

pytestmark = pytest.mark.slow

SIZE = 20 * PAGE_SIZE + 100
CLONE_NEWUSER = 0x10000000
PR_SET_DUMPABLE = 4


@pytest.fixture(params=["cachestat", "mincore"])
def folder(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A folder on a disk or on an overlay, for which different system calls answer; every user may enter it."""
    with tempfile.TemporaryDirectory() as path:
        os.chmod(path, 0o755)
        if request.param == "mincore":
            with overlay(Path(path)) as (_, merged):
                yield merged
        else:
            yield Path(path)


@pytest.fixture
def cold(folder: Path) -> Path:
    return cold_file(folder / "weights")


def cold_file(path: Path, size: int = SIZE) -> Path:
    path.write_bytes(os.urandom(size))
    if evict(path):
        pytest.skip("nothing can be evicted here: the files lie in memory")
    return path


def read_pages(path: Path, pages: set[int]) -> None:
    """Read these pages and no others, without the kernel's read-ahead."""
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        for page in pages:
            os.pread(file.fileno(), 1, page * PAGE_SIZE)


def expected(pages: set[int], begin: int, end: int) -> int:
    """Bytes of the range that lie in those pages."""
    end = min(end, SIZE)
    return sum(max(0, min(end, (page + 1) * PAGE_SIZE) - max(begin, page * PAGE_SIZE)) for page in pages)


def test_nothing_of_a_cold_file_is_there(cold: Path) -> None:
    assert resident_bytes(cold) == 0


def test_all_of_a_file_that_was_read_is_there(cold: Path) -> None:
    cold.read_bytes()

    assert resident_bytes(cold) == SIZE


def test_the_method_follows_the_file_system(cold: Path) -> None:
    with contextlib.closing(ResidentFile(cold)) as file:
        if cold.parent.name == "overlay":
            assert file.method == "mincore"
        else:
            assert file.method == "cachestat" or os.uname().release < "6.5"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(pages=st.sets(st.integers(0, 20)), begin=st.integers(0, SIZE + 10), length=st.integers(0, SIZE + 10))
def test_bytes_are_counted_though_the_kernel_counts_pages(cold: Path, pages: set[int], begin: int, length: int) -> None:
    evict(cold)
    read_pages(cold, pages)

    with contextlib.closing(ResidentFile(cold)) as file:
        assert file.resident() == expected(pages, 0, SIZE)
        assert file.resident(begin) == expected(pages, begin, SIZE)
        assert file.resident(begin, length) == expected(pages, begin, begin + length)


def test_a_part_of_two_pages_is_not_whole_when_only_one_is_there(cold: Path) -> None:
    read_pages(cold, {0})

    with contextlib.closing(ResidentFile(cold)) as file:
        assert file.resident(PAGE_SIZE // 2, PAGE_SIZE) == PAGE_SIZE // 2


def test_an_empty_file(folder: Path) -> None:
    (folder / "empty").touch()

    assert resident_bytes(folder / "empty") == 0


def test_a_file_that_became_shorter(cold: Path) -> None:
    cold.read_bytes()
    with contextlib.closing(ResidentFile(cold)) as file:
        os.truncate(cold, PAGE_SIZE + 7)

        assert file.resident() == PAGE_SIZE + 7
        assert file.resident(0, SIZE) == PAGE_SIZE + 7
        assert file.resident(2 * PAGE_SIZE, PAGE_SIZE) == 0


def test_a_large_sparse_file_needs_no_large_buffer(folder: Path) -> None:
    size = 2**32 + 5
    path = folder / "sparse"
    with path.open("wb") as sparse:
        sparse.truncate(size)
    read_pages(path, {0, WINDOW // PAGE_SIZE, size // PAGE_SIZE})
    tracemalloc.start()
    try:
        resident = resident_bytes(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert resident == 2 * PAGE_SIZE + 5
    assert peak < 2**18


def test_the_residency_of_another_users_file_is_unknown(cold: Path) -> None:
    cold.read_bytes()
    cold.chmod(0o644)

    def ask() -> list[object]:
        with contextlib.closing(ResidentFile(cold)) as file:
            return [os.geteuid(), file.method, file.resident()]

    assert as_nobody(ask)[0] == NOBODY
    if linux_tells_every_user(cold):  # cachestat did before about 6.17
        pytest.skip("this kernel's cachestat tells everybody")
    assert as_nobody(ask)[1:] == [None, None]
    assert as_nobody(lambda: evict(cold)) is None


def linux_tells_every_user(path: Path) -> bool:
    def ask() -> bool:
        with path.open("rb") as file:
            try:
                return linux.count_cached_pages(file.fileno(), 0, 1) > 0
            except OSError:
                return False

    return bool(as_nobody(ask))


def test_mincore_is_not_believed_about_another_users_file(cold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_cachestat(monkeypatch)
    cold.chmod(0o644)

    def ask() -> list[object]:
        fd = os.open(cold, os.O_RDONLY)
        address = linux.map_file(fd, 0, PAGE_SIZE)
        with contextlib.closing(ResidentFile(cold)) as file:
            return [linux.count_core_pages(address, PAGE_SIZE), file.method, file.resident()]

    assert as_nobody(ask) == [1, None, None]  # 1: the kernel's lie


@pytest.mark.parametrize("make_known", [lambda path: os.chown(path, NOBODY, NOBODY), lambda path: path.chmod(0o666)])
def test_the_residency_of_an_owned_or_writable_file_is_known(cold: Path, make_known: Callable[[Path], None]) -> None:
    if os.geteuid():
        pytest.skip("only root gives files away")
    make_known(cold)
    cold.read_bytes()

    assert as_nobody(lambda: resident_bytes(cold)) == SIZE


def test_root_of_a_user_namespace_does_not_own_the_files_of_the_host(cold: Path) -> None:
    cold.chmod(0o644)

    def become_root() -> None:
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1)  # a change of user took away its own /proc/self
        assert can_unshare()
        Path("/proc/self/uid_map").write_text(f"0 {NOBODY} 1")

    def ask() -> list[object]:
        with contextlib.closing(ResidentFile(cold)) as file:
            return [os.geteuid(), file.method]

    if not Path("/proc/self/ns/user").exists() or not as_nobody(can_unshare):
        pytest.skip("no user namespaces here")
    if linux_tells_every_user(cold):
        pytest.skip("this kernel's cachestat tells everybody")
    assert as_nobody(ask, prepare=become_root) == [0, None]


def can_unshare() -> bool:
    return bool(ctypes.CDLL(None).unshare(CLONE_NEWUSER) == 0)


def without_cachestat(monkeypatch: pytest.MonkeyPatch, code: int = errno.ENOSYS) -> None:
    def refuse(fd: int, offset: int, length: int) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(linux, "count_cached_pages", refuse)


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EPERM])
def test_mincore_where_the_kernel_or_a_filter_refuses_cachestat(
    cold: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    without_cachestat(monkeypatch, code)
    read_pages(cold, {3, 20})

    with contextlib.closing(ResidentFile(cold)) as file:
        assert file.method == "mincore"
        assert file.resident() == PAGE_SIZE + 100


def test_a_pipe_in_the_place_of_a_file_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")

    assert resident_bytes(tmp_path / "pipe") is None
    assert resident_bytes(tmp_path) is None


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        ResidentFile(tmp_path / "missing")
    with pytest.raises(FileNotFoundError):
        evict(tmp_path / "missing")


def test_no_file_stays_open(cold: Path) -> None:
    before = os.listdir("/proc/self/fd")
    resident_bytes(cold)
    evict(cold)

    assert os.listdir("/proc/self/fd") == before


def test_evicting_a_file_that_was_just_written(folder: Path) -> None:
    (folder / "dirty").write_bytes(os.urandom(SIZE))
    assert resident_bytes(folder / "dirty") == SIZE

    assert evict(folder / "dirty") == 0
    assert resident_bytes(folder / "dirty") == 0


def test_evicting_through_an_overlay_drops_the_pages_of_the_file_beneath(tmp_path: Path) -> None:
    with overlay(tmp_path) as (lower, merged):
        cold_file(lower / "weights").read_bytes()
        assert resident_bytes(merged / "weights") == SIZE

        assert evict(merged / "weights") == 0
        assert resident_bytes(lower / "weights") == 0


def test_locked_pages_stay(cold: Path) -> None:
    cold.read_bytes()
    with cold.open("rb") as file:
        address = linux.map_file(file.fileno(), PAGE_SIZE, 4 * PAGE_SIZE)
    linux.lock(address, 4 * PAGE_SIZE)
    locked_left = evict(cold)
    linux.unmap(address, 4 * PAGE_SIZE)

    assert locked_left == 4 * PAGE_SIZE
    assert evict(cold) == 0


def test_files_in_memory_can_not_be_evicted(tmp_path: Path) -> None:
    with mounted("-t", "tmpfs", "tmpfs", on=tmp_path / "memory") as memory:
        (memory / "weights").write_bytes(bytes(SIZE))

        assert evict(memory / "weights") == SIZE


def test_evicting_where_nothing_is_ever_written() -> None:
    with open("/proc/version") as file, pytest.raises(OSError, match="Invalid argument"):
        os.fdatasync(file.fileno())  # as on squashfs

    assert evict(Path("/proc/version")) == (None if os.geteuid() else 0)


def test_a_refused_system_call_is_an_error_with_its_number() -> None:
    calls: list[tuple[Callable[[], object], int]] = [
        (lambda: linux.count_core_pages(0, PAGE_SIZE), errno.ENOMEM),
        (lambda: linux.map_file(-1, 0, PAGE_SIZE), errno.EBADF),
        (lambda: linux.unmap(1, PAGE_SIZE), errno.EINVAL),
        (lambda: linux.lock(0, PAGE_SIZE), errno.ENOMEM),
        (lambda: linux.file_system_magic(-1), errno.EBADF),
    ]
    for call, code in calls:
        with pytest.raises(OSError, match=re.escape(f"[Errno {code}]")):
            call()


def test_pages_beyond_the_end_can_be_mapped_and_are_not_there(cold: Path) -> None:
    cold.read_bytes()
    with closing(cold.open("rb")) as file:
        address = linux.map_file(file.fileno(), 2**30, PAGE_SIZE)

    assert linux.count_core_pages(address, PAGE_SIZE) == 0
    linux.unmap(address, PAGE_SIZE)
