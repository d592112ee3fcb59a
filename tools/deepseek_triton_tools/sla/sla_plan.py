"""The whole search of a plan to an SLA: paces, candidates, the best fleets, and the commands that build the best."""

import dataclasses
import json
import os
import shlex
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from deepseek_backend.engines.simulated.presets import read_table
from deepseek_triton_build import (
    DISAGGREGATED,
    BuildError,
    DisaggregatedPlan,
    Plan,
    PlanRequest,
    build_options,
    make_disaggregated_plan,
    make_plan,
    pair_options,
    usable_formats,
)
from deepseek_triton_tools.bench.result import Slo
from deepseek_triton_tools.host.whole_file import whole_file
from deepseek_triton_tools.sla.fleets import (
    CONTEXT,
    GENERATION,
    SERVER,
    SIDES,
    TOKENS_PER_STEP,
    PlannedFleet,
    ServerCandidate,
    SlaWorkload,
    aggregated_fleets,
    best_of_each,
    burst_ttft_ms,
    disaggregated_fleets,
    fitting_rows,
    pair_request,
    server_request,
)
from deepseek_triton_tools.sla.paces import (
    ENVIRONMENT_VARIABLE,
    HOW_TO_INSTALL,
    ModelPaces,
    PacedModel,
    ServerLayout,
    SiliconPaces,
    layouts_up_to,
)
from deepseek_triton_tools.terminal.output_streams import print_json, to_reader
from deepseek_triton_tools.terminal.tables import Table, paragraph, show
from deepseek_triton_tools.tool_errors import ToolError

_SHOWN_FLEETS = 8
_LARGEST_SERVER = 32
"""GPUs, where a rate decides how many servers there are."""
_HEADINGS = (
    "fleet",
    "GPUs",
    "users",
    "tokens/s/GPU",
    "with margin",
    "TTFT ms",
    "with margin",
    "TTFT at once",
    "TPOT ms",
    "with margin",
    "margin",
)


