"""Engine arguments with which vLLM runs in tests, with a GPU and without one."""

import importlib.metadata

COMMON_ARGUMENTS = {
    "dtype": "bfloat16",
    "block_size": 64,
    "max_model_len": 4096,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 4096,
    "enable_prefix_caching": False,
    "scheduling_policy": "priority",
}


def installed_version():
    return importlib.metadata.version("vllm").partition("+")[0]


def gpu_arguments():
    """A KV cache of a fixed size: vLLM else measures the memory that is free, which other servers change meanwhile."""
    return {"kv_cache_memory_bytes": 4 << 30}


def reference_arguments(**options):
    """The executor with the reference engine's model, with its `options`."""
    return _executor("reference_executor.ReferenceExecutor", options)


def filler_arguments(**options):
    """The executor without a model, with its `options`."""
    return _executor("filler_executor.FillerExecutor", options)


def _executor(name, options):
    return {
        "distributed_executor_backend": f"vllm_without_gpu.{name}",
        "additional_config": options,
        "enforce_eager": True,
    }
