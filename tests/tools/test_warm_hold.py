"""Holding files in the page cache: by locking, by watching, and where neither is possible."""

import contextlib
import resource
import shutil
import subprocess
import sys
import threading
from dataclasses import replace

import pytest

from deepseek_triton_tools.cli.main import main
from deepseek_triton_tools.host.host_memory import HostMemory
from deepseek_triton_tools.tool_errors import LockError
from deepseek_triton_tools.warming import WarmOptions, take_survey, warm
from deepseek_triton_tools.warming.hold import LockedFiles, allow_locking, check_hold, hold
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


class Holding:
    """A hold in a thread, and the states that it has reported."""

    def __init__(self, survey, mode):
        self.stop = threading.Event()
        self.seen = []
        self.error = None
        self._has_said = threading.Condition()
        self._thread = threading.Thread(target=self._run, args=(survey, mode))

    def _run(self, survey, mode):
        try:
            hold(survey, mode=mode, stop=self.stop, observe=self._observe, period_s=PERIOD_S)
        except LockError as error:
            self.error = error

    def _observe(self, held):
        with self._has_said:
            self.seen.append(held)
            self._has_said.notify_all()

    def wait_for(self, is_it):
        """The first state for which `is_it` is true."""
        with self._has_said:
            assert self._has_said.wait_for(lambda: any(map(is_it, self.seen)), PATIENCE_S), self.seen
            return next(filter(is_it, self.seen))

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self.stop.set()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()


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
    with Holding(survey, "lock") as holding:
        held = holding.wait_for(lambda held: True)
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
    with Holding(survey, "watch") as holding:
        holding.wait_for(lambda held: held.resident == survey.size)
        evict(path)
        held = holding.wait_for(lambda held: held.rewarmed)
        assert (held.mode, held.rewarmed, held.problem) == ("watch", path.stat().st_size, None)
        assert resident_bytes(path) == path.stat().st_size
        first.unlink()
        evict(path)
        holding.wait_for(lambda held: held.rewarmed == 2 * path.stat().st_size)


def test_files_that_are_dropped_again_and_again_are_left_alone(survey):
    class Thrashed(Holding):
        def _observe(self, held):
            for path in paths(survey):
                evict(path)
            super()._observe(held)

    with Thrashed(survey, "watch") as holding:
        gave_up = holding.wait_for(lambda held: held.problem)
        number = len(holding.seen)
        holding.wait_for(lambda held: len(holding.seen) > number + 3)
        last = holding.seen[-1]
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
    with Holding(on_uncached(survey), mode) as holding:
        holding._thread.join(PATIENCE_S)
    assert "the kernel does not say" in str(holding.error)
    assert ("not allowed" in str(holding.error)) == (mode == "auto")
    assert ("--hold=lock" in str(holding.error)) == (mode == "watch")
    assert holding.seen == []


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
