"""The whole search of a plan to an SLA: paces, candidates, the best fleets, and the commands that build the best."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from deepseek_backend.engines.simulated.pace_table import read_table
from deepseek_backend.engines.simulated.presets import MTP_3_TOKENS_PER_STEP
from deepseek_triton_build import DISAGGREGATED, BuildError, PlanRequest
from deepseek_triton_tools.bench.measuring.figures import Slo
from deepseek_triton_tools.bench.report.report_points import pareto_front
from deepseek_triton_tools.host.whole_file import whole_file
from deepseek_triton_tools.sla.fleet_search import (
    PlannedFleet,
    ServerCandidate,
    aggregated_fleets,
    best_of_each,
    disaggregated_fleets,
    fitting_rows,
)
from deepseek_triton_tools.sla.model_paces import ModelPaces
from deepseek_triton_tools.sla.predictions import PacedServer, SlaWorkload, burst_ttft_ms
from deepseek_triton_tools.sla.server_layouts import PacedModel, Paces, ServerLayout, layouts_up_to
from deepseek_triton_tools.sla.silicon_paces import ENVIRONMENT_VARIABLE, HOW_TO_INSTALL, SiliconPaces
from deepseek_triton_tools.tool_errors import ToolError


@dataclass(frozen=True, kw_only=True)
class SlaPlan:
    """The answer of a search."""

    request: PlanRequest
    slo: Slo
    workload: SlaWorkload
    source: str
    """Where the paces come from."""
    note: str
    """How to get better ones; "" where there are none."""
    fleets: list[PlannedFleet]
    """The best load of each kind of fleet that keeps the limits, the best fleet first."""
    refused: dict[str, str]
    """Layout -> why it was left out."""
    candidates: list[ServerCandidate]
    """The servers that were tried."""
    fronts: dict[str, list[PlannedFleet]]
    """Aggregated and disaggregated -> the fleets than which none has more tokens/s for a GPU and for a user, with their
    margins; they keep the limit of TTFT alone."""

    @property
    def limits(self) -> list[str]:
        """The limits as text, such as TTFT 2000 ms."""
        return [
            f"{name.removesuffix('_ms').upper()} {limit:g} ms"
            for name, limit in dataclasses.asdict(self.slo).items()
            if limit is not None
        ]

    def burst_ttft_ms(self, fleet: PlannedFleet) -> float:
        """Return the mean TTFT of a fleet, without margin, where all its requests come at once."""
        if fleet.context is None:
            return burst_ttft_ms(self._candidate(fleet.layout).server, self.workload, fleet.rows)
        requests = fleet.users / (fleet.num_context * fleet.context.num_ranks)
        return burst_ttft_ms(self._candidate(fleet.context).server, self.workload, requests)

    def _candidate(self, layout: ServerLayout) -> ServerCandidate:
        return next(candidate for candidate in self.candidates if candidate.layout == layout)

    @property
    def sides(self) -> dict[str, tuple[ServerLayout, int]]:
        """The kinds of servers of the best fleet, server, or context and generation: layout and max_batch_size."""
        best = self.fleets[0]
        if best.context is None:
            return {"server": (best.layout, best.rows)}
        prompts = self._candidate(best.context).server.max_num_tokens // self.workload.isl
        return {"context": (best.context, max(1, prompts)), "generation": (best.layout, best.rows)}

    def write_paces(self, folder: Path) -> None:
        """Write what the simulated engine takes as its preset, for each kind of server of the best fleet: server.json,
        or context.json and generation.json. Raises ToolError where it can't."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ToolError(f"{folder} can't be made: {error.strerror}") from error
        for name in {"server", "context", "generation"} - self.sides.keys():  # of an earlier plan of the other kind
            (folder / f"{name}.json").unlink(missing_ok=True)
        for name, (layout, rows) in self.sides.items():
            found = self._candidate(layout)
            table = found.server.table
            preset = {
                "title": f"{self.request.variant} on {layout.num_gpus} x {self.request.gpu}, {layout}",
                "source": self.source,
                "num_ranks": table.num_ranks,
                "kv_cache_tokens": table.kv_cache_tokens,
                "kv_token_bytes": table.kv_token_bytes,
                "max_batch_size": rows,
                "max_num_tokens": found.server.max_num_tokens,
                "max_seq_len": table.kv_cache_tokens,
                "num_draft_tokens": table.num_draft_tokens,
                "tokens_per_step": found.server.tokens_per_step,
                "pace": found.pace,
            }
            with whole_file(folder / f"{name}.json") as file:
                json.dump(preset, file)

    @property
    def build_command(self) -> str:
        """The command that writes the best fleet's servers: one repository, or a pair."""
        best, asked = self.fleets[0], self.request
        words = [
            "deepseek-triton",
            "build",
            asked.variant,
            "--gpu",
            str(asked.gpu),
            "--precision",
            str(asked.precision),
        ]
        words += ["--isl", str(self.workload.isl), "--osl", str(self.workload.osl), "--mtp", str(asked.mtp)]
        if best.context is None:
            users = best.users // best.num_servers
            words += ["--gpus", str(best.layout.num_gpus), "--profile", asked.profile]
        else:
            users = best.users
            words += ["--profile", DISAGGREGATED, "--context-servers", str(best.num_context)]
            words += ["--generation-servers", str(best.num_servers)]
        words += ["--concurrency", str(users)]
        for name, (layout, rows) in self.sides.items():
            settings = {
                "enable_attention_dp": str(layout.attention_dp).lower(),
                "moe_expert_parallel_size": layout.expert_parallel_size,
                "max_batch_size": rows,
            }
            if name != "server":
                settings = {"num_gpus": layout.num_gpus, **settings}
            if name != "context":
                settings["cuda_graph_config.max_batch_size"] = rows
            option = "--set" if name == "server" else f"--{name}-set"
            words += [word for key, value in settings.items() for word in (option, f"{key}={value}")]
        words += ["--allow-unpublished"] if asked.allow_unpublished else []
        return shlex.join([*words, "--output", "server" if best.context is None else "pair"])


