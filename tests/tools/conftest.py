"""Shared by the tests of the command line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp

import pytest

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
