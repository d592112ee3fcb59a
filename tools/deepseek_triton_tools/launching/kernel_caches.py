"""Compiled kernels, kept when a container ends. Without that every start compiles them again, and the first requests of
a new shape wait for seconds (sgl-project/sglang#29170, NVIDIA/TensorRT-LLM pull request 16178)."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

MOUNTED_AT = "/var/cache/deepseek-triton"
"""Path inside containers."""

CACHES: Mapping[str, str] = {
    # cpp/tensorrt_llm/deep_gemm/compiler.cuh; ~/.tensorrt_llm without it.
    "TRTLLM_DG_CACHE_DIR": "tensorrt_llm",
    # The deep_gemm package, which V3.2's indexer uses; ~/.deep_gemm without it.
    "DG_JIT_CACHE_DIR": "deep_gemm",
    # flashinfer/jit/env.py adds .cache/flashinfer to it; ~ without it.
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    # Triton the compiler; ~/.triton/cache without it.
    "TRITON_CACHE_DIR": "triton",
    # torch.compile; /tmp/torchinductor_USER without it.
    "TORCHINDUCTOR_CACHE_DIR": "torchinductor",
    # PTX that the driver has compiled; ~/.nv/ComputeCache without it.
    "CUDA_CACHE_PATH": "cuda",
}
"""Variable -> folder below the one that is kept."""


def environment() -> dict[str, str]:
    """Return the variables that let all compilers keep their kernels below MOUNTED_AT."""
    return {variable: f"{MOUNTED_AT}/{name}" for variable, name in CACHES.items()}


def cache_folder(image: str, gpu: str | None, root: Path | None = None) -> Path:
    """Return the folder for one image and one GPU: kernels of one image's compilers must not be loaded in another.

    :param root: the folder above it; ~/.cache/deepseek-triton/kernels unless given.
    """
    if root is None:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "deepseek-triton/kernels")
    return Path(os.path.abspath(root), re.sub(r"[^\w.-]+", "_", f"{image}-{gpu or 'cpu'}"))
