"""The servers that a search chooses from, the fleets of them, and their TTFT and TPOT at a load.

A server has a layout that our rules and the memory allow, planned as `build` writes it. A fleet has servers of one
side, SERVER, or of the two sides of a disaggregated pair, each with the pair's own profile.

TPOT, aggregated: a decoding iteration at the mean context, and what the prompts of the other requests of the rank add,
each once while the request decodes: decode(isl + osl / 2) / a + (rows - 1) x (prompt - decode) / osl, with a tokens for
each iteration. A generation server has no such prompts, and waits for the KV cache once.

TTFT: the rest of the iteration that runs, the wait for prompts before, and the prompt itself. The wait is that of an
M/D/1 queue, requests that arrive at random and prompts that take equally long: u x prompt / (2 x (1 - u)) with the
share u of the time that prompts take, and at most all other requests of the rank.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from deepseek_backend.engines.simulated.presets import MTP_3_TOKENS_PER_STEP, PaceTable
from deepseek_backend.engines.simulated.simulated_options import KV_TRANSFER_GBPS
from deepseek_triton_build import (
    DISAGGREGATED,
    SIDE_PROFILES,
    BuildError,
    DisaggregatedRequest,
    Plan,
    PlanRequest,
    make_plan,
)
from deepseek_triton_tools.bench.result import Slo
from deepseek_triton_tools.sla.paces import Json, ServerLayout

TOKENS_PER_STEP = {0: 1.0, 1: 1.92, 2: 2.58, 3: MTP_3_TOKENS_PER_STEP}
"""Draft tokens -> tokens of an iteration, by the table of autoregressive MTP layers in TensorRT-LLM's tech blog 1."""
FEW_USERS = 4
THROUGHPUT_MARGIN = 1.25
LATENCY_MARGIN = 1.6
"""Factors on every computed time: from FEW_USERS + 1 users of a server, and below. They are what the published runs of
8 x H200 and 8 x B200 took longer than AIConfigurator's tables say (docs/sla.md)."""

_MOST_BUSY = 0.9
"""Share of the time that a context server may be busy."""


@dataclass(frozen=True, kw_only=True)
class SlaWorkload:
    """Tokens of each request."""

    isl: int
    osl: int


@dataclass(frozen=True, kw_only=True)
class PacedServer:
    """A server whose iterations are known."""

    table: PaceTable
    max_num_tokens: int
    tokens_per_step: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Times:
    """Computed means of a request in ms, without margin."""

    ttft_ms: float
    tpot_ms: float

    def e2el_ms(self, osl: int) -> float:
        return self.ttft_ms + (osl - 1) * self.tpot_ms


def margin_for(users: int) -> float:
    """The factor on times of a server with so many users."""
    return LATENCY_MARGIN if users <= FEW_USERS else THROUGHPUT_MARGIN


def prompt_ms(server: PacedServer, isl: int, rows: float = 0.0, context: float = 0.0) -> tuple[float, int]:
    """Return the duration of a prompt beside `rows` decoding ones, and in how many iterations it runs."""
    budget = max(1, int(server.max_num_tokens - rows * (1 + server.table.num_draft_tokens)))
    done, chunks, total = 0, 0, 0.0
    while done < isl:
        tokens = min(budget, isl - done)
        total += server.table.step_ms(rows, context, tokens, tokens * (done + tokens / 2))
        done, chunks = done + tokens, chunks + 1
    return total, chunks


def aggregated_times(server: PacedServer, workload: SlaWorkload, rows: int) -> Times:
    """Return the times on a server each rank of which has `rows` requests."""
    isl, osl = workload.isl, workload.osl
    context = isl + osl / 2
    decode = server.table.step_ms(rows, context)
    prompt, chunks = prompt_ms(server, isl, rows - 1, context)
    added = max(0.0, prompt - chunks * decode)
    tpot = decode / server.tokens_per_step + (rows - 1) * added / osl
    # A queue that is full all the time would wait for ever by the formula; with rows limited, it does not.
    busy = min(0.99, rows * prompt / (prompt + osl * tpot))
    wait = min(busy * prompt / (2 * (1 - busy)), (rows - 1) * prompt) if rows > 1 else 0.0
    residual = decode / 2 if rows > 1 else 0.0
    return Times(ttft_ms=residual + wait + prompt, tpot_ms=tpot)


def burst_ttft_ms(server: PacedServer, workload: SlaWorkload, requests: float) -> float:
    """Return the mean TTFT where a rank's requests all come at once: several prompts run in an iteration, and the last
    one waits for all others."""
    tokens = min(server.max_num_tokens, requests * workload.isl)
    iteration = server.table.step_ms(0, 0, tokens, tokens * workload.isl / 2)
    return iteration * (max(1.0, workload.isl / tokens) + requests * workload.isl / tokens) / 2


def generation_tpot_ms(server: PacedServer, workload: SlaWorkload, rows: int) -> float:
    """Return TPOT on a generation server each rank of which has `rows` requests. The first token there waits for the KV
    cache, which comes at KV_TRANSFER_GBPS."""
    decode = server.table.step_ms(rows, workload.isl + workload.osl / 2) / server.tokens_per_step
    transfer = workload.isl * server.table.kv_token_bytes * 8 / (KV_TRANSFER_GBPS * 1e6)
    return decode + transfer / workload.osl


