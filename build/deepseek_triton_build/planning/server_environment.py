"""The environment variables that the server is started with, each with its reason."""

from __future__ import annotations

from collections.abc import Iterable

from deepseek_triton_build.data.planned_settings import EnvironmentVariable
from deepseek_triton_build.data.sources import DEPLOYMENT
from deepseek_triton_build.planning.batch_sizes import Sizes
from deepseek_triton_build.planning.target import Target


def choose_environment(target: Target, sizes: Sizes) -> tuple[EnvironmentVariable, ...]:
    """Return the variables that the server is started with: the recipe's, then those for the GPU and the release."""
    chosen = {variable.name: variable for variable in target.recipe.environment}
    blackwell = target.gpu.architecture == "blackwell"
    if blackwell and not target.supports("pdl_default"):
        chosen.setdefault(
            "TRTLLM_ENABLE_PDL",
            EnvironmentVariable(
                "TRTLLM_ENABLE_PDL",
                "1",
                "programmatic dependent launch, which TensorRT-LLM turns on by itself from 1.2",
                source="TensorRT-LLM release notes 1.2",
            ),
        )
    elif "TRTLLM_ENABLE_PDL" in chosen:
        del chosen["TRTLLM_ENABLE_PDL"]
    if target.release.find_key("cache_transceiver_config.backend"):
        chosen.pop("TRTLLM_USE_UCX_KVCACHE", None)  # the key replaces this variable
    if target.gpu.name == "h200" and (sizes.workload.isl or 0) >= 8192:
        chosen |= {variable.name: variable for variable in _against_fragmentation(target)}
    return tuple(chosen.values())


def _against_fragmentation(target: Target) -> Iterable[EnvironmentVariable]:
    """PyTorch renamed the variable between the containers of TensorRT-LLM 1.0 and 1.2; 1.1 reads either."""
    release = target.release
    names = {"PYTORCH_CUDA_ALLOC_CONF": release.is_before("1.2"), "PYTORCH_ALLOC_CONF": not release.is_before("1.1")}
    for name in (name for name, is_read in names.items() if is_read):
        yield EnvironmentVariable(
            name,
            "max_split_size_mb:8192",
            "keeps PyTorch's allocator from fragmenting memory, which is known to run out at 8K/1K on H200",
            source=DEPLOYMENT,
        )
