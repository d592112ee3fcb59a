"""Shared by the tests of `checkpoint`."""

import pytest

from deepseek_triton_tools.cli.main import main
from support.hub_server import hub_server


@pytest.fixture
def hub(request):
    """A hub with the files of the module."""
    with hub_server(dict(request.module.FILES)) as server:
        yield server


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "weights"


@pytest.fixture
def checkpoint(capsys):
    """Runs `checkpoint` with these words, and returns what it printed."""

    def run(*words, code=0):
        assert main(["checkpoint", *map(str, words)]) == code
        return capsys.readouterr()

    return run


@pytest.fixture
def refused(checkpoint):
    """Runs what is refused in one line, and returns the line."""

    def run(*words, code=1):
        (line,) = checkpoint(*words, code=code).err.splitlines()
        return line

    return run
