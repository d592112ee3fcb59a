"""The engines, by their names in `triton_config.engine`. An engine is imported only when it is chosen.

A generated repository holds one engine's folder; the source that it is copied from holds all of them.
"""

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepseek_backend.config import BackendConfig
from deepseek_backend.engines.base import Engine
from deepseek_backend.errors import ConfigError

ENGINES = {
    "tensorrt_llm": "TensorRTLLMEngine",
    "vllm": "VllmEngine",
    "reference": "ReferenceEngine",
    "simulated": "SimulatedEngine",
}
"""Name of an engine -> its class, in the package of that name."""

_FOLDER = Path(__file__).parent


def create_engine(config: BackendConfig) -> Engine:
    """Return the engine that `config` names, not yet started.

    :raises ConfigError: when this repository does not hold the engine, or a package that it needs is not installed, or
        its program can't be parsed.
    """
    present = [name for name in ENGINES if (_FOLDER / name / "__init__.py").is_file()]
    if config.engine not in present:
        held = " or ".join(present)
        raise ConfigError(
            [
                f"triton_config.engine: expected {held}, which this repository holds, got {config.engine}: "
                f"write engine: {held}, or build it again with --engine {config.engine}"
            ]
        )
    try:
        module = importlib.import_module(f"deepseek_backend.engines.{config.engine}")
    except ModuleNotFoundError as error:
        extra = "; the extra `demo` of deepseek-triton has it" if config.engine == "reference" else ""
        raise ConfigError(
            [f"engine {config.engine!r} needs the package {error.name!r}, which is not installed{extra}"]
        ) from error
    except SyntaxError as error:
        raise ConfigError([f"{error.filename or 'a file of the engine'}:{error.lineno or ''} {error.msg}"]) from None
    engine: Engine = getattr(module, ENGINES[config.engine])(config)
    return engine


def instance_environment(engine: str, model_config: Mapping[str, Any], instance_name: str) -> dict[str, str]:
    """Return the environment variables that one of several instances needs before its engine starts.

    Only TensorRT-LLM has several instances with GPUs of their own. Call it after `create_engine`.

    :raises ConfigError: when config.pbtxt does not give each instance GPUs of its own.
    """
    if engine != "tensorrt_llm":
        return {}
    from deepseek_backend.engines.tensorrt_llm.loading import instance_environment

    return instance_environment(model_config, instance_name)
