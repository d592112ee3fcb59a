"""The kernels of DeepSeek-V4-Flash that depend on an iteration's tokens, compiled by all cores at once.

    python tests/gpu/compile_v4_kernels.py TOKENS

vLLM 0.25.1 compiles one when an iteration first has so many tokens: 8 seconds for one of DeepGEMM, 15 for one of
TileLang, and requests wait. They stay in ~/.cache/vllm/deep_gemm and ~/.tilelang. TOKENS is max_num_batched_tokens. The
shapes are the whole model's: with tensor parallelism the engine compiles others.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable

os.environ.setdefault("DG_JIT_CACHE_DIR", os.path.expanduser("~/.cache/vllm/deep_gemm"))

LINEAR = ((1536, 4096), (32768, 1024), (4096, 2048), (4096, 4096), (4096, 8192), (8192, 1024))
"""Outputs and inputs of the FP8 layers."""
GROUPS, GROUP_OUT, GROUP_IN = 8, 1024, 4096
"""Of the output projection."""
HIDDEN, STREAMS, MIXES = 4096, 4, 24
"""Of the hyper-connections."""
BLOCK = 128
PARTS = 3
"""Processes for each shape."""


def tokens_of(most: int) -> list[int]:
    return [*range(8, 129, 8), *range(192, most + 1, 64)]


def num_splits(most: int) -> list[int]:
    """As compute_num_split of vLLM has it for an H200's 132 multiprocessors."""
    return sorted({max(1, min(132 // blocks, 64)) for blocks in range(1, most // 64 + 1)})


def linear(number: int, most: int, part: int) -> None:
    import torch
    from vllm.third_party import deep_gemm

    n, k = LINEAR[number]
    weight = torch.zeros(n, k, device="cuda").to(torch.float8_e4m3fn)
    scales = torch.ones(n // BLOCK, k // BLOCK, device="cuda")
    for m in tokens_of(most)[part::PARTS]:
        a = torch.zeros(m, k, device="cuda").to(torch.float8_e4m3fn)
        out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
        deep_gemm.fp8_gemm_nt((a, torch.ones(m, k // BLOCK, device="cuda")), (weight, scales), out)


def projection(_: int, most: int, part: int) -> None:
    import torch
    from vllm.third_party import deep_gemm

    weight = torch.zeros(GROUPS, GROUP_OUT, GROUP_IN, device="cuda").to(torch.float8_e4m3fn)
    scales = torch.ones(GROUPS, GROUP_OUT // BLOCK, GROUP_IN // BLOCK, device="cuda")
    for m in tokens_of(most)[part::PARTS]:
        a = torch.zeros(m, GROUPS, GROUP_IN, device="cuda").to(torch.float8_e4m3fn)
        out = torch.empty(m, GROUPS, GROUP_OUT, device="cuda", dtype=torch.bfloat16)
        given = a, torch.ones(m, GROUPS, GROUP_IN // BLOCK, device="cuda")
        deep_gemm.fp8_einsum("bhr,hdr->bhd", given, (weight, scales), out, recipe=(1, BLOCK, BLOCK))


def streams(number: int, most: int, _: int) -> None:
    import torch
    from vllm.model_executor.kernels.mhc.tilelang_kernels import mhc_pre_big_fuse_with_norm_tilelang
    from vllm.third_party import deep_gemm

    splits, m = num_splits(most)[number], 64

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype, device="cuda")

    products, squares = empty(splits, m, MIXES), empty(splits, m)
    residual = empty(m, STREAMS, HIDDEN, dtype=torch.bfloat16)
    wide = residual.view(m, STREAMS * HIDDEN)
    deep_gemm.tf32_hc_prenorm_gemm(wide, empty(MIXES, STREAMS * HIDDEN), products, squares, splits)
    mhc_pre_big_fuse_with_norm_tilelang(
        products,
        squares,
        empty(3),
        empty(MIXES),
        residual,
        empty(m, STREAMS),
        empty(m, STREAMS * STREAMS),
        empty(m, HIDDEN, dtype=torch.bfloat16),
        empty(HIDDEN, dtype=torch.bfloat16),
        HIDDEN,
        1e-6,
        1e-6,
        1e-6,
        2.0,
        20,
        1e-6,
        splits,
        STREAMS,
    )


KINDS: dict[str, Callable[[int, int, int], None]] = {"linear": linear, "projection": projection, "streams": streams}


def main() -> int:
    most = int(sys.argv[1])
    if len(sys.argv) > 2:
        KINDS[sys.argv[2]](int(sys.argv[3]), most, int(sys.argv[4]))
        return 0
    jobs = [("streams", number, 0) for number in range(len(num_splits(most)))]
    jobs += [("linear", number, part) for number in range(len(LINEAR)) for part in range(PARTS)]
    jobs += [("projection", 0, part) for part in range(PARTS)]
    began = time.monotonic()
    command = [sys.executable, __file__, str(most)]
    running = [(job, subprocess.Popen([*command, *map(str, job)])) for job in jobs]
    failed = [job for job, process in running if process.wait()]
    print(f"{len(jobs)} processes, {time.monotonic() - began:.0f} s; failed: {failed or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