@dataclass(frozen=True, kw_only=True)
class SlaPlan:
    """The answer of a search."""

    request: PlanRequest
    slo: Slo
    workload: SlaWorkload
    source: str
    """Where the paces come from."""
    notes: list[str]
    """How to get better ones."""
    fleets: list[PlannedFleet]
    """The best load of each kind of fleet that keeps the limits, the best fleet first."""
    refused: dict[str, str]
    """Layout, with its side in a pair, or both layouts of a pair -> why it was left out."""
    rate: float | None = None
    """Requests a second that the fleets must serve, with the margin; None where the GPUs are given."""

    @property
    def num_gpus(self) -> int:
        """The GPUs given, or those that the best fleet needs for the rate."""
        return self.request.num_gpus or self.fleets[0].num_gpus

    def tps_per_gpu(self, fleet: PlannedFleet) -> float:
        return fleet.output_tps / (self.request.num_gpus or fleet.num_gpus)

    def requests_per_s(self, fleet: PlannedFleet) -> float:
        """Return the most that the fleet serves within the limits, with the margin."""
        return fleet.output_tps / fleet.margin / self.workload.osl

    def burst_ttft_ms(self, fleet: PlannedFleet) -> float:
        """Return the mean TTFT of a fleet, without margin, where all its requests come at once."""
        if fleet.context is None:
            return burst_ttft_ms(fleet.server, self.workload, fleet.rows)
        requests = fleet.users / (fleet.num_context * fleet.context.layout.num_ranks)
        return burst_ttft_ms(fleet.context, self.workload, requests)

    @cached_property
    def built(self) -> Plan | DisaggregatedPlan:
        """The plan from which `build` writes the best fleet: of its servers, or of a pair."""
        best = self.fleets[0]
        if best.context is None:
            server = best.server
            return make_plan(
                server_request(self.request, SERVER, server.layout, best.rows, max_num_tokens=server.max_num_tokens)
            )
        counts = (best.num_context, best.num_servers)
        return make_disaggregated_plan(pair_request(self.request, best.context, best.server, best.rows, counts))

    @property
    def build_command(self) -> str:
        """The command that writes the best fleet's servers: one repository, or a pair."""
        if isinstance(plan := self.built, DisaggregatedPlan):
            return f"deepseek-triton build {pair_options(plan, format=usable_formats(plan.context)[0])} --output pair"
        return f"deepseek-triton build {build_options(plan, format=usable_formats(plan)[0])} --output server"

    def rehearsal_command(self, paces: Path) -> str:
        """The command that builds the best fleet on the simulated engine, with the paces that were written there."""
        best = self.fleets[0]
        counts = ["--context-servers", best.num_context, "--generation-servers", best.num_servers]
        pair = ["--profile", DISAGGREGATED, *counts] if best.context else []
        words = ["build", "tiny", "--engine", "simulated", *pair, "--preset", paces, "--output", "rehearsal"]
        return shlex.join(["deepseek-triton", *map(str, words)])

    def write_paces(self, folder: Path) -> None:
        """Write what the simulated engine takes as its preset, for each kind of server of the best fleet: server.json,
        or context.json and generation.json. Raises ToolError where it can't."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ToolError(f"{folder} can't be made: {error.strerror}") from error
        best, built = self.fleets[0], self.built
        plans = built.sides if isinstance(built, DisaggregatedPlan) else {SERVER: built}
        servers = {SERVER: best.server, CONTEXT: best.context, GENERATION: best.server}
        for name in set(SIDES) - plans.keys():  # of an earlier plan of the other kind
            (folder / f"{name}.json").unlink(missing_ok=True)
        for name, plan in plans.items():
            found = servers[name]
            assert found is not None  # a pair has context servers
            assert plan.budget is not None  # a plan for GPUs
            preset = {
                "title": f"{self.request.variant} on {found.layout.num_gpus} x {self.request.gpu}, {found.layout}",
                "source": self.source,
                "num_ranks": found.layout.num_ranks,
                "kv_cache_tokens": plan.budget.kv_tokens,
                "kv_token_bytes": plan.budget.kv_bytes_per_token,
                "max_batch_size": plan.canonical["max_batch_size"],
                "max_num_tokens": plan.canonical["max_num_tokens"],
                "max_seq_len": plan.budget.kv_tokens,
                "num_draft_tokens": found.table.num_draft_tokens,
                "tokens_per_step": found.tokens_per_step,
                "pace": found.pace,
            }
            with whole_file(folder / f"{name}.json") as file:
                json.dump(preset, file)


def plan_to_sla(request: PlanRequest, slo: Slo, python: Path | None, rate: float | None = None) -> SlaPlan:
    """Search the fleets for `request.num_gpus` GPUs, or the fewest GPUs that serve `rate` requests a second.

    :param python: a Python that has aiconfigurator-core, or the folder of its environment. None: the environment
        variable's, else our own model's paces.
    :raises ToolError: when no fleet keeps the limits; it says how near the nearest comes.
    """
    if python is None and (named := os.environ.get(ENVIRONMENT_VARIABLE)):
        python = Path(named)
    if python is not None and python.is_dir():
        python /= "bin/python"
    paces = SiliconPaces(python) if python else ModelPaces()
    workload = SlaWorkload(isl=request.workload.isl or 1, osl=request.workload.osl or 1)
    num_gpus = request.num_gpus or _LARGEST_SERVER
    request = dataclasses.replace(request, mtp=request.mtp or 0)
    candidates, refused, request = _candidates(request, paces)

    def fit(context: ServerCandidate, generation: ServerCandidate) -> bool:
        try:
            make_disaggregated_plan(pair_request(request, context, generation, generation.most_rows, (1, 1)))
        except BuildError as error:
            refused[f"{context.layout} context + {generation.layout}"] = str(error)
            return False
        return True

    of_side = {side: [candidate for candidate in candidates if candidate.side == side] for side in SIDES}
    pairs = disaggregated_fleets(of_side[CONTEXT], of_side[GENERATION], workload, num_gpus, slo, fit, rate)
    fleets = [*aggregated_fleets(of_side[SERVER], workload, num_gpus, rate), *pairs]
    if not (best := best_of_each(fleets, slo, workload.osl, fewest=rate is not None)):
        raise ToolError(_none_keeps(fleets, refused, rate))
    notes = [] if python else [f"for measured paces: {HOW_TO_INSTALL}"]
    return SlaPlan(
        request=request,
        slo=slo,
        workload=workload,
        source=paces.source,
        notes=notes,
        fleets=best,
        refused=refused,
        rate=rate,
    )


def _candidates(
    request: PlanRequest, paces: SiliconPaces | ModelPaces
) -> tuple[list[ServerCandidate], dict[str, str], PlanRequest]:
    """Return the servers that are allowed, why others are not, and the request with its precision."""
    refused: dict[str, str] = {}
    fitting: dict[PacedModel, list[tuple[str, ServerLayout, Plan, int]]] = {}
    for layout in layouts_up_to(request.num_gpus or _LARGEST_SERVER):
        for side in SIDES:
            try:
                plan, rows = fitting_rows(request, side, layout)
            except BuildError as error:
                refused[_name(side, layout)] = str(error)
                continue
            assert plan.gpu is not None
            assert plan.checkpoint is not None
            assert plan.variant.architecture is not None
            model = PacedModel(
                architecture=plan.variant.architecture.name,
                precision=plan.checkpoint.precision,
                gpu=plan.gpu.name,
                kv_dtype="fp8" if plan.has_fp8_kv else "bf16",
                num_draft_tokens=request.mtp or 0,
            )
            fitting.setdefault(model, []).append((side, layout, plan, rows))
            request = dataclasses.replace(request, precision=plan.precision)
    candidates = []
    for model, servers in fitting.items():
        tables = paces.tables(model, list(dict.fromkeys(layout for _, layout, _, _ in servers)))
        for side, layout, plan, rows in servers:
            table = tables[layout]
            if isinstance(table, str):
                refused[_name(side, layout)] = table
                continue
            assert plan.budget is not None
            read = read_table(
                table,
                num_ranks=layout.num_ranks,
                num_draft_tokens=model.num_draft_tokens,
                kv_cache_tokens=plan.budget.kv_tokens,
                kv_token_bytes=plan.budget.kv_bytes_per_token,
            )
            if rows:
                candidates.append(
                    ServerCandidate(
                        table=read,
                        max_num_tokens=plan.canonical["max_num_tokens"],
                        tokens_per_step=TOKENS_PER_STEP[model.num_draft_tokens],
                        side=side,
                        layout=layout,
                        most_rows=rows,
                        pace=table,
                    )
                )
    return candidates, refused, request


def _name(side: str, layout: ServerLayout) -> str:
    return str(layout) if side == SERVER else f"{side} {layout}"


def _none_keeps(fleets: list[PlannedFleet], refused: dict[str, str], rate: float | None) -> str:
    if not fleets:
        layouts = {said: name for name, said in reversed(refused.items())}
        why = "; ".join(f"{name}: {said}" for said, name in list(layouts.items())[:2])
        unknown = f"how many GPUs serve {rate:g} requests/s is unknown: " if rate else ""
        return f"{unknown}no layout can be searched: {why}"
    fastest = min(fleets, key=lambda fleet: fleet.slow.tpot_ms)
    first = min(fleets, key=lambda fleet: fleet.slow.ttft_ms)
    return (
        f"no fleet keeps the limits: with their margins, the shortest TPOT is {fastest.slow.tpot_ms:.1f} ms "
        f"({fastest.server.layout}) and the shortest TTFT {first.slow.ttft_ms:.0f} ms ({first.server.layout}); "
        f"raise --sla{'' if rate else ', or give more GPUs'}"
    )


def show_sla_plan(plan: SlaPlan, *, as_json: bool, paces: Path | None = None) -> None:
    """Print the search.

    :param paces: the folder that its paces were written to.
    """
    with to_reader():
        if as_json:
            print_json(_document(plan, paces))
            return
        rows = [_cells(plan, fleet) for fleet in plan.fleets[:_SHOWN_FLEETS]]
        search = f"{plan.request.variant} on {plan.num_gpus} x {plan.request.gpu}"
        lengths = f"{plan.workload.isl:,} + {plan.workload.osl:,} tokens"
        order = "the fewest GPUs" if plan.rate else "the best"
        title = f"{search}, {lengths}: {order} first; limits are kept with the margin"
        show(Table(title=title, headings=_HEADINGS, rows=rows))
        print(paragraph(f"paces: {plan.source}"))
        for note in plan.notes:
            print(paragraph(note))
        if plan.refused:
            print(paragraph(f"{len(plan.refused)} layouts were left out; --json says why"))
        best = plan.fleets[0]
        if plan.rate:
            most = f"the first fleet keeps the limits up to {plan.requests_per_s(best):,.1f}"
            print(paragraph(f"{plan.rate:,g} requests/s need {best.num_gpus:,} GPUs or more; {most}"))
        pair = f"context servers: {best.num_context}, generation servers: {best.num_servers}"
        print(paragraph(f"{pair if best.context else f'servers: {best.num_servers}'}: {plan.build_command}"))
        if paces is not None:
            print(paragraph(f"rehearse it: {plan.rehearsal_command(paces)}"))


def _document(plan: SlaPlan, paces: Path | None = None) -> dict[str, Any]:
    """The search as JSON; docs/sla.md describes it."""
    return {
        "variant": plan.request.variant,
        "gpu": plan.request.gpu,
        "gpus": plan.num_gpus,
        "rate": plan.rate,
        "precision": plan.request.precision,
        "workload": dataclasses.asdict(plan.workload),
        "limits": dataclasses.asdict(plan.slo),
        "source": plan.source,
        "fleets": [
            {
                "layout": str(fleet.server.layout),
                "servers": fleet.num_servers,
                "context_layout": str(fleet.context.layout) if fleet.context else None,
                "context_servers": fleet.num_context,
                "requests_per_rank": fleet.rows,
                "users": fleet.users,
                "gpus_used": fleet.num_gpus,
                "requests_per_s": round(plan.requests_per_s(fleet), 3),
                "ttft_ms": round(fleet.times.ttft_ms, 1),
                "burst_ttft_ms": round(plan.burst_ttft_ms(fleet), 1),
                "tpot_ms": round(fleet.times.tpot_ms, 2),
                "output_tps": round(fleet.output_tps, 1),
                "output_tps_per_gpu": round(plan.tps_per_gpu(fleet), 1),
                "margin": fleet.margin,
            }
            for fleet in plan.fleets
        ],
        "build": plan.build_command,
        "rehearsal": plan.rehearsal_command(paces) if paces is not None else None,
        "notes": plan.notes,
        "refused": plan.refused,
    }


def _cells(plan: SlaPlan, fleet: PlannedFleet) -> tuple[str, ...]:
    """The cells under _HEADINGS."""
    slow, tps = fleet.slow, plan.tps_per_gpu(fleet)
    name = f"{fleet.num_servers} x {fleet.server.layout}, {fleet.rows} a rank"
    if fleet.context:
        name = f"{fleet.num_context} x {fleet.context.layout} context + {name}"
    return (
        name,
        f"{fleet.num_gpus:,}",
        f"{fleet.users:,}",
        f"{tps:,.1f}",
        f"{tps / fleet.margin:,.1f}",
        f"{fleet.times.ttft_ms:,.0f}",
        f"{slow.ttft_ms:,.0f}",
        f"{plan.burst_ttft_ms(fleet) * fleet.margin:,.0f}",
        f"{fleet.times.tpot_ms:.1f}",
        f"{slow.tpot_ms:.1f}",
        f"{fleet.margin - 1:.0%}",
    )
