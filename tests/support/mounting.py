"""Mounts and other users for tests, where this machine allows them."""

import contextlib
import json
import os
import select
import signal
import subprocess
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.waiting import PATIENCE_S

NOBODY = 65534


@contextlib.contextmanager
def mounted(*arguments: str | Path, on: Path) -> Iterator[Path]:
    """Run `mount arguments on`, and unmount at the end of the block. Skips the test where mounting is not allowed."""
    on.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(["mount", *map(str, arguments), str(on)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"mount {' '.join(map(str, arguments))}: {done.stderr.strip()}")
    try:
        yield on
    finally:
        subprocess.run(["umount", str(on)], check=True)


@contextlib.contextmanager
def overlay(folder: Path) -> Iterator[tuple[Path, Path]]:
    """Mount an overlay below `folder`; gives its lower folder and the overlay."""
    for name in ("lower", "upper", "work"):
        (folder / name).mkdir()
    layers = f"lowerdir={folder / 'lower'},upperdir={folder / 'upper'},workdir={folder / 'work'}"
    with mounted("-t", "overlay", "overlay", "-o", layers, on=folder / "overlay") as merged:
        yield folder / "lower", merged


def as_nobody(ask: Callable[[], Any], *, prepare: Callable[[], None] | None = None) -> Any:
    """Call `ask` in a child process of a user who owns nothing, and return its result after a trip through JSON."""
    if os.geteuid():
        pytest.skip("only root becomes another user")
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        _answer(ask, prepare, writing)
    os.close(writing)
    # A child of a process with threads can stand still at a lock that one of them held.
    if not select.select([reading], [], [], PATIENCE_S)[0]:
        os.kill(child, signal.SIGKILL)
    with open(reading) as file:
        answer = file.read()
    os.waitpid(child, 0)
    return json.loads(answer)


def _answer(ask: Callable[[], Any], prepare: Callable[[], None] | None, writing: int) -> None:
    try:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        if prepare:
            prepare()
        os.write(writing, json.dumps(ask()).encode())
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)
