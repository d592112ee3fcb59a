"""A plan as one JSON document, which docs/generator.md describes, and on the terminal."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from deepseek_triton_build import DEFAULT_FORMAT, FORMATS, Plan, PlanWarning, Setting, footnotes, usable_formats
from deepseek_triton_build.arithmetic import GIB
from deepseek_triton_build.catalog import DEFAULT_RELEASE, last_image, release_image_name, without_image
from deepseek_triton_build.text import yaml_flow
from deepseek_triton_tools.host.units import sized
from deepseek_triton_tools.terminal import tables
from deepseek_triton_tools.terminal.output_streams import print_json, to_reader
from deepseek_triton_tools.terminal.tables import Table, paragraph, show, styled

SCHEMA = "deepseek-triton/plan/1"
"""Fields may be added to the document; those that it has keep their names and meanings."""

_LENGTHS = ((1024, 1024), (1024, 2048), (8192, 1024), (32768, 4096), (65536, 4096), (131072, 4096))
"""Lengths (input tokens, output tokens) for which concurrency is shown if none is asked for."""
_LISTS = ("settings", "files", "environment", "unset_environment", "omissions")
_MEMORY = (
    *("weights", "kv_cache", "cuda_graphs", "activations", "sampler", "free"),
    *("kv_bytes_per_token", "kv_tokens"),
)
"""Names that the document has as the plan and its budget have them."""
_LIMITS = {"kv_cache": "KV cache", "prefill": "KV cache for a prompt"}


class _Concurrency(NamedTuple):
    """Number of requests of one length that run at once, over the whole instance."""

    isl: int
    osl: int
    kv_cache_holds: int
    runs: int
    """The smaller of what the KV cache holds and what max_batch_size allows."""
    limit: str
    """The name of the limit: `max_num_seqs` or `max_batch_size`, `kv_cache`, or `prefill`, for which blocks are set
    aside while the prompt is read."""


def plan_document(plan: Plan) -> dict[str, Any]:
    """Return `plan` for json.dumps. Sizes are in bytes. Fields that another engine's plan lacks are null or empty."""
    release, recipe, budget = plan.release, plan.recipe, plan.budget
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
        **{name: [dataclasses.asdict(each) for each in getattr(plan, name)] for name in _LISTS},
        "memory": budget
        and {
            "total": budget.memory,
            **{name: getattr(budget, name) for name in _MEMORY},
            "cuda_context": budget.context,
            "kv_tokens_of_instance": budget.total_kv_tokens,
        },
        "concurrency": [row._asdict() for row in _concurrency(plan)],
        "max_concurrency": plan.max_concurrency or None,
        "host_memory_bytes": plan.host_memory or None,
        "launch": _launch(plan),
        "warnings": [warning_document(warned) for warned in plan.warnings],
    }


def _concurrency(plan: Plan) -> Iterator[_Concurrency]:
    """Yield the requests at once, at the lengths asked for, or else at the plan's own and at typical ones."""
    if plan.budget is None:
        return
    planned = (plan.workload.isl or 0, plan.workload.osl or 0)
    asked = plan.request.workload
    limits = plan.canonical
    chunked = limits.get("enable_chunked_prefill")
    is_chunked = bool(chunked) if plan.vllm is None else chunked is not False  # vLLM's default is on
    longest, prompt = (
        ("max_seq_len", "max_num_tokens") if plan.vllm is None else ("max_model_len", "max_num_batched_tokens")
    )
    lengths = {planned}
    if not (asked.isl or asked.osl):
        lengths |= {
            (isl, osl)
            for isl, osl in _LENGTHS
            if isl + osl <= limits[longest] and (is_chunked or isl <= limits[prompt])
        }
    for isl, osl in sorted(lengths):
        held = plan.budget.concurrent_requests(isl, osl)
        limit = "max_num_seqs" if plan.vllm else "max_batch_size"
        if held < plan.max_concurrency:
            pool = plan.budget.pool
            limit = "prefill" if pool is not None and pool.requests(isl, osl)[1] else "kv_cache"
        yield _Concurrency(isl, osl, kv_cache_holds=held, runs=min(held, plan.max_concurrency), limit=limit)


def _launch(plan: Plan) -> dict[str, Any]:
    """Say how `plan` is started, in the first format of its profile: by its script, on several nodes with variables."""
    if plan.gpu is None:
        return {
            "script": "start.sh",
            "command": "deepseek-triton serve DIR",
            "nodes": 1,
            "gpus_per_node": 0,
            "mpi_ranks": 0,
            "where": "here, or wherever tritonserver and the engine's packages are",
        }
    format = usable_formats(plan)[0]
    script = FORMATS[format].start
    image = plan.image_for(format)
    in_container = (
        f"in {image}" if image or plan.vllm is None else f"where tritonserver and vLLM {plan.vllm.version} are"
    )
    command = script
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
    return {
        "script": script,
        "command": command,
        "nodes": plan.num_nodes,
        "gpus_per_node": plan.gpus_per_node,
        "mpi_ranks": plan.world_size if plan.vllm is None else 0,
        "where": in_container,
    }


