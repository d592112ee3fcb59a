"""What the user asks for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from deepseek_triton_build.data.catalog.profiles import ANY_WORKLOAD, DEFAULT_PROFILE, Workload
from deepseek_triton_build.data.releases import DEFAULT_RELEASE as DEFAULT_RELEASE

ENGINES = ("tensorrt_llm", "transformers", "simulated")


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What a plan is made for. Hashable: plans are cached."""

    variant: str
    gpu: str | None = None
    num_gpus: int | None = None
    """GPUs of one model instance. None: the recipe's number, or else the fewest published."""
    precision: str | None = None
    """None: FP4 on Blackwell where the variant has it, else FP8."""
    profile: str = DEFAULT_PROFILE
    release: str = DEFAULT_RELEASE
    container: str | None = None
    """Tag (26.07) of the Triton container it will run in. None: the newest with the release."""
    workload: Workload = ANY_WORKLOAD
    mtp: int | None = None
    """MTP layers, 0 for none. None: the recipe's."""
    relaxed_acceptance: bool = False
    kv_dtype: Literal["auto", "fp8"] | None = None
    """None: FP8 where it is supported. "auto" is the checkpoint's own."""
    pipeline_parallel_size: int = 1
    engine: str | None = None
    """None: the variant's own."""
    preset: str | None = None
    """A deployment for the simulated engine to pace itself by."""
    model: str | None = None
    """A checkpoint's folder, or a name, instead of the variant's Hugging Face name."""
    allow_unpublished: bool = False
    """Plan what fits by arithmetic though nobody has published it."""
    overrides: tuple[tuple[str, Any], ...] = ()
    """LLM arguments (under the release's keys) or triton_config.* settings of the user's own, applied last."""
