"""A plan on the terminal: every setting with its reason, the memory, the requests at once, and how it is started."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from deepseek_triton_build import Budget, DisaggregatedPlan, EnvironmentVariable, Plan, Setting, footnotes
from deepseek_triton_build.arithmetic import GIB
from deepseek_triton_build.text import yaml_flow
from deepseek_triton_tools.plans.plan_document import concurrency, launch, plan_document
from deepseek_triton_tools.terminal import tables
from deepseek_triton_tools.terminal.output_streams import print_json, to_reader
from deepseek_triton_tools.terminal.tables import Table, paragraph, show, styled

_WIDE = 120
"""Columns of a terminal from which the settings are drawn as a table."""


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
        _show_launch(plan)
        show_warnings(plan)
        if plan.omissions and not brief:
            print(f"\n{styled('Left out', '1')}")
            for omission in plan.omissions:
                print(paragraph(f"{omission.key}: {yaml_flow(omission.value)}: {omission.reason}"))


def _headline(plan: Plan) -> list[str]:
    """Return in a few lines what is planned."""
    if plan.gpu is None or plan.checkpoint is None:
        return [f"{plan.variant.title}, on the {plan.engine} engine"]
    nodes = "one node" if plan.num_nodes == 1 else f"{plan.num_nodes} nodes of {plan.gpus_per_node}"
    record = plan.release or plan.vllm
    others = record.containers[1:] if record else ()
    containers = f" (or {', '.join(others)})" if others else ""
    lines = [
        plan.variant.title,
        f"{plan.request.model or plan.checkpoint.model}, {plan.precision}",
        f"{plan.world_size} x {plan.gpu.title}, {nodes}",
        f"{engine_version(plan)}: {plan.image or how_to_get(plan)}{containers}",
    ]
    if plan.profile is not None:
        lines.append(f"profile {plan.profile.name}: {plan.profile.title}")
    if plan.recipe is not None:
        lines.append(f"recipe {plan.recipe.id}: {plan.recipe.source}")
    return [*lines, *(why for _, why in plan.request.measured)]


def engine_version(plan: Plan) -> str:
    """Such as `TensorRT-LLM 1.2.1` or `vLLM 0.24.0`."""
    record = plan.release or plan.vllm
    assert record is not None  # the plan is for GPUs
    return f"vLLM {record.version}" if plan.vllm else f"TensorRT-LLM {record.version}"


def how_to_get(plan: Plan) -> str:
    """Say how to get a vLLM that no container of Triton's has."""
    assert plan.vllm is not None
    return f"no Triton container has it; pip install vllm=={plan.vllm.version} where tritonserver is"


@dataclass(frozen=True, kw_only=True)
class _Line:
    """A setting or an environment variable, as it is shown."""

    section: str
    key: str
    value: str
    why: str
    """The reason with its source, or with the number of the source that several reasons rest on."""


_MODEL_KEYS = (
    *("model", "backend", "trust_", "tokenizer_mode", "tensor_", "data_parallel_", "pipeline_", "moe_expert_"),
    *("enable_expert_", "nnodes", "gpus_per_node"),
)
_SECTIONS = (
    ("Model and parallelism", _MODEL_KEYS),
    ("Attention data parallelism", ("enable_attention_dp", "attention_dp_config")),
    (
        "Limits and scheduling",
        ("max_", "enable_chunked", "disable_overlap", "cuda_graph", "use_cuda_graph", "scheduling_"),
    ),
    (
        "KV cache",
        ("kv_cache", "cache_transceiver", "enable_block_reuse", "gpu_memory_", "enable_prefix_", "block_size"),
    ),
    ("Experts", ("moe_", "all2all_")),
    ("Speculation", ("speculative",)),
    ("The backend's own (triton_config)", ("triton_config",)),
)
"""Section -> beginnings of its keys. A setting goes to the first section that fits, or to _OTHER."""
_OTHER = "Sampling and output"
_ENVIRONMENT = "Environment"


def _section(key: str) -> str:
    return next((title for title, starts in _SECTIONS if key.startswith(starts)), _OTHER)


def _lines(plan: Plan) -> list[_Line]:
    """Return the lines in the order of the sections; within a section as they are written."""
    titles = [*(title for title, _ in _SECTIONS[:-1]), _OTHER, _SECTIONS[-1][0]]
    in_files = [setting for file in plan.files for setting in file.settings]
    settings = sorted([*plan.settings, *in_files], key=lambda setting: titles.index(_section(setting.key)))
    rows: list[tuple[str, str, str, Setting | EnvironmentVariable]] = [
        *((_section(setting.key), setting.key, _shown(setting), setting) for setting in settings),
        *((_ENVIRONMENT, variable.name, variable.value, variable) for variable in plan.environment),
        *((_ENVIRONMENT, variable.name, "not set", variable) for variable in plan.unset_environment),
    ]
    notes = _notes(plan)
    return [
        _Line(section=section, key=key, value=value, why=line.comment_with(notes)) for section, key, value, line in rows
    ]


def _notes(plan: Plan) -> dict[str, int]:
    """Number the sources that several reasons rest on."""
    return footnotes((*plan.settings, *plan.environment))


