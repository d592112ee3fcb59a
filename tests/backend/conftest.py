"""Fixtures of the engine tests."""

from contextlib import ExitStack

import pytest

from deepseek_backend.config import BackendConfig
from standin.harness import engines
from support.engine_driver import driven
from support.fake_vllm import faked_engine
from support.fakes import ScriptedEngine, serving


@pytest.fixture
def engine():
    return ScriptedEngine()


@pytest.fixture
def service(engine):
    with serving(engine) as served:
        yield served


@pytest.fixture
def make_engine(tmp_path):
    """Starts TensorRT-LLM engines on the stand-in; stops them at the end."""
    with engines(tmp_path) as make:
        yield make


@pytest.fixture
def harness(make_engine):
    return make_engine()


@pytest.fixture
def make_vllm(tmp_path, monkeypatch):
    """Starts vLLM engines on the fake vLLM; stops them at the end."""
    with ExitStack() as stack:
        yield lambda **given: stack.enter_context(faked_engine(tmp_path, monkeypatch, **given))


@pytest.fixture(params=[False, True], ids=["core", "generate"])
def faked(make_vllm, request):
    """An engine by either way to vLLM."""
    return make_vllm(public=request.param)


@pytest.fixture
def start():
    """Make and start simulated engines with these engine_options. They are stopped at the end."""
    with ExitStack() as stack:

        def start(**options):
            config = BackendConfig(engine="simulated", engine_options=options)
            return stack.enter_context(driven(config)).engine

        yield start
