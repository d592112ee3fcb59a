"""model.yaml as the backend reads it.

LLM arguments stand at the top level, exactly as upstream's own backend would read them; ours stand under
`triton_config` only. `load_config` reports every problem at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from deepseek_backend.contract import SAMPLING_BY_NAME
from deepseek_backend.errors import ConfigError

ENGINE_NAMES = ("tensorrt_llm", "transformers", "simulated")


@dataclass(frozen=True, kw_only=True)
class BackendConfig:
    """Everything under `triton_config`, and the LLM arguments beside it."""

    engine: str = "tensorrt_llm"
    """tensorrt_llm, transformers or simulated."""
    decoupled: bool = True
    """A copy of config.pbtxt's transaction policy for upstream's model.py; the two must agree."""
    max_batch_size: int = 0
    """Likewise. 0: the engine batches, Triton does not."""
    default_max_tokens: int = 256
    """max_tokens of a request that gives none."""
    default_sampling: Mapping[str, Any] = field(default_factory=dict)
    """Sampling fields for requests that don't give them, from the checkpoint's generation_config or model card."""
    unknown_parameters: str = "error"
    """What to do with a request parameter nobody knows: error, warn or ignore."""
    ignored_parameters: tuple[str, ...] = ()
    """Shell-style patterns of request parameters to pass over, for headers that a proxy forwards."""
    cancellation_check_period_ms: int = 100
    """How often each open request is asked whether its client has gone."""
    drain_timeout_s: float = 20.0
    """How long `finalize` waits for requests before it cancels them; below tritonserver's --exit-timeout-secs (30)."""
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the engine itself; each engine checks its own."""
    llm_args: Mapping[str, Any] = field(default_factory=dict)
    """The top level of model.yaml without triton_config."""
    version_dir: Path = Path()
    """The folder of model.yaml, where release.yaml lies too. A relative `model` path is looked up from here."""

    @property
    def model(self) -> str:
        return str(self.llm_args.get("model", ""))


_NOT_IN_YAML = {"llm_args", "version_dir"}
_POSITIVE = ("default_max_tokens", "cancellation_check_period_ms")
_UNKNOWN_PARAMETERS = ("error", "warn", "ignore")


def load_config(path: Path) -> BackendConfig:
    """The configuration in the YAML file at `path`.

    :raises ConfigError: with every problem found.
    """
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError([f"{path}: can't be read: {error.strerror}"]) from error
    except yaml.YAMLError as error:
        raise ConfigError([f"{path}: not YAML: {' '.join(str(error).split())}"]) from error
    if not isinstance(document, dict):
        raise ConfigError([f"{path}: expected a mapping of LLM arguments, got {type(document).__name__}"])
    return parse_config(document, version_dir=path.parent)


def parse_config(document: Mapping[str, Any], *, version_dir: Path) -> BackendConfig:
    """`document` as a configuration.

    :raises ConfigError: with every problem found.
    """
    ours = document.get("triton_config") or {}
    if not isinstance(ours, dict):
        raise ConfigError([f"triton_config: expected a mapping, got {type(ours).__name__}"])
    problems = _problems(ours)
    if not document.get("model"):
        problems.append("model: expected a checkpoint's folder or name, got nothing")
    if problems:
        raise ConfigError(problems)
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in ours.items()}
    llm_args = {key: value for key, value in document.items() if key != "triton_config"}
    return BackendConfig(**values, llm_args=llm_args, version_dir=version_dir)


def _problems(ours: Mapping[str, Any]) -> list[str]:
    known = {f.name: f for f in fields(BackendConfig) if f.name not in _NOT_IN_YAML}
    problems = [
        f"triton_config.{key}: unknown key; known: {', '.join(sorted(known))}" for key in ours if key not in known
    ]
    for key, value in ours.items():
        if key in known:
            problems += _type_problem(key, value)
    engine = ours.get("engine", "tensorrt_llm")
    if engine not in ENGINE_NAMES:
        problems.append(f"triton_config.engine: expected one of {', '.join(ENGINE_NAMES)}, got {engine!r}")
    unknown = ours.get("unknown_parameters", "error")
    if unknown not in _UNKNOWN_PARAMETERS:
        problems.append(f"triton_config.unknown_parameters: expected {', '.join(_UNKNOWN_PARAMETERS)}, got {unknown!r}")
    for name in ours.get("default_sampling") or {}:
        if name not in SAMPLING_BY_NAME:
            problems.append(f"triton_config.default_sampling.{name}: no such sampling field")
    return problems


_EXPECTED: dict[str, tuple[type | tuple[type, ...], str]] = {
    "engine": (str, "a name"),
    "decoupled": (bool, "true or false"),
    "max_batch_size": (int, "a whole number"),
    "default_max_tokens": (int, "a whole number"),
    "default_sampling": (dict, "a mapping"),
    "unknown_parameters": (str, "a name"),
    "ignored_parameters": (list, "a list of patterns"),
    "cancellation_check_period_ms": (int, "a whole number of milliseconds"),
    "drain_timeout_s": ((int, float), "a number of seconds"),
    "engine_options": (dict, "a mapping"),
}


def _type_problem(key: str, value: Any) -> list[str]:
    expected, words = _EXPECTED[key]
    if not isinstance(value, expected) or (isinstance(value, bool) and expected is not bool):
        return [f"triton_config.{key}: expected {words}, got {value!r}"]
    if key in _POSITIVE and isinstance(value, int) and value < 1:
        return [f"triton_config.{key}: expected {words} above 0, got {value!r}"]
    return []
