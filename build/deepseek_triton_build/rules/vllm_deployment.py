"""A vLLM deployment as its rules look at it: engine arguments, and where they will run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from deepseek_triton_build.arithmetic.gpu_memory import Budget, KvDtype, Layout
from deepseek_triton_build.arithmetic.vllm_memory import vllm_budget
from deepseek_triton_build.data.catalog import Architecture, Gpu, KnownCheckpoint, Variant
from deepseek_triton_build.data.type_strings import fits
from deepseek_triton_build.data.vllm import VllmVersion
from deepseek_triton_build.rules.rule import UnknownFactError

MTP_METHODS = ("mtp", "deepseek_mtp")
"""Values of speculative_config.method for the checkpoint's own MTP layer; the second is the older name."""


@dataclass(frozen=True, kw_only=True)
class VllmDeployment:
    """A set of vLLM's engine arguments and where it will run. A rule that needs an unknown fact finds nothing."""

    settings: Mapping[str, Any]
    """The engine arguments that are given, as dotted paths."""
    unknown: frozenset[str] = frozenset()
    """Arguments that may be given elsewhere, as by a program's flags, so that their defaults don't count."""
    vllm: VllmVersion
    variant: Variant | None = None
    architecture: Architecture | None = None
    checkpoint: KnownCheckpoint | None = None
    gpu: Gpu | None = None
    triton: Mapping[str, Any] = field(default_factory=dict)
    """The settings under triton_config, as dotted paths."""
    isl: int | None = None
    """Input length in tokens that the deployment is made for."""
    concurrency: int | None = None
    """Concurrent requests that the deployment is made for."""
    held_requests: int | None = None
    """Requests of the planned lengths that the instance's KV caches hold."""

    def get(self, key: str) -> Any:
        """Return the value of `key`, or vLLM's default when it is not given.

        :raises UnknownFactError: when it may be given elsewhere.
        """
        if key in self.settings:
            return self.settings[key]
        if key in self.unknown:
            raise UnknownFactError(key)
        found = self.vllm.find(key)
        return None if found is None else found.default

    def well_typed(self) -> VllmDeployment:
        """Return the deployment without the settings whose values are not of their arguments' types."""
        types = {key: found.type for key in self.settings if (found := self.vllm.find(key)) is not None}
        kept = {key: value for key, value in self.settings.items() if key not in types or fits(value, types[key])}
        return self if len(kept) == len(self.settings) else replace(self, settings=kept)

    @cached_property
    def layout(self) -> Layout:
        """How the model is divided; `attention_dp` is vLLM's data parallelism with expert parallelism."""
        tensor, data = self.get("tensor_parallel_size") or 1, self.get("data_parallel_size") or 1
        return Layout(
            tensor_parallel_size=tensor * data,
            expert_parallel_size=tensor * data if self.get("enable_expert_parallel") else 1,
            pipeline_parallel_size=self.get("pipeline_parallel_size") or 1,
            attention_dp=data > 1,
        )

    @property
    def num_draft_tokens(self) -> int:
        """Tokens that are drafted a step by any method; 0 without. MTP drafts one when no number is given."""
        return int(self.get("speculative_config.num_speculative_tokens") or self.has_mtp)

    @property
    def has_mtp(self) -> bool:
        """Whether the checkpoint's own MTP layer drafts."""
        return self.get("speculative_config.method") in MTP_METHODS

    @property
    def num_mtp_tokens(self) -> int:
        """Tokens that the checkpoint's own MTP layer drafts a step; 0 without it."""
        return self.num_draft_tokens if self.has_mtp else 0

    @property
    def max_model_len(self) -> int | None:
        """Tokens of prompt and answer; None where vLLM chooses: by the checkpoint, or with -1 by the memory."""
        longest = self.get("max_model_len")
        return None if longest == -1 else longest

    @property
    def attention_backend(self) -> str:
        """The attention backend in capitals, as vLLM takes any case; empty where vLLM chooses."""
        return str(self.get("attention_backend") or self.get("attention_config.backend") or "").upper()

    @property
    def has_fp8_kv(self) -> bool:
        """Whether the KV cache is FP8, by the settings or, where they leave it open, by the checkpoint."""
        dtype = self.get("kv_cache_dtype")
        if dtype == "auto":
            return self.checkpoint is not None and self.checkpoint.kv_cache_quant_algo == "FP8"
        return str(dtype).startswith("fp8")

    @property
    def kv_dtype(self) -> KvDtype:
        return "fp8" if self.has_fp8_kv else "bf16"

    @property
    def is_sparse(self) -> bool:
        """Whether the model is known to have sparse attention, as V3.2 has."""
        return self.architecture is not None and self.architecture.is_sparse

    def budget(self) -> Budget | None:
        """Return the memory of one GPU; None when the GPU, the architecture or the weights are not known, or limits are
        left to vLLM, whose defaults depend on who starts it."""
        tokens, batch = self.get("max_num_batched_tokens"), self.get("max_num_seqs")
        if self.gpu is None or self.architecture is None or self.checkpoint is None or not tokens or not batch:
            return None
        return vllm_budget(
            self.gpu,
            self.architecture,
            self.checkpoint,
            self.layout,
            gpu_memory_utilization=self.get("gpu_memory_utilization"),
            max_num_batched_tokens=tokens,
            max_num_seqs=batch,
            kv_dtype=self.kv_dtype,
            num_draft_tokens=self.num_draft_tokens,
            mtp=self.has_mtp,
            cuda_graphs=not self.get("enforce_eager"),
        )
