"""The engines, by the name `triton_config.engine` gives them. Each is imported only when it is chosen."""

from __future__ import annotations

import importlib

from deepseek_backend.config import BackendConfig
from deepseek_backend.engines.base import Engine
from deepseek_backend.errors import ConfigError

ENGINES = {
    "tensorrt_llm": "TensorRTLLMEngine",
    "transformers": "TransformersEngine",
    "simulated": "SimulatedEngine",
}
"""Name -> class, in the module of that name."""


def create_engine(config: BackendConfig) -> Engine:
    """The engine `config` names, not yet started.

    :raises ConfigError: when a module that the engine needs is not installed.
    """
    try:
        module = importlib.import_module(f"deepseek_backend.engines.{config.engine}")
    except ModuleNotFoundError as error:
        raise ConfigError(
            [f"engine {config.engine!r} needs the package {error.name!r}, which is not installed"]
        ) from error
    engine: Engine = getattr(module, ENGINES[config.engine])(config)
    return engine
