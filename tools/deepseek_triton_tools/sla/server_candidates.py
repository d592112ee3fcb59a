"""The servers that a search chooses from: layouts that our rules and the memory allow, planned as `build` writes them.

A fleet has servers of one side, SERVER, or of the two sides of a disaggregated pair, each with the pair's own profile.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from deepseek_triton_build import (
    DISAGGREGATED,
    SIDE_PROFILES,
    BuildError,
    DisaggregatedRequest,
    Plan,
    PlanRequest,
    make_plan,
)
from deepseek_triton_tools.sla.predictions import PacedServer
from deepseek_triton_tools.sla.server_layouts import Json, ServerLayout

SERVER, CONTEXT, GENERATION = "server", "context", "generation"
SIDES = (SERVER, CONTEXT, GENERATION)

_MOST_ROWS = 1024
"""The last point of the tables."""

_GRAPHS = "cuda_graph_config.max_batch_size"
_SEARCHED = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "context_parallel_size",
    "enable_attention_dp",
    "moe_expert_parallel_size",
    "moe_tensor_parallel_size",
    "moe_cluster_parallel_size",
    "max_batch_size",
    "cuda_graph_config",
    _GRAPHS,
    "cuda_graph_config.batch_sizes",
    "speculative_config",
    "speculative_config.decoding_type",
    "speculative_config.num_nextn_predict_layers",
)


def searched_settings(overrides: Iterable[tuple[str, Any]]) -> list[str]:
    """Return the keys among the user's own settings that a search chooses itself."""
    return [key for key, _ in overrides if key in _SEARCHED]


@dataclass(frozen=True, kw_only=True)
class ServerCandidate:
    """A server that our rules and the memory allow."""

    side: str
    layout: ServerLayout
    server: PacedServer
    most_rows: int
    """Requests of these lengths that a rank's KV cache holds; of a context server, prompts in an iteration."""
    pace: Json
    """The table that `server` was made of."""

    def settings(self, rows: int) -> dict[str, Any]:
        """Return the LLM arguments by which `build` writes what was planned, for `rows` requests of each rank."""
        settings = _layout_settings(self.side, self.layout, rows)
        if self.side != GENERATION:  # where no prompt runs
            settings["max_num_tokens"] = self.server.max_num_tokens
        return settings


def _layout_settings(side: str, layout: ServerLayout, rows: int) -> dict[str, Any]:
    settings = {
        "enable_attention_dp": layout.attention_dp,
        "moe_expert_parallel_size": layout.expert_parallel_size,
        "max_batch_size": rows,
    }
    return settings if side == CONTEXT else {**settings, _GRAPHS: rows}


def server_request(
    request: PlanRequest, side: str, layout: ServerLayout, rows: int, settings: dict[str, Any] | None = None
) -> PlanRequest:
    """Return the request for one server, with the layout's settings unless others are given."""
    own = _layout_settings(side, layout, rows) if settings is None else settings
    return dataclasses.replace(
        request,
        profile=SIDE_PROFILES.get(side, request.profile),
        num_gpus=layout.num_gpus,
        workload=dataclasses.replace(request.workload, concurrency=rows * layout.num_ranks),
        overrides=tuple({**dict(request.overrides), **own}.items()),
    )


def pair_request(
    request: PlanRequest,
    context: ServerCandidate,
    generation: ServerCandidate,
    rows: int,
    *,
    num_context: int = 1,
    num_generation: int = 1,
) -> DisaggregatedRequest:
    """Return the request for context servers, and generation servers with `rows` requests of each rank."""
    users = rows * generation.layout.num_ranks * num_generation
    sides = {
        candidate.side: (("num_gpus", candidate.layout.num_gpus), *candidate.settings(batch).items())
        for candidate, batch in ((context, context.most_rows), (generation, rows))
    }
    return DisaggregatedRequest(
        both=dataclasses.replace(
            request,
            profile=DISAGGREGATED,
            num_gpus=None,
            workload=dataclasses.replace(request.workload, concurrency=users),
        ),
        num_context=num_context,
        num_generation=num_generation,
        **sides,
    )


def fitting_rows(request: PlanRequest, side: str, layout: ServerLayout) -> tuple[Plan, int]:
    """Return a plan of the layout and how many requests each of its ranks has at most; 0 where it holds none.

    :raises BuildError: where our rules or the memory refuse the layout.
    """
    plan = make_plan(server_request(request, side, layout, 1))
    if side == CONTEXT:
        prompts = plan.canonical["max_num_tokens"] // (request.workload.isl or 1)
        rows = min(_held_rows(plan), max(1, prompts))
        return (plan if rows <= 1 else make_plan(server_request(request, side, layout, rows))), rows
    rows = _held_rows(plan)
    while rows > 1:
        # A larger batch needs more CUDA graphs and a larger sampler, which leave less for the KV cache.
        try:
            plan = make_plan(server_request(request, side, layout, rows))
        except BuildError:
            rows //= 2
            continue
        held = _held_rows(plan)
        if held >= rows:
            break
        rows = max(1, held)
    return plan, rows


def _held_rows(plan: Plan) -> int:
    """Return the requests that the KV cache of a rank holds, at most those of the tables."""
    assert plan.budget is not None  # a plan for GPUs
    asked = plan.request.workload
    return min(_MOST_ROWS, plan.budget.kv_tokens // ((asked.isl or 1) + (asked.osl or 1)))
