"""Page cache residency of real files."""

import ctypes
import errno
import os
import re
import tempfile
import tracemalloc
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from deepseek_triton_tools.warming import page_cache
from deepseek_triton_tools.warming.page_cache import PAGE_SIZE, WINDOW, ResidentFile, evict
from support.mounting import NOBODY, as_nobody, mounted, overlay
from support.page_cache import resident_bytes

SIZE = 20 * PAGE_SIZE + 100
CLONE_NEWUSER = 0x10000000
PR_SET_DUMPABLE = 4


@pytest.fixture(params=["cachestat", "mincore"])
def folder(request):
    """A folder on a disk or on an overlay, for which different system calls answer; every user may enter it."""
    with tempfile.TemporaryDirectory() as path:
        os.chmod(path, 0o755)
        if request.param == "mincore":
            with overlay(Path(path)) as (_, merged):
                yield merged
        else:
            yield Path(path)


@pytest.fixture
def cold(folder):
    return cold_file(folder / "weights")


def cold_file(path, size=SIZE):
    path.write_bytes(os.urandom(size))
    if evict(path):
        pytest.skip("nothing can be evicted here: the files lie in memory")
    return path


def read_pages(path, pages):
    """Read these pages and no others, without the kernel's read-ahead."""
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        for page in pages:
            os.pread(file.fileno(), 1, page * PAGE_SIZE)


def expected(pages, begin, end):
    """Bytes of the range that lie in those pages."""
    end = min(end, SIZE)
    return sum(max(0, min(end, (page + 1) * PAGE_SIZE) - max(begin, page * PAGE_SIZE)) for page in pages)


def test_a_cold_file_a_read_one_and_an_empty_one(cold, tmp_path):
    with closing(ResidentFile(cold)) as file:
        if cold.parent.name == "overlay":
            assert file.method == "mincore"
        else:
            assert file.method == "cachestat" or os.uname().release < "6.5"
    before = os.listdir("/proc/self/fd")
    assert resident_bytes(cold) == 0
    cold.read_bytes()
    assert resident_bytes(cold) == SIZE
    assert os.listdir("/proc/self/fd") == before
    with closing(ResidentFile(cold)) as file:
        os.truncate(cold, PAGE_SIZE + 7)
        assert [file.resident(), file.resident(0, SIZE)] == [PAGE_SIZE + 7] * 2
        assert file.resident(2 * PAGE_SIZE, PAGE_SIZE) == 0
    with cold.open("rb") as file:  # pages beyond the end can be mapped, and are not there
        address = page_cache.map_file(file.fileno(), 2**30, PAGE_SIZE)
    assert page_cache.count_core_pages(address, PAGE_SIZE) == 0
    page_cache.unmap(address, PAGE_SIZE)
    cold.write_bytes(os.urandom(SIZE))  # just written
    assert resident_bytes(cold) == SIZE
    assert (evict(cold), resident_bytes(cold)) == (0, 0)
    cold.write_bytes(b"")
    assert resident_bytes(cold) == 0
    os.mkfifo(tmp_path / "pipe")  # does not block
    assert (resident_bytes(tmp_path / "pipe"), resident_bytes(tmp_path)) == (None, None)
    for ask in (ResidentFile, evict):
        with pytest.raises(FileNotFoundError):
            ask(tmp_path / "missing")


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(pages=st.sets(st.integers(0, 20)), begin=st.integers(0, SIZE + 10), length=st.integers(0, SIZE + 10))
@example(pages={0}, begin=PAGE_SIZE // 2, length=PAGE_SIZE)
def test_bytes_are_counted_though_the_kernel_counts_pages(cold, pages, begin, length):
    evict(cold)
    read_pages(cold, pages)
    with closing(ResidentFile(cold)) as file:
        assert file.resident() == expected(pages, 0, SIZE)
        assert file.resident(begin) == expected(pages, begin, SIZE)
        assert file.resident(begin, length) == expected(pages, begin, begin + length)


def test_a_large_sparse_file_needs_no_large_buffer(folder):
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


@pytest.mark.slow
def test_the_residency_of_another_users_file_is_unknown(cold):
    cold.read_bytes()
    cold.chmod(0o644)

    def ask():
        with closing(ResidentFile(cold)) as file:
            return [os.geteuid(), file.method, file.resident()]

    assert as_nobody(ask)[0] == NOBODY
    if linux_tells_every_user(cold):  # cachestat did before about 6.17
        pytest.skip("this kernel's cachestat tells everybody")
    assert as_nobody(ask)[1:] == [None, None]
    assert as_nobody(lambda: evict(cold)) is None


def linux_tells_every_user(path):
    def ask():
        with path.open("rb") as file:
            try:
                return page_cache.count_cached_pages(file.fileno(), 0, 1) > 0
            except OSError:
                return False

    return bool(as_nobody(ask))


def test_mincore_is_not_believed_about_another_users_file(cold, monkeypatch):
    without_cachestat(monkeypatch)
    cold.chmod(0o644)

    def ask():
        fd = os.open(cold, os.O_RDONLY)
        address = page_cache.map_file(fd, 0, PAGE_SIZE)
        with closing(ResidentFile(cold)) as file:
            return [page_cache.count_core_pages(address, PAGE_SIZE), file.method, file.resident()]

    assert as_nobody(ask) == [1, None, None]  # 1: the kernel's lie


def test_the_residency_of_an_owned_or_writable_file_is_known(cold):
    cold.read_bytes()
    cold.chmod(0o666)
    assert as_nobody(lambda: resident_bytes(cold)) == SIZE
    cold.chmod(0o600)
    os.chown(cold, NOBODY, NOBODY)
    assert as_nobody(lambda: resident_bytes(cold)) == SIZE


def test_root_of_a_user_namespace_does_not_own_the_files_of_the_host(cold):
    cold.chmod(0o644)

    def become_root():
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1)  # a change of user took away its own /proc/self
        assert can_unshare()
        Path("/proc/self/uid_map").write_text(f"0 {NOBODY} 1")

    def ask():
        with closing(ResidentFile(cold)) as file:
            return [os.geteuid(), file.method]

    if not Path("/proc/self/ns/user").exists() or not as_nobody(can_unshare):
        pytest.skip("no user namespaces here")
    if linux_tells_every_user(cold):
        pytest.skip("this kernel's cachestat tells everybody")
    assert as_nobody(ask, prepare=become_root) == [0, None]