def plan_to_sla(request: PlanRequest, slo: Slo, python: Path | None) -> SlaPlan:
    """Search the fleets for `request.num_gpus` GPUs.

    :param python: a Python that has aiconfigurator-core. None: the environment variable's, else our own model's paces.
    :raises ToolError: when no fleet keeps the limits; it says how near the nearest comes.
    """
    named = os.environ.get(ENVIRONMENT_VARIABLE)
    found = python or (Path(named) if named else None)
    paces: Paces = SiliconPaces(found) if found else ModelPaces()
    workload = SlaWorkload(isl=request.workload.isl or 1, osl=request.workload.osl or 1)
    num_gpus = request.num_gpus or 1
    request = dataclasses.replace(request, mtp=request.mtp or 0)
    candidates, refused, request = _candidates(request, workload, paces)
    kinds = {
        "aggregated": list(aggregated_fleets(candidates, workload, num_gpus)),
        "disaggregated": list(disaggregated_fleets(candidates, workload, num_gpus, slo)),
    }
    fleets = [fleet for of_kind in kinds.values() for fleet in of_kind]
    best = best_of_each(fleets, slo, workload.osl)
    if not best:
        raise ToolError(_none_keeps(fleets, refused))
    fronts = {kind: _front(of_kind, slo, workload.osl) for kind, of_kind in kinds.items()}
    note = "" if found else f"for measured paces: {HOW_TO_INSTALL}"
    return SlaPlan(
        request=request,
        slo=slo,
        workload=workload,
        source=paces.source,
        note=note,
        fleets=best,
        refused=refused,
        candidates=candidates,
        fronts={kind: front for kind, front in fronts.items() if front},
    )


def _front(fleets: Sequence[PlannedFleet], slo: Slo, osl: int) -> list[PlannedFleet]:
    """Return the Pareto front of the fleets that keep the limit of TTFT, by rising tokens/s of a user."""
    kept = [fleet for fleet in fleets if fleet.keeps(dataclasses.replace(slo, tpot_ms=None, e2el_ms=None), osl)]
    places = [(fleet.tps_user / fleet.margin, fleet.output_tps / fleet.margin) for fleet in kept]
    return [kept[number] for number in pareto_front(places)]


def _candidates(
    request: PlanRequest, workload: SlaWorkload, paces: Paces
) -> tuple[list[ServerCandidate], dict[str, str], PlanRequest]:
    """Return the servers that are allowed, why others are not, and the request with its precision."""
    refused: dict[str, str] = {}
    fitting = {}
    for layout in layouts_up_to(request.num_gpus or 1):
        try:
            fitting[layout] = fitting_rows(request, layout, workload)
        except BuildError as error:
            refused[str(layout)] = str(error)
    candidates = []
    asked: dict[PacedModel, list[ServerLayout]] = {}
    for layout, (plan, _) in fitting.items():
        assert plan.gpu is not None and plan.checkpoint is not None and plan.variant.architecture is not None  # noqa: PT018
        asked.setdefault(
            PacedModel(
                architecture=plan.variant.architecture.name,
                precision=plan.checkpoint.precision,
                gpu=plan.gpu.name,
                kv_dtype="fp8" if plan.canonical.get("kv_cache_config.dtype") == "fp8" else "bf16",
                num_draft_tokens=request.mtp or 0,
            ),
            [],
        ).append(layout)
        request = dataclasses.replace(request, precision=plan.checkpoint.precision)
    for model, layouts in asked.items():
        for layout, table in paces.tables(model, layouts).items():
            plan, rows = fitting[layout]
            if isinstance(table, str):
                refused[str(layout)] = table
                continue
            assert plan.budget is not None
            read = read_table(
                table,
                num_ranks=layout.num_ranks,
                num_draft_tokens=model.num_draft_tokens,
                kv_cache_tokens=plan.budget.kv_tokens,
                kv_token_bytes=plan.budget.kv_bytes_per_token,
            )
            server = PacedServer(
                table=read,
                max_num_tokens=plan.canonical["max_num_tokens"],
                tokens_per_step=MTP_3_TOKENS_PER_STEP if model.num_draft_tokens else 1.0,
            )
            if rows:
                candidates.append(ServerCandidate(layout=layout, server=server, most_rows=rows, pace=table))
    return candidates, refused, request


def _none_keeps(fleets: list[PlannedFleet], refused: dict[str, str]) -> str:
    if not fleets:
        why = "; ".join(f"{name}: {said}" for name, said in list(refused.items())[-2:])
        return f"no layout can be searched: {why}"
    fastest = min(fleets, key=lambda fleet: fleet.times.slower(fleet.margin).tpot_ms)
    first = min(fleets, key=lambda fleet: fleet.times.slower(fleet.margin).ttft_ms)
    return (
        f"no fleet keeps the limits: with their margins, the shortest TPOT is "
        f"{fastest.times.slower(fastest.margin).tpot_ms:.1f} ms ({fastest.layout}) and the shortest TTFT "
        f"{first.times.slower(first.margin).ttft_ms:.0f} ms ({first.layout}); raise --sla, or give more GPUs"
    )
