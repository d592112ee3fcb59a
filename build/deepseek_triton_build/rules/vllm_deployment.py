"""A vLLM deployment as its rules look at it: engine arguments, and where they will run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from deepseek_triton_build.arithmetic.gpu_memory import Budget, KvDtype, Layout
from deepseek_triton_build.arithmetic.vllm_memory import vllm_budget
from deepseek_triton_build.data.vllm import Argument, VllmVersion
from deepseek_triton_build.rules.rule import AnyDeployment

MTP_METHODS = ("mtp", "deepseek_mtp")
"""Values of speculative_config.method for the checkpoint's own MTP layer; the second is the older name."""


@dataclass(frozen=True, kw_only=True)
class VllmDeployment(AnyDeployment):
    """vLLM's engine arguments."""

    vllm: VllmVersion

    def find(self, key: str) -> Argument | None:
        return self.vllm.find(key)

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
        return self.defaults_to_fp8_kv if dtype == "auto" else str(dtype).startswith("fp8")

    @property
    def kv_dtype(self) -> KvDtype:
        return "fp8" if self.has_fp8_kv else "bf16"

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
