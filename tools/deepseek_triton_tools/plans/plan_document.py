"""A plan as one JSON document; docs/generator.md describes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from deepseek_triton_build import FORMATS, Budget, Plan, PlanWarning, usable_formats

SCHEMA = "deepseek-triton/plan/1"
"""Fields may be added to the document; those that it has keep their names and meanings."""

_LENGTHS = ((1024, 1024), (1024, 2048), (8192, 1024), (32768, 4096), (65536, 4096), (131072, 4096))
"""Lengths (input tokens, output tokens) for which concurrency is shown if none is asked for."""


@dataclass(frozen=True, kw_only=True)
class Concurrency:
    """Number of requests of one length that run at once, over the whole instance."""

    isl: int
    osl: int
    kv_cache_holds: int
    runs: int
    """The smaller of what the KV cache holds and what max_batch_size allows."""


@dataclass(frozen=True, kw_only=True)
class PlannedLaunch:
    """The start of a plan."""

    script: str
    command: str
    """The command that starts it: on one node the script, on several nodes the script with its variables."""
    nodes: int
    gpus_per_node: int
    mpi_ranks: int
    where: str


def plan_document(plan: Plan) -> dict[str, Any]:
    """Return `plan` for json.dumps. Sizes are in bytes. Fields that another engine's plan lacks are null or empty."""
    release, recipe = plan.release, plan.recipe
    record = plan.release or plan.vllm
    return {
        "schema": SCHEMA,
        "variant": plan.variant.name,
        "engine": plan.engine,
        "model": next(setting.value for setting in plan.settings if setting.key == "model"),
        "precision": plan.precision,
        "gpu": plan.gpu.name if plan.gpu else None,
        "gpus": plan.world_size if plan.gpu else None,
        "release": release.version if release else None,
        "vllm": plan.vllm.version if plan.vllm else None,
        "image": plan.image,
        "containers": list(record.containers) if record else [],
        "profile": plan.profile.name if plan.profile else None,
        "recipe": {"id": recipe.id, "source": recipe.source} if recipe else None,
        "formats": list(usable_formats(plan)),
        "workload": dataclasses.asdict(plan.workload),
        "measured": dict(plan.request.measured),
        "layout": dataclasses.asdict(plan.layout),
        "settings": [dataclasses.asdict(setting) for setting in plan.settings],
        "files": [dataclasses.asdict(file) for file in plan.files],
        "environment": [dataclasses.asdict(variable) for variable in plan.environment],
        "unset_environment": [dataclasses.asdict(variable) for variable in plan.unset_environment],
        "memory": _memory(plan.budget) if plan.budget else None,
        "concurrency": [dataclasses.asdict(row) for row in concurrency(plan)],
        "max_concurrency": plan.max_concurrency or None,
        "host_memory_bytes": plan.host_memory or None,
        "launch": dataclasses.asdict(launch(plan)),
        "warnings": [warning_document(warned) for warned in plan.warnings],
        "omissions": [dataclasses.asdict(omission) for omission in plan.omissions],
    }


def concurrency(plan: Plan) -> Iterator[Concurrency]:
    """Yield the requests at once, at the lengths asked for, or else at the plan's own and at typical ones."""
    if plan.budget is None:
        return
    planned = (plan.workload.isl or 0, plan.workload.osl or 0)
    asked = plan.request.workload
    lengths = (
        {planned} if asked.isl or asked.osl else {planned, *(pair for pair in _LENGTHS if _is_served(plan, *pair))}
    )
    for isl, osl in sorted(lengths):
        held = plan.budget.concurrent_requests(isl, osl)
        yield Concurrency(isl=isl, osl=osl, kv_cache_holds=held, runs=min(held, plan.max_concurrency))


def _is_served(plan: Plan, isl: int, osl: int) -> bool:
    given = plan.canonical
    if plan.vllm is not None:
        chunked = given.get("enable_chunked_prefill") is not False  # on by default
        return isl + osl <= given["max_model_len"] and (chunked or isl <= given["max_num_batched_tokens"])
    chunked = bool(given.get("enable_chunked_prefill"))
    return isl + osl <= given["max_seq_len"] and (chunked or isl <= given["max_num_tokens"])


def launch(plan: Plan) -> PlannedLaunch:
    """Say how `plan` is started, in the first format of its profile."""
    if plan.gpu is None:
        return PlannedLaunch(
            script="start.sh",
            command="deepseek-triton serve DIR",
            nodes=1,
            gpus_per_node=0,
            mpi_ranks=0,
            where="here, or wherever tritonserver and the engine's packages are",
        )
    format = usable_formats(plan)[0]
    script = FORMATS[format].start
    image = plan.image_for(format)
    in_container = (
        f"in {image}" if image or plan.vllm is None else f"where tritonserver and vLLM {plan.vllm.version} are"
    )
    if plan.vllm is not None and plan.num_nodes > 1:
        command = f"NODE_RANK=0 MASTER_ADDR=node1 {script}"
        in_container += (
            f", on each of {plan.num_nodes} nodes, with its number as NODE_RANK; under Slurm: srun --nodes "
            f"{plan.num_nodes} --ntasks-per-node 1 {script}"
        )
    elif plan.num_nodes > 1:
        hosts = ",".join(f"node{number}" for number in range(1, plan.num_nodes + 1))
        command = f"HOSTS={hosts} {script}"
        in_container += (
            f", on the first of {plan.num_nodes} nodes, with ssh to the others; under Slurm instead, without HOSTS: "
            f"srun --mpi=pmix --nodes {plan.num_nodes} --ntasks-per-node {plan.gpus_per_node} {script}"
        )
    else:
        command = script
    return PlannedLaunch(
        script=script,
        command=command,
        nodes=plan.num_nodes,
        gpus_per_node=plan.gpus_per_node,
        mpi_ranks=plan.world_size if plan.vllm is None else 0,
        where=in_container,
    )


def _memory(budget: Budget) -> dict[str, int]:
    """The memory of one GPU in bytes, and the tokens that the KV caches hold."""
    return {
        "total": budget.memory,
        "weights": budget.weights,
        "kv_cache": budget.kv_cache,
        "cuda_graphs": budget.cuda_graphs,
        "cuda_context": budget.context,
        "activations": budget.activations,
        "sampler": budget.sampler,
        "free": budget.free,
        "kv_bytes_per_token": budget.kv_bytes_per_token,
        "kv_tokens": budget.kv_tokens,
        "kv_tokens_of_instance": budget.total_kv_tokens,
    }


def warning_document(warned: PlanWarning) -> dict[str, Any]:
    """Return a broken rule for json.dumps."""
    rule, violation = warned.rule, warned.violation
    return {
        "code": rule.code,
        "severity": rule.severity,
        "key": violation.key,
        "message": violation.message,
        "fix": violation.fix,
        "source": rule.source,
    }
