"""Engine arguments with which vLLM runs in tests, with a GPU and without one."""

from __future__ import annotations

import importlib.metadata
from typing import Any


def installed_version() -> str:
    return importlib.metadata.version("vllm").partition("+")[0]


def reference_arguments(**executor: Any) -> dict[str, Any]:
    """The executor with the reference engine's model; `executor` has its options."""
    return _arguments("reference_executor.ReferenceExecutor", executor)


def filler_arguments(**executor: Any) -> dict[str, Any]:
    """The executor without a model."""
    return _arguments("filler_executor.FillerExecutor", executor)


def _arguments(name: str, options: dict[str, Any]) -> dict[str, Any]:
    return {
        "distributed_executor_backend": f"vllm_without_gpu.{name}",
        "additional_config": options,
        "dtype": "bfloat16",
        "block_size": 64,
        "enforce_eager": True,
        "max_model_len": 4096,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 8192,
        "scheduling_policy": "priority",
    }
