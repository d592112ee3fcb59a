"""Generates with the reference engine's model and sampler, behind vLLM's scheduler."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.outputs import DraftTokenIds

from vllm_without_gpu.device_executor import DeviceExecutor
from vllm_without_gpu.made_tokens import MadeTokens

_BACKEND = Path(__file__).resolve().parents[4] / "model_repository/tensorrt_llm/1"
"""Folder of deepseek_backend with all its engines; a repository of vLLM holds vLLM's alone."""


class ReferenceExecutor(DeviceExecutor):
    """Tokens are those of the reference engine for the same fields, its random ones too."""

    def load(self) -> None:
        # Here, because the backend's process also imports this module, and has its own deepseek_backend.
        sys.path.insert(0, str(_BACKEND))
        from vllm_without_gpu.reference_batch import ReferenceBatch

        drafts = self.speculative_config
        self._batch = ReferenceBatch(
            Path(self.model_config.model),
            max_num_seqs=self.scheduler_config.max_num_seqs,
            num_drafts=drafts.num_speculative_tokens if drafts else 0,
        )

    def generate(self, scheduled: SchedulerOutput, grammar: GrammarOutput | None) -> Mapping[str, MadeTokens]:
        return self._batch.iterate(scheduled, grammar)

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        drafts = self._batch.drafts()
        return DraftTokenIds(list(drafts), list(drafts.values()))