def warning_document(warned: PlanWarning) -> dict[str, Any]:
    """Return a broken rule for json.dumps."""
    of_violation = {name: getattr(warned.violation, name) for name in ("key", "message", "fix")}
    return {name: getattr(warned.rule, name) for name in ("code", "severity", "source", "issue")} | of_violation


_WIDE = 120
"""Columns of a terminal from which the settings are drawn as a table."""
_BAR = 72
"""Characters of the memory's bar, on a terminal that has them."""


def show_plan(plan: Plan, *, as_json: bool, brief: bool = False) -> None:
    """Print the plan; a brief one is without the settings."""
    with to_reader():
        if as_json:
            print_json(plan_document(plan))
            return
        title, *rest = _headline(plan)
        print(styled(paragraph(title, ""), "1"))
        for line in rest:
            print(paragraph(line))
        print()
        _show_memory(plan)
        if not brief:
            _show_settings(plan)
        how = _launch(plan)
        print(styled("Start", "1"))
        if plan.checkpoint is not None:
            weights, host = sized(plan.checkpoint.weight_bytes), sized(plan.host_memory)
            ahead = "the engine reads them ahead, with less it loads more slowly"
            then = "the page cache keeps them for the next start" if plan.vllm else ahead
            print(paragraph(f"loads {weights} of weights; with {host} of memory available on each node {then}"))
        if plan.host_tables:
            where = "in each node's /dev/shm" if plan.shared_memory else "of each node's memory"
            print(paragraph(f"Engram's tables take {sized(plan.host_tables)} {where}"))
        nodes = "one node" if plan.num_nodes == 1 else f"{plan.num_nodes} nodes of {plan.gpus_per_node} GPUs"
        ranks = f", {how['mpi_ranks']} MPI ranks" if how["mpi_ranks"] else ""
        print(paragraph(f"{nodes}{ranks}: {how['command']}, {how['where']}"))
        other = "" if (first := usable_formats(plan)[0]) == DEFAULT_FORMAT else f"--format {first} "
        words = f"`deepseek-triton build` with the same options and {other}--output DIR writes it, with"
        print(paragraph(f"{words} {how['script']}"))
        show_warnings(plan.warnings)
        if plan.omissions and not brief:
            print(f"\n{styled('Left out', '1')}")
            for omission in plan.omissions:
                print(paragraph(f"{omission.key}: {yaml_flow(omission.value)}: {omission.reason}"))


def _headline(plan: Plan) -> list[str]:
    """Return in a few lines what is planned."""
    if plan.gpu is None or plan.checkpoint is None:
        return [f"{plan.title}, on the {plan.engine} engine"]
    nodes = "one node" if plan.num_nodes == 1 else f"{plan.num_nodes} nodes of {plan.gpus_per_node}"
    record = plan.release or plan.vllm
    others = record.containers[1:] if record else ()
    containers = f" (or {', '.join(others)})" if others else ""
    if plan.release is not None and plan.release.version == DEFAULT_RELEASE:
        containers += f"; {last_image()}"
    lines = [
        plan.title,
        f"{plan.request.model or plan.checkpoint.model}, {plan.precision}",
        f"{plan.world_size} x {plan.gpu.title}, {nodes}",
        f"{engine_version(plan)}: {plan.image or how_to_get(plan)}{containers}",
    ]
    if plan.profile is not None:
        lines.append(f"profile {plan.profile.name}: {plan.profile.title}")
    if plan.recipe is not None:
        lines.append(f"recipe {plan.recipe.id}: {plan.recipe.source}")
    return [*lines, *dict.fromkeys(why for _, why in plan.request.measured)]


def engine_version(plan: Plan) -> str:
    """Such as `TensorRT-LLM 1.2.1` or `vLLM 0.27.1`."""
    record = plan.release or plan.vllm
    assert record is not None  # the plan is for GPUs
    return f"vLLM {record.version}" if plan.vllm else f"TensorRT-LLM {record.version}"


def how_to_get(plan: Plan) -> str:
    """Say how to get an engine that no container of Triton's is known to have."""
    if plan.release is not None:
        return f"{release_image_name(plan.release.version)}; {without_image()}"
    assert plan.vllm is not None
    return f"no Triton container is known to have it; pip install vllm=={plan.vllm.version} where tritonserver is"


_MODEL_KEYS = (
    *("model", "backend", "trust_", "tokenizer_mode", "tensor_", "data_parallel_", "pipeline_", "moe_expert_"),
    *("enable_expert_", "language_model_", "nnodes", "gpus_per_node"),
)
_SECTIONS = (
    ("Model and parallelism", _MODEL_KEYS),
    ("Attention data parallelism", ("enable_attention_dp", "attention_dp_config")),
    (
        "Limits and scheduling",
        ("max_", "enable_chunked", "disable_overlap", "cuda_graph", "use_cuda_graph", "scheduling_", "compilation_"),
    ),
    (
        "KV cache",
        (
            *("kv_cache", "cache_transceiver", "enable_block_reuse", "gpu_memory_", "enable_prefix_", "block_size"),
            "attention_config",
        ),
    ),
    ("Experts", ("moe_", "all2all_", "enable_flashinfer_")),
    ("Speculation", ("speculative",)),
    ("The backend's own (triton_config)", ("triton_config",)),
)
"""Section -> beginnings of its keys. A setting goes to the first section that fits, or to _OTHER."""
_OTHER = "Sampling and output"


