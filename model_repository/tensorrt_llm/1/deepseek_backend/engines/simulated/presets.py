"""Deployments that the simulated engine knows by name.

Each one is a run of "How to get best performance on DeepSeek-R1 in TensorRT LLM" (NVIDIA TensorRT-LLM documentation),
with the limits of its command line. Limits that the command line does not give are TensorRT-LLM's defaults; max_seq_len
is the checkpoint's.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from deepseek_backend.engines.simulated.deployment_model import B200, H200, DeploymentModel

MTP_3_TOKENS_PER_STEP = 2.82
"""Tokens per iteration with three drafts. Source: "Pushing Latency Boundaries: Optimizing DeepSeek-R1 Performance on
NVIDIA B200 GPUs" (TensorRT-LLM tech blog 1), table of autoregressive MTP layers."""


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A deployment, and the scheduler's limits of each rank."""

    deployment: DeploymentModel
    max_batch_size: int
    max_num_tokens: int = 8192
    max_seq_len: int = 163840
    tokens_per_step: float = 1.0


_b200_fp4 = partial(DeploymentModel, gpu=B200, expert_precision="nvfp4", attention_precision="bf16")
_h200_fp8 = partial(DeploymentModel, gpu=H200, expert_precision="fp8", attention_precision="fp8", kv_precision="bf16")

PRESETS = {
    "b200x8-r1-fp4-min-latency": Preset(
        deployment=_b200_fp4(kv_precision="bf16", num_draft_tokens=3),
        max_batch_size=1,
        tokens_per_step=MTP_3_TOKENS_PER_STEP,
    ),
    "b200x8-r1-0528-fp4-fp8kv-max-throughput": Preset(
        deployment=_b200_fp4(kv_precision="fp8", attention_dp=True, kv_memory_fraction=0.93),
        max_batch_size=896,
        max_num_tokens=2048,
    ),
    "b200x8-r1-fp4-max-throughput": Preset(
        deployment=_b200_fp4(kv_precision="bf16", attention_dp=True, kv_memory_fraction=0.85),
        max_batch_size=384,
        max_num_tokens=1536,
    ),
    "h200x8-r1-fp8-min-latency": Preset(
        deployment=_h200_fp8(num_draft_tokens=3), max_batch_size=1, tokens_per_step=MTP_3_TOKENS_PER_STEP
    ),
    "h200x8-r1-fp8-max-throughput": Preset(
        deployment=_h200_fp8(attention_dp=True, kv_memory_fraction=0.8), max_batch_size=128, max_num_tokens=1151
    ),
}
