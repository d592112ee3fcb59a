"""Holding files in the page cache: by locking, by watching, and where neither is possible."""

import contextlib
import queue
import resource
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from deepseek_triton_tools.cli.main import main
from deepseek_triton_tools.host.host_memory import HostMemory
from deepseek_triton_tools.tool_errors import LockError
from deepseek_triton_tools.warming import WarmOptions, take_survey, warm
from deepseek_triton_tools.warming.hold import LockedFiles, allow_locking, check_hold, evict_all, hold
from deepseek_triton_tools.warming.page_cache import evict
from support.cached_checkpoint import write_checkpoint
from support.page_cache import on_uncached, resident_bytes

PATIENCE_S = 60
PERIOD_S = 0.02


@pytest.fixture
def survey(tmp_path):
    write_checkpoint(tmp_path / "R1")
    survey = take_survey([str(tmp_path / "R1")])
    warm(survey)
    if survey.files[0].residency_method is None:
        pytest.skip("the kernel does not say what is resident here")
    return survey


@contextlib.contextmanager
def holding(survey, mode, after_each=lambda: None):
    """A hold in a thread; the block gets what returns its next state that fits a question."""
    stop, said = threading.Event(), queue.SimpleQueue()

    def observe(held):
        after_each()
        said.put(held)

    def next_state(is_it=lambda held: True):
        while not is_it(held := said.get(timeout=PATIENCE_S)):
            pass
        return held

    with ThreadPoolExecutor(1) as threads:
        done = threads.submit(hold, survey, mode=mode, stop=stop, observe=observe, period_s=PERIOD_S)
        try:
            yield next_state
        finally:
            stop.set()
        done.result()


def paths(survey):
    return [each.file.path for each in survey.files]


def test_locked_files_cannot_be_dropped_until_they_are_unlocked(survey):
    try:
        with contextlib.closing(LockedFiles()) as locked:
            allow_locking(survey.size)
            locked.lock(paths(survey), threading.Event())
    except LockError as error:
        pytest.skip(f"nothing may be locked here: {error}")
    check_hold(on_uncached(survey), "auto")  # files that can be locked need no known residency
    with holding(survey, "lock") as next_state:
        held = next_state()
        assert (held.mode, held.resident, held.problem) == ("lock", survey.size, None)
        for path in paths(survey):
            evict(path)
            assert resident_bytes(path) == path.stat().st_size
    for path in paths(survey):
        evict(path)
        assert resident_bytes(path) == 0


def test_what_is_not_locked(survey, tmp_path):
    stop = threading.Event()
    (tmp_path / "empty").touch()
    with contextlib.closing(LockedFiles()) as locked:
        locked.lock([tmp_path / "empty"], stop)
        with pytest.raises(LockError, match="gone: can't be mapped"):
            locked.lock([tmp_path / "gone"], stop)
        stop.set()
        locked.lock(paths(survey), stop)  # it stops when told to
        assert locked.size == 0


def run_without_the_right(folder, mode, limit):
    """`warm files --hold` as somebody with a limit on locked memory, beside a command that ends at once."""
    if not shutil.which("setpriv") or not shutil.which("prlimit"):
        pytest.skip("setpriv and prlimit are needed to take a right away")
    drop = ["setpriv", "--bounding-set", "-ipc_lock", "--inh-caps", "-ipc_lock", "prlimit", f"--memlock={limit}"]
    verb = [sys.executable, "-m", "deepseek_triton_tools.cli.main", "warm", "files", str(folder), f"--hold={mode}"]
    done = subprocess.run([*drop, *verb, "--then", "true"], capture_output=True, text=True, timeout=PATIENCE_S)
    if "setpriv:" in done.stderr:
        pytest.skip(f"no right can be taken away here: {done.stderr.strip()}")
    return done


@pytest.mark.slow
def test_a_missing_right_to_lock_is_reported_with_the_fix_before_anything_is_read(survey):
    folder = survey.checkpoints[0].folder
    for path in paths(survey):
        evict(path)
    for limit in ("65536:65536", "0:0"):
        done = run_without_the_right(folder, "lock", limit)
        assert (done.returncode, done.stdout) == (1, "")
        assert sum(map(resident_bytes, paths(survey))) < survey.size / 2
        line = done.stderr.splitlines()[-1]
        for part in ("RLIMIT_MEMLOCK is ", "CAP_IPC_LOCK is not there", "ulimit -l", "LimitMEMLOCK=", "IPC_LOCK"):
            assert part in line
    done = run_without_the_right(folder, "auto", "65536:65536")
    assert done.returncode == 0
    for part in ("watching, not locking: ", "RLIMIT_MEMLOCK is 64 KiB", "held by watch"):
        assert part in done.stderr
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if hard == resource.RLIM_INFINITY or hard >= 2 * survey.size:  # the soft limit is raised to the hard one
        limit = "unlimited" if hard == resource.RLIM_INFINITY else hard
        done = run_without_the_right(folder, "lock", f"65536:{limit}")
        assert (done.returncode, "held by lock" in done.stderr) == (0, True)


