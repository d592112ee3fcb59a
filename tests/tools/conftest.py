"""Shared by the tests of the command line."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp

import pytest

from support.commands import run_command
from support.model_server import ModelServer


@pytest.fixture(scope="session")
def plain_folder() -> Iterator[Path]:
    """A folder without a blank in its path, whatever TMPDIR is: pyxis mounts no other, and ssh-setup refuses others."""
    with TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def plain_path(plain_folder: Path) -> Path:
    """A new one for each test."""
    return Path(mkdtemp(dir=plain_folder))


@pytest.fixture
def model_server() -> Iterator[ModelServer]:
    with ModelServer() as server:
        yield server


LAUNCHED = {
    "r1": "deepseek-r1 --gpu h200",
    "r1x2": "deepseek-r1 --gpu h100 --gpus 16",
    "one": "deepseek-r1 --gpu h200 --model /models/R1",
    "two": "deepseek-r1 --gpu h100 --gpus 16 --model /models/R1",
    "tiny": "tiny",
    "twin": "tiny --engine simulated",
    "older": "deepseek-r1 --gpu h200 --model /models/R1 --trtllm 1.1.0",
    "other": "deepseek-v3 --gpu h200 --model /models/V3",
    "half": "deepseek-r1 --gpu b200 --gpus 4 --model /models/R1",
    "whole": "deepseek-r1 --gpu b200 --gpus 8 --model /models/R1",
}


@pytest.fixture(scope="session")
def launchable(plain_folder: Path) -> Path:
    """The folder of repositories for the tests of `launch`, which only read them."""
    for name, words in LAUNCHED.items():
        done = run_command("build", *words.split(), "--output", str(plain_folder / "launchable" / name))
        assert done.returncode == 0, done.stderr
    return plain_folder / "launchable"