def context_ttft_ms(server: PacedServer, workload: SlaWorkload, busy: float) -> float:
    """Return TTFT on a context server whose ranks are busy for this share of the time."""
    prompt, _ = prompt_ms(server, workload.isl)
    return prompt + busy * prompt / (2 * (1 - busy))


def context_busy(server: PacedServer, workload: SlaWorkload, ttft_ms: float) -> float:
    """Return the largest share of the time that a context server may be busy to keep `ttft_ms`; 0 where it can't."""
    prompt, _ = prompt_ms(server, workload.isl)
    wait = ttft_ms - prompt
    return 0.0 if wait <= 0 else min(_MOST_BUSY, 2 * wait / (prompt + 2 * wait))


SERVER, CONTEXT, GENERATION = "server", "context", "generation"
SIDES = (SERVER, CONTEXT, GENERATION)

_MOST_ROWS = 1024
"""The last point of the tables."""

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
    "cuda_graph_config.max_batch_size",
    "cuda_graph_config.batch_sizes",
    "speculative_config",
    "speculative_config.decoding_type",
    "speculative_config.num_nextn_predict_layers",
)


def searched_settings(overrides: Iterable[tuple[str, Any]]) -> list[str]:
    """Return the keys among the user's own settings that a search chooses itself."""
    return [key for key, _ in overrides if key in _SEARCHED]


@dataclass(frozen=True, kw_only=True)
class ServerCandidate(PacedServer):
    """A server that our rules and the memory allow."""

    side: str
    layout: ServerLayout
    most_rows: int
    """Requests of these lengths that a rank's KV cache holds; of a context server, prompts in an iteration."""
    pace: Json
    """The document that `table` was read from."""


def _settings(side: str, layout: ServerLayout, rows: int, max_num_tokens: int | None = None) -> dict[str, Any]:
    """Return the LLM arguments of a server with `rows` requests of each rank."""
    settings = {
        "enable_attention_dp": layout.attention_dp,
        "moe_expert_parallel_size": layout.expert_parallel_size,
        "max_batch_size": rows,
    }
    if side != CONTEXT:  # which runs prompts, and those without graphs
        settings["cuda_graph_config.max_batch_size"] = rows
    if side != GENERATION and max_num_tokens is not None:  # where no prompt runs
        settings["max_num_tokens"] = max_num_tokens
    return settings


def server_request(
    request: PlanRequest, side: str, layout: ServerLayout, rows: int, max_num_tokens: int | None = None
) -> PlanRequest:
    """Return the request for one server, whose iterations have as many tokens as `max_num_tokens` says."""
    own = _settings(side, layout, rows, max_num_tokens)
    return dataclasses.replace(
        request,
        profile=SIDE_PROFILES.get(side, request.profile),
        num_gpus=layout.num_gpus,
        workload=dataclasses.replace(request.workload, concurrency=rows * layout.num_ranks),
        overrides=tuple({**dict(request.overrides), **own}.items()),
    )


