"""The lock of a download: one holder at a time, and nobody waits for the dead."""

import json
import os
import subprocess
import sys
import threading

import pytest

from deepseek_triton_tools.checkpoints import download_lock as module
from deepseek_triton_tools.checkpoints.download_lock import download_lock


def nobody(holder):
    raise AssertionError(f"waits for {holder}")


@pytest.fixture
def lock(tmp_path):
    return tmp_path / "it.lock"


def test_it_is_gone_afterwards(lock):
    for _ in range(2):
        with download_lock(lock, nobody):
            assert lock.exists()
    with pytest.raises(KeyError), download_lock(lock, nobody):
        raise KeyError
    assert list(lock.parent.iterdir()) == []


def test_many_threads_hold_it_one_by_one(lock, monkeypatch):
    monkeypatch.setattr(module, "_POLL_S", 0.001)
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
from deepseek_triton_tools.checkpoints.download_lock import download_lock
with download_lock(pathlib.Path({str(lock)!r}), print):
    os.kill(os.getpid(), 9)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    assert lock.exists()
    with download_lock(lock, nobody):
        pass


def test_a_holder_elsewhere_is_named_until_it_has_not_touched_the_lock_for_long(lock, monkeypatch):
    monkeypatch.setattr(module, "_POLL_S", 0.001)
    with download_lock(lock, nobody):
        holder = json.loads(lock.read_text())
    lock.write_text(json.dumps(holder | {"host": "node\x1b7", "pid": 7, "machine": "another"}))
    waited_for = []

    def wait_a_minute(holder):
        waited_for.append(holder)
        monkeypatch.setattr(module, "_DEAD_AFTER_S", 0.0)

    with download_lock(lock, wait_a_minute):
        pass
    assert set(waited_for) == {r"process 7 on node\x1b7"}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 7}'])
def test_a_lock_that_says_nothing_ends_too(lock, monkeypatch, text):
    monkeypatch.setattr(module, "_POLL_S", 0.001)
    lock.write_text(text)
    waited_for = []

    def wait_a_minute(holder):
        waited_for.append(holder)
        monkeypatch.setattr(module, "_DEAD_AFTER_S", 0.0)

    with download_lock(lock, wait_a_minute):
        pass
    assert set(waited_for) == {"another process"}


def test_a_lock_that_others_took_over_is_left_to_them(lock):
    with download_lock(lock, nobody):
        lock.write_text("theirs")
    assert lock.read_text() == "theirs"


def test_a_lock_that_others_took_over_meanwhile_is_given_back(lock, monkeypatch):
    monkeypatch.setattr(module, "_POLL_S", 0.001)
    with download_lock(lock, nobody):
        dead = json.loads(lock.read_text()) | {"started": "long ago"}
    lock.write_text(json.dumps(dead))
    rename = os.rename

    def late(source, target):
        """Move the lock after another process has found the same holder dead, and has taken the lock."""
        monkeypatch.setattr(os, "rename", rename)
        lock.unlink()
        lock.write_text(json.dumps(dead | {"host": "node", "pid": 7, "machine": "another"}))
        rename(source, target)

    monkeypatch.setattr(os, "rename", late)
    waited_for = []

    def end(holder):
        waited_for.append(holder)
        lock.unlink()

    with download_lock(lock, end):
        pass
    assert waited_for == ["process 7 on node"]
    assert list(lock.parent.iterdir()) == []
