from deepseek_backend.config import ENGINE_NAMES
from deepseek_backend.engines import ENGINES
from deepseek_triton_build.planning import plan


def test_configuration_backend_and_generator_know_the_same_engines():
    assert set(ENGINE_NAMES) == set(ENGINES) == set(plan.ENGINES)
