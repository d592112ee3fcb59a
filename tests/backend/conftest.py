"""Fixtures of the engine tests."""

import pytest

from deepseek_backend.config import BackendConfig
from deepseek_backend.engines.simulated.simulated_engine import SimulatedEngine
from standin.harness import engines


@pytest.fixture
def make_engine(tmp_path):
    """Starts TensorRT-LLM engines on the stand-in; stops them at the end."""
    with engines(tmp_path) as make:
        yield make


@pytest.fixture
def start():
    """Make and start simulated engines with these engine_options. They are stopped at the end."""
    engines = []

    def start(**options):
        engine = SimulatedEngine(BackendConfig(engine="simulated", engine_options=options))
        engines.append(engine)
        engine.start()
        return engine

    yield start
    for engine in engines:
        engine.stop()
