"""Code for containers that several forms share.

Compiled kernels are kept when a container ends. Without that every start compiles them again, and the first requests of
a new shape wait for seconds (sgl-project/sglang#29170, NVIDIA/TensorRT-LLM pull request 16178).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from deepseek_triton_build.catalog import is_engine_variable, vllm_containers, vllm_image_name
from deepseek_triton_tools.launching.launch_settings import LaunchOptions
from deepseek_triton_tools.repository.launch_facts import LaunchFacts

KERNELS_MOUNT = "/var/cache/deepseek-triton"
"""Path inside containers."""

KERNEL_CACHES: Mapping[str, str] = {
    # cpp/tensorrt_llm/deep_gemm/compiler.cuh; ~/.tensorrt_llm without it.
    "TRTLLM_DG_CACHE_DIR": "tensorrt_llm",
    # The deep_gemm package, which V3.2's indexer uses; ~/.deep_gemm without it.
    "DG_JIT_CACHE_DIR": "deep_gemm",
    # flashinfer/jit/env.py adds .cache/flashinfer to it; ~ without it.
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    # vllm/envs.py; ~/.cache/vllm without it, where torch.compile's graphs are.
    "VLLM_CACHE_ROOT": "vllm",
    # Triton the compiler; ~/.triton/cache without it.
    "TRITON_CACHE_DIR": "triton",
    # torch.compile; /tmp/torchinductor_USER without it.
    "TORCHINDUCTOR_CACHE_DIR": "torchinductor",
    # PTX that the driver has compiled; ~/.nv/ComputeCache without it.
    "CUDA_CACHE_PATH": "cuda",
}
"""Variable -> folder below the one that is kept."""


def engine_variables(environment: Mapping[str, str], *, in_container: bool) -> tuple[dict[str, str], list[str]]:
    """Return the variables of `environment` that are meant for the engine, and the names of those left out.

    A container gets no paths: a folder of this machine, such as its CUDA_HOME, is another one there, or none.
    """
    found = {name: value for name, value in environment.items() if is_engine_variable(name)}
    if not in_container:
        return found, []
    paths = [name for name, value in found.items() if value.startswith("/")]
    kept = {name: value for name, value in found.items() if name not in paths}
    return kept, [name for name in paths if name not in KERNEL_CACHES]


def image_of(facts: LaunchFacts, options: LaunchOptions) -> str:
    """Return the image's name; "" for an engine that was planned for no container."""
    return options.image or facts.image or ""


def no_image(facts: LaunchFacts) -> str:
    """Return why there is no image, and how to come by one."""
    if facts.vllm is None:
        return (
            f"the {facts.engine} engine was planned for no container: name with --image one that has tritonserver and "
            "the engine's packages"
        )
    base = vllm_image_name(next(iter(vllm_containers())))
    return (
        f"no Triton container has vLLM {facts.vllm}: build an image of two lines, FROM {base} and RUN pip install "
        f"vllm=={facts.vllm}, and name it with --image"
    )


def transports(facts: LaunchFacts) -> str:
    """Return what takes /dev/shm besides tritonserver's Python backend."""
    return "NCCL and vLLM's message queues" if facts.vllm else "NCCL and Open MPI"


def too_few_gpus(facts: LaunchFacts, num_gpus: int) -> Iterator[str]:
    """Yield a reason to refuse: a rank without a GPU would fail only after the other ranks have loaded."""
    if num_gpus < facts.gpus_per_node:
        yield f"--gpus: {facts.source} takes {facts.gpus_per_node} GPUs of each node, got {num_gpus}"


def kernel_environment() -> dict[str, str]:
    """Return the variables that let all compilers keep their kernels below KERNELS_MOUNT."""
    return {variable: f"{KERNELS_MOUNT}/{name}" for variable, name in KERNEL_CACHES.items()}


def cache_folder(image: str, gpu: str | None, root: Path | None = None) -> Path:
    """Return the folder for one image and one GPU: kernels of one image's compilers must not be loaded in another.

    :param root: the folder above it; ~/.cache/deepseek-triton/kernels unless given.
    """
    if root is None:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "deepseek-triton/kernels")
    return Path(os.path.abspath(root), re.sub(r"[^\w.-]+", "_", f"{image}-{gpu or 'cpu'}"))


def kernel_folder(facts: LaunchFacts, options: LaunchOptions) -> Path:
    """Return the folder on this machine in which compiled kernels are kept."""
    return cache_folder(image_of(facts, options), facts.gpu, options.cache_dir)


def created_folders(facts: LaunchFacts, options: LaunchOptions) -> list[str]:
    """Return the folders that are mounted and that the rendered script creates if they don't exist."""
    folders = [str(kernel_folder(facts, options))]
    if facts.serving and facts.serving.names:
        folders.append(facts.serving.hub_cache)
    if options.ready_file:
        folders.append(os.path.dirname(os.path.abspath(options.ready_file)))
    return folders