def pair_request(
    request: PlanRequest, context: ServerCandidate, generation: ServerCandidate, rows: int, counts: tuple[int, int]
) -> DisaggregatedRequest:
    """Return the request for context servers, and generation servers with `rows` requests of each rank.

    :param counts: the numbers of context and of generation servers.
    """
    num_context, num_generation = counts
    users = rows * generation.layout.num_ranks * num_generation
    sides = {
        one.side: (
            ("num_gpus", one.layout.num_gpus),
            *_settings(one.side, one.layout, batch, one.max_num_tokens).items(),
        )
        for one, batch in ((context, context.most_rows), (generation, rows))
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


@dataclass(frozen=True, kw_only=True)
class PlannedFleet:
    """Servers at a load. Times and throughput have no margin; `margin` is the factor for both."""

    server: ServerCandidate
    """One of the aggregated or the generation servers."""
    num_servers: int
    rows: int
    """Requests of each rank."""
    users: int
    """Requests of all servers."""
    times: Times
    margin: float
    output_tps: float
    """Output tokens a second of all servers."""
    context: ServerCandidate | None = None
    """One of the context servers; None for an aggregated fleet."""
    num_context: int = 0

    @property
    def num_gpus(self) -> int:
        of_contexts = self.num_context * self.context.layout.num_gpus if self.context else 0
        return self.num_servers * self.server.layout.num_gpus + of_contexts

    @property
    def slow(self) -> Times:
        """The times with the margin on them."""
        return Times(ttft_ms=self.times.ttft_ms * self.margin, tpot_ms=self.times.tpot_ms * self.margin)

    def keeps(self, slo: Slo, osl: int) -> bool:
        """Whether the times keep the limits, with the margin on them."""
        slow = self.slow
        pairs = ((slo.ttft_ms, slow.ttft_ms), (slo.tpot_ms, slow.tpot_ms), (slo.e2el_ms, slow.e2el_ms(osl)))
        return all(limit is None or value <= limit for limit, value in pairs)


def aggregated_fleets(
    candidates: Sequence[ServerCandidate], workload: SlaWorkload, num_gpus: int, rate: float | None = None
) -> Iterator[PlannedFleet]:
    """Yield every aggregated fleet of equal servers, at every load.

    :param rate: requests a second, which decide how many servers there are, with the margin. None: the GPUs do.
    """
    for candidate in candidates:
        layout = candidate.layout
        for rows in range(1, candidate.most_rows + 1):
            times = aggregated_times(candidate, workload, rows)
            users = rows * layout.num_ranks
            own = 1000 * users / times.e2el_ms(workload.osl)
            servers = math.ceil(rate * margin_for(users) / own) if rate else num_gpus // layout.num_gpus
            yield PlannedFleet(
                server=candidate,
                num_servers=servers,
                rows=rows,
                users=users * servers,
                times=times,
                margin=margin_for(users),
                output_tps=own * servers * workload.osl,
            )


def disaggregated_fleets(
    contexts: Sequence[ServerCandidate],
    generations: Sequence[ServerCandidate],
    workload: SlaWorkload,
    num_gpus: int,
    slo: Slo,
    fit: Callable[[ServerCandidate, ServerCandidate], bool],
    rate: float | None = None,
) -> Iterator[PlannedFleet]:
    """Yield the fleets of context and generation servers in every ratio that uses the GPUs and keeps the limit of
    TTFT; for a rate, those with the fewest servers of each kind.

    :param fit: whether a context server can hand over its KV cache to a generation server.
    """
    # Every batch up to 64, then steps of 4 %: neighbours above differ by less than the margin on their times.
    loads_tried, rows = [], 1
    while rows <= _MOST_ROWS:
        loads_tried.append(rows)
        rows += max(1, rows // 25) if rows >= 64 else 1
    for context, busy, prompt in _context_servers(contexts, workload, slo):
        loads = [
            (candidate, rows, generation_tpot_ms(candidate, workload, rows))
            for candidate in generations
            if fit(context, candidate)
            for rows in loads_tried
            if rows <= candidate.most_rows
        ]
        size = context.layout.num_gpus
        # Prompts a second of a context server that keeps TTFT.
        prompts = 1000 * busy * context.layout.num_ranks / prompt
        for candidate, rows, tpot in loads:
            users = rows * candidate.layout.num_ranks
            own = 1000 * users / (workload.osl * tpot)
            if rate:
                needed = rate * margin_for(users)
                counts = [(math.ceil(needed / prompts), math.ceil(needed / own))]
            else:
                counts = [
                    (num, (num_gpus - num * size) // candidate.layout.num_gpus)
                    for num in range(1, num_gpus // size + 1)
                ]
            for num_context, servers in counts:
                most = num_context * prompts
                served = min(own * servers, most) if rate else own * servers
                if 0 < served <= most:
                    ttft = context_ttft_ms(context, workload, busy * served / most)
                    yield PlannedFleet(
                        server=candidate,
                        num_servers=servers,
                        rows=rows,
                        users=users * servers,
                        times=Times(ttft_ms=ttft, tpot_ms=tpot),
                        margin=margin_for(users),
                        output_tps=served * workload.osl,
                        context=context,
                        num_context=num_context,
                    )


def _context_servers(
    candidates: Sequence[ServerCandidate], workload: SlaWorkload, slo: Slo
) -> list[tuple[ServerCandidate, float, float]]:
    """Return for each number of GPUs the context server with most prompts a second, how busy it may be, and the ms of
    a prompt."""
    best: dict[int, tuple[float, ServerCandidate, float, float]] = {}
    limit = slo.ttft_ms / margin_for(1) if slo.ttft_ms is not None else float("inf")
    for candidate in candidates:
        busy = context_busy(candidate, workload, limit)
        prompt, _ = prompt_ms(candidate, workload.isl)
        rate = busy * candidate.layout.num_ranks / prompt
        if rate > best.get(candidate.layout.num_gpus, (0.0,))[0]:
            best[candidate.layout.num_gpus] = rate, candidate, busy, prompt
    return [(candidate, busy, prompt) for _, candidate, busy, prompt in best.values()]


def best_of_each(fleets: Sequence[PlannedFleet], slo: Slo, osl: int, *, fewest: bool = False) -> list[PlannedFleet]:
    """Return the best load of each kind of fleet that keeps the limits, the best fleet first.

    :param fewest: the best has the fewest GPUs, and of those the shortest time; else it serves most tokens.
    """

    def rank(fleet: PlannedFleet) -> tuple[int, float]:
        return fleet.num_gpus if fewest else 0, -fleet.output_tps

    best: dict[object, PlannedFleet] = {}
    for fleet in fleets:
        kind = (fleet.server.layout, fleet.context and fleet.context.layout)
        if fleet.keeps(slo, osl):
            best[kind] = min(best.get(kind, fleet), fleet, key=rank)
    if fewest:
        return sorted(best.values(), key=lambda fleet: (fleet.num_gpus, fleet.slow.e2el_ms(osl)))
    return sorted(best.values(), key=lambda fleet: -fleet.output_tps / fleet.margin)
