"""Gives each of several instances of a model in one tritonserver its GPUs.

As in upstream's backend, the parameter gpu_device_ids of config.pbtxt names them, "0,1;2,3" for two instances, and an
environment variable tells CUDA. It must be set before tensorrt_llm is imported: CUDA opens the GPUs that it sees then,
and workers inherit the variable.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from deepseek_backend.errors import ConfigError

VISIBLE_DEVICES = "TRTLLM_VISIBLE_DEVICES"
"""Variable that tells the workers the GPUs; the engine counts gpus_per_node from it."""
_PARAMETER = "gpu_device_ids"


def instance_environment(model_config: Mapping[str, Any], instance_name: str) -> dict[str, str]:
    """Return this instance's environment variables; none for a model's only instance without the parameter.

    :param model_config: the parsed model_config of `initialize`.
    :param instance_name: the model_instance_name of `initialize`.
    :raises ConfigError: when the parameter is missing or leaves an instance without GPUs of its own.
    """
    count = sum(int(group.get("count", 1)) for group in model_config.get("instance_group") or [{}])
    text = str(model_config.get("parameters", {}).get(_PARAMETER, {}).get("string_value", ""))
    if not text:
        if count > 1:
            raise ConfigError(
                [f"config.pbtxt: {count} instances need the parameter {_PARAMETER}, with the GPUs of each"]
            )
        return {}
    per_instance = [[gpu.strip() for gpu in part.split(",") if gpu.strip()] for part in text.split(";")]
    _check(per_instance, count, text)
    suffix = re.search(r"_(\d+)$", instance_name)
    index = int(suffix[1]) if suffix and count > 1 else 0
    if index >= len(per_instance):
        raise ConfigError([f"{_PARAMETER}: {text!r} has no GPUs for instance {index} ({instance_name})"])
    gpus = ",".join(per_instance[index])
    return {"CUDA_VISIBLE_DEVICES": gpus, VISIBLE_DEVICES: gpus}


def _check(per_instance: list[list[str]], count: int, text: str) -> None:
    problems = []
    if len(per_instance) != count:
        problems.append(f"{_PARAMETER}: expected GPUs for {count} instances, separated by semicolons, got {text!r}")
    if not all(per_instance):
        problems.append(f"{_PARAMETER}: expected at least one GPU for each instance, got {text!r}")
    all_gpus = [gpu for gpus in per_instance for gpu in gpus]
    if len(set(all_gpus)) != len(all_gpus):
        problems.append(f"{_PARAMETER}: expected each GPU once, got {text!r}")
    if problems:
        raise ConfigError(problems)
