"""Shared by every test."""

import itertools
import os
import signal
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

import deepseek_triton_build
from deepseek_triton_build.catalog import is_engine_variable
from support.client_kinds import client_kind, client_loop

__all__ = ["client_kind", "client_loop"]

# A shell that starts this in the background has SIGINT ignored, and so would every program whose Ctrl-C is tested.
signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # a server that goes away is not worth a line

# Shared machines stall for seconds: neither a slow example nor a slow draw says anything about the code.
settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("default")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("engine", "the engine behind the servers of tests/live")
    group.addoption("--engine", choices=["vllm"], help="run the tests that hold on this engine too, on it")
    group.addoption(
        "--with-gpu", action="store_true", help="let vLLM compute on a GPU, not in an executor of the tests"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Refuse to test the code of another clone, whose .venv came along with a copy.

    And to run scattered: pytest-xdist writes a test's group into `_nodeid`. With a pytest that has it no more, each
    worker starts each server, and nothing says so.
    """
    clone, code = Path(__file__).resolve().parents[1], Path(deepseek_triton_build.__file__).resolve()
    if not code.is_relative_to(clone):
        raise pytest.UsageError(f"expected the code of {clone}, got {code}: `rm .venv` if a link, then `make venv`")
    if config.getoption("dist", "no") == "loadgroup" and not hasattr(pytest.Item, "_nodeid"):
        raise pytest.UsageError(f"expected a pytest below 9.2, which keeps a group together, got {pytest.__version__}")


@pytest.hookimpl(tryfirst=True)  # before xdist, which reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let a worker have a whole group: what its tests share is made once. A group is a file, unless a mark names one.

    The groups whose tests take longest come first, so that no worker is left alone with one in the end. Those with
    servers, which wait, and the others, which compute, take turns.
    """
    with_server: Counter[str] = Counter()
    without: Counter[str] = Counter()
    for item in items:
        if not item.get_closest_marker("xdist_group"):
            item.add_marker(
                pytest.mark.xdist_group(item.path.relative_to(item.config.rootpath).with_suffix("").as_posix())
            )
        if item.path.parent.name == "live":
            with_server[_group(item)] += 1
        else:
            without[_group(item)] += bool(item.get_closest_marker("slow"))
    turns = itertools.chain(enumerate(with_server.most_common()), enumerate(without.most_common()))
    place = {group: number for number, (group, _) in turns}
    items.sort(key=lambda item: (place[_group(item)], _group(item)))


def _group(item: pytest.Item) -> str:
    mark = item.get_closest_marker("xdist_group")
    assert mark is not None
    return str(mark.args[0] if mark.args else mark.kwargs["name"])


@pytest.fixture(scope="session")
def random_checkpoint(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small DeepSeek-V3 with random weights: real forward passes, and long answers."""
    from support.random_checkpoint import PRODUCTION_HEADS, write_checkpoint

    folder = tmp_path_factory.mktemp("random_checkpoint")
    write_checkpoint(folder, PRODUCTION_HEADS if pytestconfig.getoption("--with-gpu") else None)
    return folder


@pytest.fixture(autouse=True)
def _clean_environment(pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Proxies have no business between a test and its loopback server, nor has what is set for the machine's engine,
    unless the tests are to run on that engine."""
    keeps_engine = pytestconfig.getoption("--with-gpu")
    for name in list(os.environ):
        if name.lower().endswith("_proxy") or (is_engine_variable(name) and not keeps_engine):
            monkeypatch.delenv(name)
