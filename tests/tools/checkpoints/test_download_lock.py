"""The lock of a download: one holder at a time, and nobody waits for the dead."""

import json
import subprocess
import sys
import threading

import pytest

from deepseek_triton_tools.checkpoints import download_target as module
from deepseek_triton_tools.checkpoints.download_target import download_lock


def nobody(holder):
    raise AssertionError(f"waits for {holder}")


@pytest.fixture
def lock(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_POLL_S", 0.001)
    return tmp_path / "it.lock"


@pytest.fixture
def holder(lock):
    """What the lock says of this process."""
    with download_lock(lock, nobody):
        return json.loads(lock.read_text())


def test_it_is_gone_afterwards_unless_others_took_it_over(lock):
    for _ in range(2):
        with download_lock(lock, nobody):
            assert lock.exists()
    with pytest.raises(KeyError), download_lock(lock, nobody):
        raise KeyError
    assert list(lock.parent.iterdir()) == []
    with download_lock(lock, nobody):
        lock.write_text("theirs")
    assert lock.read_text() == "theirs"


def test_one_that_is_released_between_two_looks_is_taken(lock, monkeypatch):
    lock.write_text("theirs")
    look = module._text

    def too_late(path):
        path.unlink(missing_ok=True)
        monkeypatch.setattr(module, "_text", look)
        return look(path)

    monkeypatch.setattr(module, "_text", too_late)
    with download_lock(lock, nobody):
        assert lock.read_text() != "theirs"


def test_many_threads_hold_it_one_by_one(lock):
    holders, most = [], []

    def hold():
        with download_lock(lock, lambda _: None):
            holders.append(None)
            most.append(len(holders))
            holders.pop()

    threads = [threading.Thread(target=hold) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 8
    assert list(lock.parent.iterdir()) == []


def test_a_killed_holder_of_this_machine_is_not_waited_for(lock):
    code = f"""
import os, pathlib
from deepseek_triton_tools.checkpoints.download_target import download_lock
with download_lock(pathlib.Path({str(lock)!r}), print):
    os.kill(os.getpid(), 9)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    assert lock.exists()
    with download_lock(lock, nobody):
        pass


def test_a_dead_holder_whose_number_another_process_got_is_not_waited_for(lock, holder):
    lock.write_text(json.dumps(holder | {"start": holder["start"] - 1, "token": "theirs"}))
    with download_lock(lock, nobody):
        pass


def test_a_holder_of_this_machine_that_runs_is_waited_for(lock, holder):
    lock.write_text(json.dumps(holder | {"token": "theirs"}))
    waited_for = []

    def release(holder):
        waited_for.append(holder)
        lock.unlink()

    with download_lock(lock, release):
        pass
    assert waited_for == [f"process {holder['pid']} on {holder['host']}"]


def test_a_holder_elsewhere_is_named_until_it_has_not_touched_the_lock_for_long(lock, holder):
    elsewhere = json.dumps(holder | {"host": "node\x1b7", "pid": 7, "machine": "another"})
    silent = dict.fromkeys(("", "{", "[]", '{"pid": 7}'), "another process")
    for text, name in {elsewhere: r"process 7 on node\x1b7", **silent}.items():
        lock.write_text(text)
        waited_for = set()
        with pytest.MonkeyPatch.context() as patch:

            def wait_a_minute(holder, waited_for=waited_for, patch=patch):
                waited_for.add(holder)
                patch.setattr(module, "_DEAD_AFTER_S", 0.0)

            with download_lock(lock, wait_a_minute):
                pass
        assert waited_for == {name}
