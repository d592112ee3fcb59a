"""The lock of a download: one holder at a time, and nobody waits for the dead."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from deepseek_triton_tools.checkpoints import download_lock as module
from deepseek_triton_tools.checkpoints.download_lock import download_lock


def nobody(holder: str) -> None:
    raise AssertionError(f"waits for {holder}")


@pytest.fixture
def lock(tmp_path) -> Path:
    return tmp_path / "it.lock"


def test_it_is_gone_afterwards(lock) -> None:
    for _ in range(2):
        with download_lock(lock, nobody):
            assert lock.exists()
    with pytest.raises(KeyError), download_lock(lock, nobody):
        raise KeyError
    assert list(lock.parent.iterdir()) == []


def test_many_threads_hold_it_one_by_one(lock, monkeypatch) -> None:
    monkeypatch.setattr(module, "_POLL_S", 0.001)
    holders, most = [], []

    def hold() -> None:
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


def test_a_killed_holder_of_this_machine_is_not_waited_for(lock) -> None:
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


def test_a_holder_elsewhere_is_named_until_it_has_not_touched_the_lock_for_long(lock, monkeypatch) -> None:
    monkeypatch.setattr(module, "_POLL_S", 0.001)
    with download_lock(lock, nobody):
        holder = json.loads(lock.read_text())
    lock.write_text(json.dumps(holder | {"host": "node\x1b7", "pid": 7, "machine": "another"}))
    waited_for: list[str] = []

    def wait_a_minute(holder: str) -> None:
        waited_for.append(holder)
        monkeypatch.setattr(module, "_DEAD_AFTER_S", 0.0)

    with download_lock(lock, wait_a_minute):
        pass
    assert set(waited_for) == {r"process 7 on node\x1b7"}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 7}'])
def test_a_lock_that_says_nothing_ends_too(lock, monkeypatch, text) -> None:
    monkeypatch.setattr(module, "_POLL_S", 0.001)
    lock.write_text(text)
    waited_for: list[str] = []

    def wait_a_minute(holder: str) -> None:
        waited_for.append(holder)
        monkeypatch.setattr(module, "_DEAD_AFTER_S", 0.0)

    with download_lock(lock, wait_a_minute):
        pass
    assert set(waited_for) == {"another process"}


def test_a_lock_that_others_took_over_is_left_to_them(lock) -> None:
    with download_lock(lock, nobody):
        lock.write_text("theirs")
    assert lock.read_text() == "theirs"


def test_a_lock_that_others_took_over_meanwhile_is_given_back(lock, monkeypatch) -> None:
    monkeypatch.setattr(module, "_POLL_S", 0.001)
    with download_lock(lock, nobody):
        dead = json.loads(lock.read_text()) | {"started": "long ago"}
    lock.write_text(json.dumps(dead))
    rename = os.rename

    def late(source: Path, target: Path) -> None:
        """Move the lock after another process has found the same holder dead, and has taken the lock."""
        monkeypatch.setattr(os, "rename", rename)
        lock.unlink()
        lock.write_text(json.dumps(dead | {"host": "node", "pid": 7, "machine": "another"}))
        rename(source, target)

    monkeypatch.setattr(os, "rename", late)
    waited_for: list[str] = []

    def end(holder: str) -> None:
        waited_for.append(holder)
        lock.unlink()

    with download_lock(lock, end):
        pass
    assert waited_for == ["process 7 on node"]
    assert list(lock.parent.iterdir()) == []
