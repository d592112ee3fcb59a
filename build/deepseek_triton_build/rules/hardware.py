"""Rules H: which GPUs, weights and releases go together, under any settings."""

from __future__ import annotations

from collections.abc import Iterator

from deepseek_triton_build.data.planned_settings import GUIDE
from deepseek_triton_build.rules.rule import Deployment, RuleTable, Violation

RULES = RuleTable()


@RULES.error(
    "H001",
    title="The GPU is Hopper or Blackwell",
    why="There are no FP8 kernels for Ampere (SM80, SM86): the model does not load.",
    source=f"{GUIDE}, Hardware Requirements",
    target_only=True,
)
def _ampere(d: Deployment) -> Iterator[Violation]:
    if d.gpu is not None and d.gpu.architecture == "ampere":
        message = f"{d.gpu.title} is Ampere (SM{d.gpu.sm}), where TensorRT-LLM does not run DeepSeek"
        yield Violation(None, message, "use Hopper or Blackwell, for example h200")


@RULES.error(
    "H002",
    title="NVFP4 weights run on Blackwell",
    why="Hopper has no FP4 tensor cores; the hardware table says N/A.",
    source=f"{GUIDE}, Hardware Requirements; model cards of nvidia/DeepSeek-R1-FP4",
    target_only=True,
)
def _nvfp4(d: Deployment) -> Iterator[Violation]:
    if d.gpu is not None and d.precision == "fp4" and d.gpu.architecture != "blackwell":
        message = f"{d.gpu.title} has no FP4 arithmetic: NVFP4 weights need Blackwell"
        yield Violation(None, message, "use the fp8 weights, or b200, gb200 or gb200-nvl72")


@RULES.error(
    "H003",
    title="W4AFP8 weights run on Hopper",
    why="The kernels for INT4 weights with FP8 activations exist for SM90 only, since release 0.20.",
    source=f"{GUIDE}, Hardware Requirements and W4AFP8; NVIDIA/TensorRT-LLM PR 4123; release notes 0.20",
    target_only=True,
)
def _w4a8(d: Deployment) -> Iterator[Violation]:
    if d.gpu is not None and d.precision == "w4a8" and d.gpu.architecture == "blackwell":
        message = f"W4AFP8 weights are supported on Hopper only, not yet on {d.gpu.title}"
        yield Violation(None, message, "use the fp4 weights, or a Hopper GPU")
    elif d.precision == "w4a8" and d.release is not None and d.supports("w4afp8_hopper") is False:
        message = f"TensorRT-LLM {d.release.version} has no kernels for W4AFP8 weights"
        yield Violation(None, message, "use TensorRT-LLM 0.21.0 or newer, or the fp8 weights")


@RULES.error(
    "H004",
    title="W4AFP8 weights belong to V3 or R1",
    why="The hardware table has a W4A8 column for V3 and R1 only.",
    source=f"{GUIDE}, Hardware Requirements",
    target_only=True,
)
def _w4a8_sparse(d: Deployment) -> Iterator[Violation]:
    if d.precision == "w4a8" and d.is_sparse:
        yield Violation(None, "W4AFP8 is for V3 and R1, not for V3.2", "use the fp8 weights")


@RULES.error(
    "H005",
    title="For FP8 weights on Blackwell, the release has the kernels",
    why="The executor stops at start: the FP8 block-scale GEMM of older releases runs on Hopper only.",
    source="NVIDIA/TensorRT-LLM#5064",
    releases="before 1.0",
    target_only=True,
)
def _fp8_blackwell(d: Deployment) -> Iterator[Violation]:
    is_fp8_on_blackwell = d.precision == "fp8" and d.gpu_architecture == "blackwell"
    if d.release is not None and is_fp8_on_blackwell and d.supports("fp8_blackwell") is False:
        message = f"TensorRT-LLM {d.release.version} has no FP8 block-scale kernels for Blackwell"
        yield Violation(None, message, "use TensorRT-LLM 1.0.0 or newer, or the fp4 weights")


@RULES.error(
    "H006",
    title="The release supports the model",
    why="The engine refuses an unknown architecture when the model loads, which is only after the container was "
    "pulled.",
    source="TensorRT-LLM release notes; NVIDIA/TensorRT-LLM PR 8405 (V3.2)",
    releases="before the model's own; V3.2: before 1.2",
    target_only=True,
)
def _release(d: Deployment) -> Iterator[Violation]:
    if d.release is None:
        return
    needed = d.variant.min_release if d.variant is not None else ""
    if needed and d.is_before(needed):
        name = d.variant.name if d.variant is not None else "it"
        message = f"TensorRT-LLM {d.release.version} is too old for {name}"
        yield Violation(None, message, f"use TensorRT-LLM {needed} or newer")
    elif d.is_sparse and d.supports("deepseek_v32") is False:
        message = f"TensorRT-LLM {d.release.version} has no sparse attention, which V3.2 needs"
        yield Violation(None, message, "use TensorRT-LLM 1.2.0 or newer")


@RULES.error(
    "H007",
    title="W4A16 weights belong to vLLM",
    why="TensorRT-LLM's hardware table for DeepSeek has FP8, FP4 and W4AFP8 only.",
    source=f"{GUIDE}, Hardware Requirements",
    target_only=True,
)
def _w4a16(d: Deployment) -> Iterator[Violation]:
    if d.precision == "w4a16":
        message = "TensorRT-LLM does not serve W4A16 weights (AWQ, GPTQ, compressed-tensors) of DeepSeek; vLLM does"
        yield Violation(None, message, "use --engine vllm, or the fp8 weights")
