"""The sampling fields that the engine honours, and the check that the model's defaults are among them."""

from __future__ import annotations

from collections.abc import Mapping

from deepseek_backend.config import BackendConfig
from deepseek_backend.contract import SAMPLING_BY_NAME
from deepseek_backend.engines.base import Capabilities
from deepseek_backend.errors import ConfigError
from deepseek_backend.request.parsing import contradictions


def supported_fields(capabilities: Capabilities) -> dict[str, str]:
    """Return each sampling field, priority and request_type: "" where the engine honours it, else why not."""
    honoured = set(capabilities.sampling_fields)
    if "logprobs" in honoured:
        honoured.add("best_of")
    if capabilities.priority:
        honoured.add("priority")
    if capabilities.handover_form:
        honoured.add("request_type")
    reasons = dict.fromkeys((*SAMPLING_BY_NAME, "priority", "request_type"), "not supported by this engine")
    reasons["request_type"] = "this engine does whole requests only"
    reasons["best_of"] = "needs logprobs to choose by, which this engine does not have here"
    reasons |= capabilities.unsupported
    return {name: "" if name in honoured else reason for name, reason in reasons.items()}


def check_defaults(config: BackendConfig, supported: Mapping[str, str]) -> None:
    """Check `default_sampling` against what the engine supports.

    :raises ConfigError: for a default that the engine would not honour, or that contradicts another.
    """
    defaults = config.default_sampling
    problems = [
        f"triton_config.default_sampling.{name}: {supported[name]}"
        for name, value in defaults.items()
        if supported[name] and value != SAMPLING_BY_NAME[name].neutral
    ]
    together = contradictions(defaults, config.default_max_tokens)
    problems += [f"triton_config.default_sampling: {problem}" for problem in together]
    if problems:
        raise ConfigError(problems)
