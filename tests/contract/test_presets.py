from deepseek_backend.engines.simulated.presets import PRESETS
from deepseek_triton_build.catalog import variants


def test_the_catalogue_knows_the_simulated_engines_presets():
    assert set(variants()["tiny"].presets) == set(PRESETS)