def can_unshare():
    return bool(ctypes.CDLL(None).unshare(CLONE_NEWUSER) == 0)


def without_cachestat(monkeypatch, code=errno.ENOSYS):
    def refuse(fd, offset, length):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(page_cache, "count_cached_pages", refuse)


def test_mincore_where_the_kernel_or_a_filter_refuses_cachestat(cold, monkeypatch):
    read_pages(cold, {3, 20})
    for code in (errno.ENOSYS, errno.EPERM):
        without_cachestat(monkeypatch, code)
        with closing(ResidentFile(cold)) as file:
            assert (file.method, file.resident()) == ("mincore", PAGE_SIZE + 100)


def test_evicting_through_an_overlay_drops_the_pages_of_the_file_beneath(tmp_path):
    with overlay(tmp_path) as (lower, merged):
        cold_file(lower / "weights").read_bytes()
        assert resident_bytes(merged / "weights") == SIZE
        assert evict(merged / "weights") == 0
        assert resident_bytes(lower / "weights") == 0


def test_locked_pages_stay(cold):
    cold.read_bytes()
    with cold.open("rb") as file:
        address = page_cache.map_file(file.fileno(), PAGE_SIZE, 4 * PAGE_SIZE)
    page_cache.lock(address, 4 * PAGE_SIZE)
    locked_left = evict(cold)
    page_cache.unmap(address, 4 * PAGE_SIZE)
    assert locked_left == 4 * PAGE_SIZE
    assert evict(cold) == 0


def test_evicting_where_nothing_is_ever_written(tmp_path):
    with open("/proc/version") as file, pytest.raises(OSError, match="Invalid argument"):
        os.fdatasync(file.fileno())  # as on squashfs
    version = Path("/proc/version")
    assert evict(version) == (0 if version.stat().st_uid == os.geteuid() else None)
    with mounted("-t", "tmpfs", "tmpfs", on=tmp_path / "memory") as memory:  # files in memory stay
        (memory / "weights").write_bytes(bytes(SIZE))
        assert evict(memory / "weights") == SIZE


def test_a_refused_system_call_is_an_error_with_its_number():
    calls = [
        (lambda: page_cache.count_core_pages(0, PAGE_SIZE), errno.ENOMEM),
        (lambda: page_cache.map_file(-1, 0, PAGE_SIZE), errno.EBADF),
        (lambda: page_cache.unmap(1, PAGE_SIZE), errno.EINVAL),
        (lambda: page_cache.lock(0, PAGE_SIZE), errno.ENOMEM),
        (lambda: page_cache.file_system_magic(-1), errno.EBADF),
    ]
    for call, code in calls:
        with pytest.raises(OSError, match=re.escape(f"[Errno {code}]")):
            call()