def test_dropped_files_are_brought_in_again_and_a_removed_one_does_not_matter(survey):
    first, path = paths(survey)[:2]
    with holding(survey, "watch") as next_state:
        next_state(lambda held: held.resident == survey.size)
        evict(path)
        held = next_state(lambda held: held.rewarmed)
        assert (held.mode, held.rewarmed, held.problem) == ("watch", path.stat().st_size, None)
        assert resident_bytes(path) == path.stat().st_size
        first.unlink()
        evict(path)
        next_state(lambda held: held.rewarmed == 2 * path.stat().st_size)


def test_files_that_are_dropped_again_and_again_are_left_alone(survey):
    with holding(survey, "watch", lambda: evict_all(survey)) as next_state:
        gave_up = next_state(lambda held: held.problem)
        *_, last = [next_state() for _ in range(4)]
    assert "evicted faster than it can be brought in" in gave_up.problem
    assert "--budget" in gave_up.problem
    assert last.rewarmed == gave_up.rewarmed == 3 * survey.size
    assert last.resident < survey.size / 2


def refuse_to_lock(size):
    raise LockError("not allowed")


@pytest.mark.parametrize("mode", ["watch", "auto"])
def test_files_of_unknown_residency_cannot_be_watched(survey, mode, monkeypatch):
    monkeypatch.setattr("deepseek_triton_tools.warming.hold.allow_locking", refuse_to_lock)
    with pytest.raises(LockError, match="the kernel does not say"):
        check_hold(on_uncached(survey), mode)
    check_hold(survey, mode)
    seen = []
    with pytest.raises(LockError, match="the kernel does not say") as raised:
        hold(on_uncached(survey), mode=mode, stop=threading.Event(), observe=seen.append)
    assert ("not allowed" in str(raised.value)) == (mode == "auto")
    assert ("--hold=lock" in str(raised.value)) == (mode == "watch")
    assert seen == []


def test_more_than_fits_is_not_held(survey):
    memory = HostMemory(total=2**40, available=survey.size - 1, cgroups=())
    large = replace(survey, memory=memory, budget=survey.size, options=WarmOptions(budget=survey.size))
    for mode in ("lock", "auto", "watch"):
        with pytest.raises(LockError, match="leave --budget or --hold out"):
            check_hold(large, mode)


@pytest.mark.parametrize("is_late", [False, True])
def test_a_command_is_run_without_a_hold_that_is_impossible_and_not_demanded(
    survey, is_late, monkeypatch, capsys, tmp_path
):
    cli = "deepseek_triton_tools.cli.warm_files"
    monkeypatch.setattr("deepseek_triton_tools.warming.hold.allow_locking", refuse_to_lock)
    monkeypatch.setattr(f"{cli}.take_survey", lambda *args: on_uncached(take_survey(*args)))
    if is_late:  # of a user namespace only the attempt tells that locking is not allowed
        monkeypatch.setattr(f"{cli}.check_hold", lambda *_: None)
    ran = []
    monkeypatch.setattr(f"{cli}.run_instead", ran.append)
    ready = tmp_path / "ready"
    argv = ["warm", "files", str(survey.checkpoints[0].folder), "--ready-file", str(ready)]
    assert main([*argv, "--hold", "--then", "true", "x"]) == 0
    assert (ran, ready.exists()) == ([["true", "x"]], True)
    assert "neither watched nor locked" in capsys.readouterr().err
    for demanded in (["--hold"], ["--hold=lock", "--then", "true"], ["--hold=watch", "--then", "true"]):
        assert main([*argv, *demanded]) == 1
        assert (len(ran), ready.exists()) == (1, False)
        shown = capsys.readouterr()
        assert shown.err.splitlines()[-1].startswith("deepseek-triton warm: --hold: ")
        assert bool(shown.out) == is_late
