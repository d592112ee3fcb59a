"""Deployments whose pace the simulated engine keeps: those that it knows by name, and those that a document describes.

Each named one is a run of "How to get best performance on DeepSeek-R1 in TensorRT LLM" (NVIDIA TensorRT-LLM
documentation), with the limits of its command line. Limits that the command line does not give are TensorRT-LLM's
defaults; max_seq_len is the checkpoint's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from deepseek_backend.engines.simulated.deployment_model import B200, H200, DeploymentModel
from deepseek_backend.engines.simulated.pace_table import read_table
from deepseek_backend.engines.simulated.scheduler import RankLoad

MTP_3_TOKENS_PER_STEP = 2.82
"""Tokens per iteration with three drafts. Source: "Pushing Latency Boundaries: Optimizing DeepSeek-R1 Performance on
NVIDIA B200 GPUs" (TensorRT-LLM tech blog 1), table of autoregressive MTP layers."""


class PacedDeployment(Protocol):
    """The duration of iterations: `DeploymentModel` computes it, `PaceTable` looks it up."""

    @property
    def num_ranks(self) -> int: ...

    @property
    def num_draft_tokens(self) -> int: ...

    @property
    def kv_cache_tokens(self) -> int: ...

    @property
    def kv_token_bytes(self) -> float: ...

    def step_seconds(self, loads: Sequence[RankLoad]) -> float: ...


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A deployment, and the scheduler's limits of each rank."""

    deployment: PacedDeployment
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


_COUNTS = ("num_ranks", "kv_cache_tokens", "max_batch_size", "max_num_tokens", "max_seq_len")
_PARTS = ("title", "source", *_COUNTS, "kv_token_bytes", "num_draft_tokens", "tokens_per_step", "pace")


def find_preset(given: Any) -> Preset | None:
    """Return the preset of a name or a document.

    :raises ValueError: for any other value; it says what is wrong.
    """
    if given is None:
        return None
    if isinstance(given, str) and given in PRESETS:
        return PRESETS[given]
    if not isinstance(given, Mapping):
        raise ValueError(f"expected null or one of {', '.join(PRESETS)}, or a mapping, got {given!r:.100}")
    if set(given) != set(_PARTS):
        raise ValueError(f"expected a mapping with {', '.join(_PARTS)}, got {', '.join(map(str, given))}")
    for name in (*_COUNTS, "num_draft_tokens"):
        least = 0 if name == "num_draft_tokens" else 1
        if not isinstance(given[name], int) or isinstance(given[name], bool) or given[name] < least:
            raise ValueError(f"{name}: expected a whole number from {least}, got {given[name]!r:.100}")
    per_step = given["tokens_per_step"]
    most = 1 + given["num_draft_tokens"]
    if not isinstance(per_step, (int, float)) or isinstance(per_step, bool) or not 1 <= per_step <= most:
        raise ValueError(f"tokens_per_step: expected a number from 1 to {most}, got {per_step!r:.100}")
    token_bytes = given["kv_token_bytes"]
    if not isinstance(token_bytes, (int, float)) or isinstance(token_bytes, bool) or not 0 < token_bytes < math.inf:
        raise ValueError(f"kv_token_bytes: expected a number above 0, got {token_bytes!r:.100}")
    table = read_table(
        given["pace"],
        num_ranks=given["num_ranks"],
        num_draft_tokens=given["num_draft_tokens"],
        kv_cache_tokens=given["kv_cache_tokens"],
        kv_token_bytes=float(token_bytes),
    )
    limits = {name: given[name] for name in ("max_batch_size", "max_num_tokens", "max_seq_len")}
    return Preset(deployment=table, tokens_per_step=float(per_step), **limits)


def preset_name(given: Any) -> str | None:
    """Return how the engine names a preset to clients: a document by its title."""
    return str(given["title"]) if isinstance(given, Mapping) else given