def _shown(setting: Setting) -> str:
    """Return the value of a setting. The shapes of a warm-up, some thirty pairs, are shown by their range."""
    if setting.key != "triton_config.warmup.shapes" or not setting.value:
        return yaml_flow(setting.value)
    requests, tokens = zip(*setting.value, strict=True)
    return (
        f"{len(setting.value)} shapes: {min(requests):,} to {max(requests):,} requests x {min(tokens):,} to "
        f"{max(tokens):,} tokens"
    )


def _by_section(lines: list[_Line]) -> Iterator[tuple[str, list[_Line]]]:
    for title in dict.fromkeys(line.section for line in lines):
        yield title, [line for line in lines if line.section == title]


def _show_settings(plan: Plan) -> None:
    lines = _lines(plan)
    if not tables.is_terminal():
        for title, rows in _by_section(lines):
            cells = [(row.key, row.value, row.why) for row in rows]
            show(Table(title=title, headings=("setting", "value", "reason"), rows=cells))
    elif tables.width() >= _WIDE:
        _draw(lines)
    else:
        for title, rows in _by_section(lines):
            print(styled(title, "1"))
            for row in rows:
                print(paragraph(f"{row.key}: {row.value}"))
                print(styled(paragraph(row.why, "      ", ""), "2"))
            print()
    if notes := _notes(plan):
        print(styled("Sources", "1"))
        for source, number in notes.items():
            print(paragraph(f"[{number}] {source}"))
        print()


def _draw(lines: list[_Line]) -> None:
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    drawn = RichTable("setting", "value", "reason", box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in drawn.columns:
        column.overflow = "fold"
    drawn.columns[1].max_width = 30
    drawn.columns[2].ratio = 1
    for title, rows in _by_section(lines):
        drawn.add_row(Text(title, "bold"))
        for row in rows:
            drawn.add_row(Text(f"  {row.key}"), Text(row.value), Text(row.why))
        drawn.add_row()
    tables.console().print(drawn)


def _show_memory(plan: Plan) -> None:
    if plan.budget is None:
        return
    rows = memory_rows(plan.budget)
    sizes = [(mark, size) for mark, _, size, _ in rows if mark]
    print(styled("Memory of one GPU", "1"))
    print(f"  [{tables.bar(sizes, min(_BAR, tables.width() - 4))}]")
    cells = [(mark, name, f"{size / GIB:6.1f}", what) for mark, name, size, what in rows]
    show(Table(title="", headings=("", "part", "GiB", ""), rows=cells))
    counts = [(f"{c.isl:,}", f"{c.osl:,}", f"{c.kv_cache_holds:,}", f"{c.runs:,}") for c in concurrency(plan)]
    limit = "max_num_seqs" if plan.vllm else "max_batch_size"
    title = f"Requests at once, of all {plan.world_size} GPUs; {limit} allows {plan.max_concurrency:,}"
    show(Table(title=title, headings=("input tokens", "output tokens", "KV cache holds", "run at once"), rows=counts))


_BAR = 72
"""Characters of the bar, on a terminal that has them."""


def memory_rows(budget: Budget) -> list[tuple[str, str, int, str]]:
    """Return (mark in the bar, part, bytes, what to know about it)."""
    tokens = f"{budget.kv_bytes_per_token:,} bytes a token: {budget.kv_tokens:,} tokens"
    if budget.attention_dp_size > 1:
        tokens += f", {budget.total_kv_tokens:,} of all GPUs"
    return [
        ("#", "weights", budget.weights, ""),
        ("=", "KV cache", budget.kv_cache, tokens),
        ("+", "CUDA graphs", budget.cuda_graphs, "an estimate"),
        (
            "-",
            "workspace",
            budget.workspace - budget.cuda_graphs,
            "CUDA context, buffers, activations, sampler; an estimate",
        ),
        (".", "free", budget.free, "for what varies while it runs"),
        ("", "in all", budget.memory, ""),
    ]


def _show_launch(plan: Plan) -> None:
    how = launch(plan)
    print(styled("Start", "1"))
    if plan.checkpoint is not None:
        weights, host = _decimal(plan.checkpoint.weight_bytes), _decimal(plan.host_memory)
        print(
            paragraph(
                f"loads {weights} of weights; with {host} of memory available on each node "
                + (
                    "the page cache keeps them for the next start"
                    if plan.vllm
                    else "the engine reads them ahead, with less it loads more slowly"
                )
            )
        )
    nodes = "one node" if how.nodes == 1 else f"{how.nodes} nodes of {how.gpus_per_node} GPUs"
    ranks = f", {how.mpi_ranks} MPI ranks" if how.mpi_ranks else ""
    print(paragraph(f"{nodes}{ranks}: {how.command}, {how.where}"))
    print(paragraph(f"`deepseek-triton build` with the same options and --output DIR writes it, with {how.script}"))


def _decimal(size: int) -> str:
    """Return bytes in gigabytes, or in megabytes where they are less than one."""
    return f"{size / 1e9:,.0f} GB" if size >= 1e9 else f"{size / 1e6:,.0f} MB"


def show_warnings(plan: Plan | DisaggregatedPlan, whose: str = "") -> None:
    """Print the rules that the plan breaks without being refused.

    :param whose: added to the title.
    """
    if not plan.warnings:
        return
    print(f"\n{styled(f'Warnings and notes{whose}', '1')}")
    for warned in plan.warnings:
        rule, violation = warned.rule, warned.violation
        print(paragraph(f"{rule.severity} {rule.code}: {violation.message}"))
        print(paragraph(f"fix: {violation.fix}", "    "))
