"""Rules E: the environment variables that the server is started with, and the choice of engine."""

from __future__ import annotations

from collections.abc import Iterator

from deepseek_triton_build.data.sources import DEPLOYMENT, GUIDE
from deepseek_triton_build.rules.rule import Deployment, RuleTable, Violation

RULES = RuleTable()
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_LONG_INPUT = 8192


@RULES.note(
    "E001",
    title="With long prompts on H200, the allocator is kept from fragmenting memory",
    why="Running out of memory with prompts of 8K tokens and answers of 1K tokens on H200 is a known issue of "
    "PyTorch's caching allocator.",
    source=f"{DEPLOYMENT}, Troubleshooting Tips",
)
def _allocator(d: Deployment) -> Iterator[Violation]:
    if d.gpu is None or d.gpu.name != "h200" or (d.isl or 0) < _LONG_INPUT:
        return
    if not any("max_split_size_mb" in d.environment.get(name, "") for name in _ALLOCATOR):
        name = _ALLOCATOR[1] if d.is_before("1.2.0") else _ALLOCATOR[0]
        message = f"prompts of {d.isl:,} tokens on H200 fragment PyTorch's memory until it runs out"
        yield Violation(None, message, f"start the server with {name}=max_split_size_mb:8192")


@RULES.warning(
    "E002",
    title="All layers of the model are loaded",
    why="The environment variable TLLM_OVERRIDE_LAYER_NUM is for tests: it leaves layers out, and turns off the "
    "prefetching of weights.",
    source="TensorRT-LLM tensorrt_llm/_torch/models/checkpoints/hf/weight_loader.py",
)
def _layers(d: Deployment) -> Iterator[Violation]:
    layers = d.environment.get("TLLM_OVERRIDE_LAYER_NUM", "0")
    if layers not in ("", "0"):
        message = f"TLLM_OVERRIDE_LAYER_NUM={layers} loads only {layers} of the model's layers: the answers are noise"
        yield Violation(None, message, "remove the variable")


@RULES.note(
    "E003",
    title="DeepGEMM is on for FP8 on Hopper",
    why="It is on by default and faster.",
    source=f"{GUIDE}, DeepGEMM",
)
def _deepgemm(d: Deployment) -> Iterator[Violation]:
    if d.gpu_architecture == "hopper" and d.precision == "fp8" and d.environment.get("TRTLLM_DG_ENABLED") == "0":
        message = "TRTLLM_DG_ENABLED=0 turns off DeepGEMM, the fast FP8 kernels of Hopper"
        yield Violation(None, message, "remove the variable")


@RULES.error(
    "E004",
    title="The PyTorch backend is selected",
    why="Before 1.0 the default is the TensorRT engine, and these settings are not for that engine.",
    source="TensorRT-LLM release notes 1.0; examples/models/core/deepseek_v3/README.md, Serving",
    releases="before 1.0",
)
def _engine(d: Deployment) -> Iterator[Violation]:
    if d.release is not None and d.release.default_backend != "pytorch" and d.get("backend") != "pytorch":
        message = f"TensorRT-LLM {d.release.version} builds a TensorRT engine unless backend is set"
        yield Violation("backend", message, "set backend: pytorch")
