"""The search over fleets: which servers, how many, and how many requests on each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from deepseek_triton_tools.bench.figures import Slo
from deepseek_triton_tools.sla.predictions import (
    SlaWorkload,
    Times,
    aggregated_times,
    context_busy,
    context_ttft_ms,
    generation_tpot_ms,
    margin_for,
    prompt_ms,
)
from deepseek_triton_tools.sla.server_candidates import ServerCandidate
from deepseek_triton_tools.sla.server_layouts import ServerLayout


@dataclass(frozen=True, kw_only=True)
class PlannedFleet:
    """Servers for the GPUs given, at a load. Times and throughput have no margin; `margin` is the factor for both."""

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
    def layout(self) -> ServerLayout:
        """Layout of the aggregated or the generation servers."""
        return self.server.layout

    @property
    def num_gpus(self) -> int:
        """GPUs that have work."""
        context = self.context.layout.num_gpus * self.num_context if self.context else 0
        return self.layout.num_gpus * self.num_servers + context

    @property
    def tps_user(self) -> float:
        """Output tokens a second of one user, while its answer is written."""
        return 1000 / self.times.tpot_ms

    def keeps(self, slo: Slo, osl: int) -> bool:
        """Whether the times keep the limits, with the margin on them."""
        times = self.times.slower(self.margin)
        found = (
            (slo.ttft_ms, times.ttft_ms),
            (slo.tpot_ms, times.tpot_ms),
            (slo.e2el_ms, times.e2el_ms(osl)),
        )
        return all(limit is None or value <= limit for limit, value in found)


def aggregated_fleets(
    candidates: Sequence[ServerCandidate], workload: SlaWorkload, num_gpus: int
) -> Iterator[PlannedFleet]:
    """Yield every aggregated fleet of equal servers, at every load."""
    for candidate in candidates:
        layout = candidate.layout
        servers = num_gpus // layout.num_gpus
        for rows in range(1, candidate.most_rows + 1) if servers else ():
            times = aggregated_times(candidate.server, workload, rows)
            users = rows * layout.num_ranks
            yield PlannedFleet(
                server=candidate,
                num_servers=servers,
                rows=rows,
                users=users * servers,
                times=times,
                margin=margin_for(users),
                output_tps=1000 * users * servers * workload.osl / times.e2el_ms(workload.osl),
            )


def disaggregated_fleets(
    contexts: Sequence[ServerCandidate],
    generations: Sequence[ServerCandidate],
    workload: SlaWorkload,
    num_gpus: int,
    slo: Slo,
    fit: Callable[[ServerCandidate, ServerCandidate], bool],
) -> Iterator[PlannedFleet]:
    """Yield the fleets of context and generation servers in every ratio that uses the GPUs and keeps the limit of
    TTFT.

    :param fit: whether a context server can hand over its KV cache to a generation server.
    """
    for context, busy, prompt in _context_servers(contexts, workload, slo):
        loads = [
            (candidate, rows, generation_tpot_ms(candidate.server, workload, rows))
            for candidate in generations
            if fit(context, candidate)
            for rows in _loads(candidate.most_rows)
        ]
        layout = context.layout
        for num_context in range(1, num_gpus // layout.num_gpus + 1):
            left = num_gpus - num_context * layout.num_gpus
            # Prompts a second, while the context servers keep TTFT.
            most = 1000 * busy * layout.num_ranks * num_context / prompt
            for candidate, rows, tpot in loads:
                servers = left // candidate.layout.num_gpus
                users = rows * candidate.layout.num_ranks
                rate = 1000 * servers * users / (workload.osl * tpot)
                if servers and rate <= most:
                    ttft = context_ttft_ms(context.server, workload, busy * rate / most)
                    yield PlannedFleet(
                        server=candidate,
                        num_servers=servers,
                        rows=rows,
                        users=users * servers,
                        times=Times(ttft_ms=ttft, tpot_ms=tpot),
                        margin=margin_for(users),
                        output_tps=rate * workload.osl,
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
        busy = context_busy(candidate.server, workload, limit)
        prompt, _ = prompt_ms(candidate.server, workload.isl)
        rate = busy * candidate.layout.num_ranks / prompt
        if rate > best.get(candidate.layout.num_gpus, (0.0,))[0]:
            best[candidate.layout.num_gpus] = rate, candidate, busy, prompt
    return [(candidate, busy, prompt) for _, candidate, busy, prompt in best.values()]


def _loads(most: int) -> Iterator[int]:
    """Yield every batch up to 64, then steps of 4 %."""
    rows = 1
    while rows <= most:
        yield rows
        rows += max(1, rows // 25) if rows >= 64 else 1


def best_of_each(fleets: Sequence[PlannedFleet], slo: Slo, osl: int) -> list[PlannedFleet]:
    """Return the best load of each kind of fleet that keeps the limits, the best fleet first."""
    best: dict[object, PlannedFleet] = {}
    for fleet in fleets:
        kind = (fleet.layout, fleet.context and fleet.context.layout)
        if fleet.keeps(slo, osl) and (kind not in best or fleet.output_tps > best[kind].output_tps):
            best[kind] = fleet
    return sorted(best.values(), key=lambda fleet: -fleet.output_tps / fleet.margin)
