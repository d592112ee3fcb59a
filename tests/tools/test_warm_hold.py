"""Holding files in the page cache: locked, watched, and what happens where neither can be."""

import contextlib
import resource
import shutil
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
from bench.synthetic_checkpoint import make_checkpoint

from deepseek_triton_tools.errors import LockError
from deepseek_triton_tools.warming import take_survey, warm
from deepseek_triton_tools.warming.hold import hold
from deepseek_triton_tools.warming.locking import LockedFiles, allow_locking
from deepseek_triton_tools.warming.residency import evict, resident_bytes

PATIENCE_S = 60
PERIOD_S = 0.02


@pytest.fixture
def survey(tmp_path):
    make_checkpoint(tmp_path / "R1", size=2 * 10**6)
    survey = take_survey([str(tmp_path / "R1")])
    warm(survey)
    if survey.files[0].asked_by is None:
        pytest.skip("the kernel does not say what is resident here")
    return survey


class Holding:
    """A hold in a thread, and what it has said."""

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
        """The first that is so."""

        def found():
            return [held for held in self.seen if is_it(held)]

        with self._has_said:
            assert self._has_said.wait_for(found, PATIENCE_S), self.seen
            return found()[0]

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self.stop.set()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()


def paths(survey):
    return [each.file.path for each in survey.files]


def may_lock(survey):
    with contextlib.suppress(LockError), LockedFiles() as locked:
        allow_locking(survey.size)
        locked.lock(paths(survey), threading.Event())
        return True
    return False


# Locking


def test_what_is_locked_cannot_be_dropped_until_it_is_let_go(survey):
    if not may_lock(survey):
        pytest.skip("nothing may be locked here: neither RLIMIT_MEMLOCK nor CAP_IPC_LOCK allows it")
    with Holding(survey, "lock") as holding:
        held = holding.wait_for(lambda held: True)
        assert (held.mode, held.resident, held.problem) == ("lock", survey.size, None)
        for path in paths(survey):
            evict(path)
            assert resident_bytes(path) == path.stat().st_size

    for path in paths(survey):
        evict(path)
        assert resident_bytes(path) == 0


def test_locking_stops_when_told_to(survey):
    stop = threading.Event()
    stop.set()
    with LockedFiles() as locked:
        locked.lock(paths(survey), stop)
        assert locked.size == 0


def test_an_empty_file_is_no_trouble(tmp_path):
    (tmp_path / "empty").touch()
    with LockedFiles() as locked:
        locked.lock([tmp_path / "empty"], threading.Event())
        assert locked.size == 0


def run_without_the_right(folder, mode, limit):
    """`warm --hold` as somebody with a limit on locked memory, beside a command that ends at once."""
    if not shutil.which("setpriv") or not shutil.which("prlimit"):
        pytest.skip("setpriv and prlimit are needed to take a right away")
    drop = ["setpriv", "--bounding-set", "-ipc_lock", "--inh-caps", "-ipc_lock"]
    verb = [sys.executable, "-m", "deepseek_triton_tools.cli", "warm", str(folder), f"--hold={mode}", "--then", "true"]
    done = subprocess.run(
        [*drop, "prlimit", f"--memlock={limit}", *verb], capture_output=True, text=True, timeout=PATIENCE_S
    )
    if "setpriv:" in done.stderr:
        pytest.skip(f"no right can be taken away here: {done.stderr.strip()}")
    return done


@pytest.mark.parametrize("limit", ["65536:65536", "0:0"])
def test_what_is_missing_to_lock_is_said_with_how_to_give_it(survey, limit):
    done = run_without_the_right(survey.checkpoints[0].folder, "lock", limit)

    assert done.returncode == 1
    line = done.stderr.splitlines()[-1]
    assert line.startswith("deepseek-triton warm: ")
    for part in ("RLIMIT_MEMLOCK is ", "CAP_IPC_LOCK is not there", "ulimit -l", "LimitMEMLOCK=", "--cap-add IPC_LOCK"):
        assert part in line


def test_the_soft_limit_is_raised_to_the_hard_one(survey):
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if hard != resource.RLIM_INFINITY and hard < 2 * survey.size:
        pytest.skip("the hard limit is too low here")
    limit = "unlimited" if hard == resource.RLIM_INFINITY else hard
    done = run_without_the_right(survey.checkpoints[0].folder, "lock", f"65536:{limit}")

    assert done.returncode == 0
    assert "held by lock" in done.stderr


def test_auto_watches_where_it_may_not_lock_and_says_why(survey):
    done = run_without_the_right(survey.checkpoints[0].folder, "auto", "65536:65536")

    assert done.returncode == 0
    assert "watching, not locking: " in done.stderr
    assert "RLIMIT_MEMLOCK is 64 KiB" in done.stderr
    assert "held by watch" in done.stderr


# Watching


def test_what_was_dropped_is_brought_in_again(survey):
    path = paths(survey)[1]
    with Holding(survey, "watch") as holding:
        holding.wait_for(lambda held: held.resident == survey.size)
        evict(path)
        held = holding.wait_for(lambda held: held.rewarmed)
        assert held.mode == "watch"
        assert resident_bytes(path) == path.stat().st_size

    assert held.rewarmed == path.stat().st_size
    assert held.problem is None


def test_what_is_dropped_faster_than_it_can_be_brought_in_is_left_alone(survey):
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


def test_a_file_that_is_gone_is_no_end_of_the_watch(survey):
    with Holding(survey, "watch") as holding:
        holding.wait_for(lambda held: True)
        paths(survey)[0].unlink()
        evict(paths(survey)[1])
        assert holding.wait_for(lambda held: held.rewarmed).rewarmed == paths(survey)[1].stat().st_size


@pytest.mark.parametrize("mode", ["watch", "auto"])
def test_what_the_kernel_does_not_tell_cannot_be_watched(survey, mode, monkeypatch):
    def refuse(size):
        raise LockError("not allowed")

    monkeypatch.setattr("deepseek_triton_tools.warming.hold.allow_locking", refuse)
    files = tuple(
        replace(
            each,
            file_system=replace(each.file_system, reading=replace(each.file_system.reading, is_cached=False)),
        )
        for each in survey.files
    )
    with Holding(replace(survey, files=files), mode) as holding:
        holding._thread.join(PATIENCE_S)

    assert "the kernel does not say" in str(holding.error)
    assert holding.seen == []
