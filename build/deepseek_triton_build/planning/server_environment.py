"""The environment variables that the server is started with, and those that it is not, each with its reason."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from deepseek_triton_build.data.planned_settings import DEPLOYMENT, GUIDE, EnvironmentVariable
from deepseek_triton_build.planning.batch_sizes import Sizes
from deepseek_triton_build.planning.target import Target


def choose_environment(target: Target, sizes: Sizes) -> tuple[EnvironmentVariable, ...]:
    """Return the variables that the server is started with: the recipe's, then those for the GPU and the release."""
    chosen = {variable.name: variable for variable in target.recipe.environment}
    if target.gpu.architecture == "blackwell" and not target.supports("pdl_default"):
        chosen.setdefault(_PDL.name, _PDL)
    else:
        chosen.pop(_PDL.name, None)
    if target.release.find_key("cache_transceiver_config.backend"):
        chosen.pop(_UCX, None)  # the key replaces this variable
    if target.gpu.name == "h200" and (sizes.workload.isl or 0) >= 8192:
        chosen |= {variable.name: variable for variable in _against_fragmentation(target)}
    return tuple(chosen.values())


def unset_environment(target: Target, chosen: Iterable[EnvironmentVariable]) -> tuple[EnvironmentVariable, ...]:
    """Return the variables of the guides that the plan leaves unset, with the guides' values and why they are not set.

    :param chosen: the variables that the plan sets.
    """
    names = {variable.name for variable in chosen}
    unset: list[EnvironmentVariable] = []
    if target.gpu.architecture == "blackwell" and _PDL.name not in names:
        unset.append(replace(_PDL, reason="TensorRT-LLM turns it on by itself from 1.2; 0 turns it off"))
    if ucx := [variable for variable in target.recipe.environment if variable.name == _UCX and _UCX not in names]:
        unset.append(replace(ucx[0], reason="cache_transceiver_config.backend says it in this release"))
    if target.gpu.architecture == "hopper" and (target.checkpoint.precision == "fp8" or _USE_NVCC in names):
        unset += _of_deepgemm(uses_nvcc=_USE_NVCC in names)
    return tuple(unset)


_PDL = EnvironmentVariable(
    "TRTLLM_ENABLE_PDL",
    "1",
    "programmatic dependent launch, which TensorRT-LLM turns on by itself from 1.2",
    source="TensorRT-LLM release notes 1.2",
)
_UCX = "TRTLLM_USE_UCX_KVCACHE"
_USE_NVCC = "TRTLLM_DG_JIT_USE_NVCC"
_COMPILER = "TensorRT-LLM cpp/tensorrt_llm/deep_gemm/compiler.cuh"


def _of_deepgemm(*, uses_nvcc: bool) -> Iterable[EnvironmentVariable]:
    """DeepGEMM has the FP8 kernels of Hopper, and compiles them while the server starts."""
    source = f"{GUIDE}, DeepGEMM"
    reason = "DeepGEMM is on by itself; 0 turns it off, if its kernels fail"
    yield EnvironmentVariable("TRTLLM_DG_ENABLED", "1", reason, source=source)
    if uses_nvcc:
        home = "the container's own is used: DeepGEMM runs $CUDA_HOME/bin/nvcc, or without CUDA_HOME the nvcc on PATH"
        dump = "without effect here, because NVCC's kernels are always kept on disk"
    else:
        nvcc = "NVCC makes slightly faster kernels than NVRTC, but needs CUDA 12.3 or later and compiles longer"
        yield EnvironmentVariable(_USE_NVCC, "1", nvcc, source=source)
        home = f"only NVCC needs it, and DeepGEMM compiles with NVRTC unless {_USE_NVCC} is 1"
        dump = "for debugging, and to keep NVRTC's kernels on disk: each start compiles them again otherwise"
    yield EnvironmentVariable("CUDA_HOME", "/usr/local/cuda", home, source=_COMPILER)
    yield EnvironmentVariable("TRTLLM_DG_JIT_DUMP_CUBIN", "1", dump, source=source)
    debug = "for debugging: prints how each kernel is compiled, if DeepGEMM's compiler fails"
    yield EnvironmentVariable("TRTLLM_DG_JIT_DEBUG", "1", debug, source=source)


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
