"""The deployment model of the simulated engine, as a source of paces: what a search uses without AIConfigurator."""

from __future__ import annotations

from collections.abc import Sequence

from deepseek_backend.engines.simulated.presets import B200, H200, DeploymentModel
from deepseek_backend.engines.simulated.scheduler import RankLoad
from deepseek_triton_tools.sla.server_layouts import GRID, Json, PacedModel, ServerLayout

_GPUS = {"h200": H200, "b200": B200}
_PRECISIONS = {"fp8": ("fp8", "fp8"), "fp4": ("nvfp4", "bf16")}
"""Precision -> those of experts and attention."""
_ONE_NODE = 8


class ModelPaces:
    """Computed durations, fitted to five published runs on one node; other loads and sizes are extrapolated."""

    source = "the simulated engine's own deployment model (no AIConfigurator)"

    def tables(self, model: PacedModel, layouts: Sequence[ServerLayout]) -> dict[ServerLayout, Json | str]:
        return {layout: self._table(model, layout) for layout in layouts}

    def _table(self, model: PacedModel, layout: ServerLayout) -> Json | str:
        gpu = _GPUS.get(model.gpu)
        if gpu is None or model.architecture != "deepseek-v3" or model.precision not in _PRECISIONS:
            return f"our own model knows DeepSeek-V3 and R1 in fp8 or fp4 on {' or '.join(_GPUS)}"
        if model.precision == "fp4" and model.gpu != "b200":
            return "fp4 needs Blackwell"
        if layout.num_gpus > _ONE_NODE or layout.expert_tensor_size > 1:
            return "our own model knows servers of one node with whole experts on each GPU"
        experts, attention = _PRECISIONS[model.precision]
        deployment = DeploymentModel(
            gpu=gpu,
            num_gpus=layout.num_gpus,
            expert_precision=experts,
            attention_precision=attention,
            kv_precision=model.kv_dtype,
            attention_dp=layout.attention_dp,
            num_draft_tokens=model.num_draft_tokens,
        )

        def step_ms(rows: int, context: int, tokens: int = 0, before: int = 0) -> float:
            pairs = tokens * (before + tokens / 2)
            load = RankLoad(rows, rows * context, tokens, pairs)
            return 1000 * deployment.step_seconds([load] * layout.num_ranks)

        shortest = GRID["contexts"][0]
        return {
            **GRID,
            "decode": [[round(step_ms(rows, c), 2) for c in GRID["contexts"]] for rows in GRID["batches"]],
            "prompt": [
                [round(step_ms(rows, shortest, tokens), 2) for tokens in GRID["tokens"]]
                for rows in GRID["prompt_batches"]
            ],
            "pair_ns": [
                round((step_ms(0, 0, tokens, tokens) - step_ms(0, 0, tokens)) / tokens**2 * 1e6, 3)
                for tokens in GRID["tokens"]
            ],
        }
