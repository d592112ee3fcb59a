"""Executors with which vLLM's own AsyncLLM, core process, scheduler and grammars run where there is no GPU.

A module and class of this package is the engine argument `distributed_executor_backend`:
`vllm_without_gpu.reference_executor.ReferenceExecutor` generates with the reference engine's model, and
`vllm_without_gpu.filler_executor.FillerExecutor` makes up tokens without a model. Options of both are in the engine
argument `additional_config` (`executor_options`).

This module is the platform plugin too. It imports nothing of vLLM, which is half imported when it asks.
"""


def platform() -> str:
    """Return the class of the platform that vLLM runs on."""
    return "vllm.platforms.cpu.CpuPlatform"