def _show_settings(plan: Plan) -> None:
    titles = [*(title for title, _ in _SECTIONS[:-1]), _OTHER, _SECTIONS[-1][0], "Environment"]
    rows: dict[str, list[tuple[str, str, str]]] = {title: [] for title in titles}
    notes = footnotes((*plan.settings, *plan.environment))
    for setting in (*plan.settings, *(setting for file in plan.files for setting in file.settings)):
        title = next((title for title, starts in _SECTIONS if setting.key.startswith(starts)), _OTHER)
        rows[title].append((setting.key, _shown(setting), setting.comment_with(notes)))
    rows["Environment"] = [
        *((variable.name, variable.value, variable.comment_with(notes)) for variable in plan.environment),
        *((variable.name, "not set", variable.comment_with(notes)) for variable in plan.unset_environment),
    ]
    for title, cells in rows.items():
        if not cells:
            continue
        if not tables.is_terminal() or tables.width() >= _WIDE:
            show(Table(title=title, headings=("setting", "value", "reason"), rows=cells))
            continue
        print(styled(title, "1"))
        for key, value, reason in cells:
            print(paragraph(f"{key}: {value}"))
            print(styled(paragraph(reason, "      ", ""), "2"))
        print()
    if notes:
        print(styled("Sources", "1"))
        for source, number in notes.items():
            print(paragraph(f"[{number}] {source}"))
        print()


def _shown(setting: Setting) -> str:
    """Return the value of a setting. The shapes of a warm-up, some thirty pairs, are shown by their range."""
    if setting.key != "triton_config.warmup.shapes" or not setting.value:
        return yaml_flow(setting.value)
    requests, tokens = zip(*setting.value, strict=True)
    return (
        f"{len(setting.value)} shapes: {min(requests):,} to {max(requests):,} requests x {min(tokens):,} to "
        f"{max(tokens):,} tokens"
    )


def _show_memory(plan: Plan) -> None:
    if plan.budget is None:
        return
    budget = plan.budget
    tokens = f"{budget.kv_bytes_per_token:,} bytes a token: {budget.kv_tokens:,} tokens"
    if budget.pool is not None:
        pool, longest = budget.pool, plan.canonical["max_model_len"]
        tokens = (
            f"{pool.num_blocks:,} blocks of {pool.bytes_per_block:,} bytes, of which a request holds "
            f"{pool.held(256) - 1:,} and one for each 256 tokens; vLLM will log "
            f"{pool.logged_concurrency(longest) * longest:,.0f} tokens"
        )
    elif budget.attention_dp_size > 1:
        tokens += f", {budget.total_kv_tokens:,} of all GPUs"
    rest = "CUDA context, buffers, activations, sampler; an estimate"
    rows = [
        ("#", "weights", budget.weights, ""),
        ("=", "KV cache", budget.kv_cache, tokens),
        ("+", "CUDA graphs", budget.cuda_graphs, "an estimate"),
        ("-", "workspace", budget.workspace - budget.cuda_graphs, rest),
        (".", "free", budget.free, "for what varies while it runs"),
    ]
    print(styled("Memory of one GPU", "1"))
    print(f"  [{tables.bar([(mark, size) for mark, _, size, _ in rows], min(_BAR, tables.width() - 4))}]")
    rows.append(("", "in all", budget.memory, ""))
    cells = [(mark, name, f"{size / GIB:6.1f}", what) for mark, name, size, what in rows]
    show(Table(title="", headings=("", "part", "GiB", ""), rows=cells))
    counts = [(*(f"{number:,}" for number in row[:4]), _LIMITS.get(row.limit, row.limit)) for row in _concurrency(plan)]
    limit = "max_num_seqs" if plan.vllm else "max_batch_size"
    title = f"Requests at once, of all {plan.world_size} GPUs; {limit} allows {plan.max_concurrency:,}"
    headings = ("input tokens", "output tokens", "KV cache holds", "run at once", "limit")
    show(Table(title=title, headings=headings, rows=counts))


def show_warnings(warnings: Sequence[PlanWarning], whose: str = "") -> None:
    """Print the rules that a plan breaks without being refused.

    :param whose: added to the title.
    """
    if not warnings:
        return
    print(f"\n{styled(f'Warnings and notes{whose}', '1')}")
    for warned in warnings:
        rule, violation = warned.rule, warned.violation
        print(paragraph(f"{rule.severity} {rule.code}: {violation.message}"))
        print(paragraph(f"fix: {violation.fix}", "    "))
