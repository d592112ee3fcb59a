"""A plan, or a plan of context and generation servers, written as a folder; and the summary of what was written."""

import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepseek_triton_build import (
    DEFAULT_FORMAT,
    DYNAMO,
    FORMATS,
    PAIR_FORMATS,
    DisaggregatedPlan,
    DisaggregatedRequest,
    File,
    Plan,
    PlanRequest,
    ReplacementError,
    dynamo_mismatch,
    format_files,
    format_request,
    make_disaggregated_plan,
    make_plan,
    pair_files,
    write_repository,
)
from deepseek_triton_build.arithmetic import GIB
from deepseek_triton_build.text import is_path
from deepseek_triton_tools._version import __version__
from deepseek_triton_tools.host.units import sized
from deepseek_triton_tools.plans import plan_view
from deepseek_triton_tools.terminal.output_streams import complain, print_json, printable, to_reader
from deepseek_triton_tools.terminal.tables import paragraph, styled
from deepseek_triton_tools.tool_errors import ToolError

if TYPE_CHECKING:
    from deepseek_triton_build import KvAlgo, QuantConfigChange

_SCHEMA = "deepseek-triton/build/1"
_PAIR_SCHEMA = "deepseek-triton/pair/1"
_ORCHESTRATOR_SCRIPT = "orchestrator.sh"


def build(
    request: PlanRequest,
    output: Path,
    *,
    force: bool = False,
    format: str = DEFAULT_FORMAT,
    quant_config: bool = False,
    as_json: bool = False,
) -> None:
    """Write the plan for `request` as the folder `output`, in `format`, and print a summary, or a document.

    `quant_config` writes or changes the checkpoint's hf_quant_config.json, so that it says what the plan does. Raises
    BuildError when it can't be planned or written, and nothing is left behind; ToolError when the checkpoint is wanted
    and not on this machine.
    """
    plan = make_plan(format_request(format, request))
    files = format_files(format, plan, version=__version__)
    changes: list[str] = []
    change = _quant_config(plan) if quant_config else None
    # The checkpoint is changed after all files could be written, and before they are moved to their place.

    def change_checkpoint() -> None:
        from deepseek_triton_build import write_quant_config

        assert change is not None
        backup = write_quant_config(change)
        changes.append(change.summary + (f"; as it was: {backup}" if backup else ""))

    is_replaced = write_folder(files, output, force=force, before=None if change is None else change_checkpoint)
    with to_reader():
        if as_json:
            start = FORMATS[format].start
            document = _build_document(
                output, format, start, files, is_replaced=is_replaced, plan=plan_view.plan_document(plan)
            )
            print_json({**document, "quant_config": next(iter(changes), None)})
            return
        for line in [*summary(plan, output, format=format, is_replaced=is_replaced), *changes]:
            print(paragraph(printable(line), "", "    "))
        plan_view.show_warnings(plan.warnings)


def _build_document(
    output: Path, format: str, start: str | None, files: list[File], *, is_replaced: bool, plan: dict[str, Any]
) -> dict[str, Any]:
    return {
        "schema": _SCHEMA,
        "output": str(output),
        "format": format,
        "start": start,
        "replaced": is_replaced,
        "files": [file.path.as_posix() for file in files],
        "quant_config": None,
        "plan": plan,
    }


def write_folder(files: list[File], output: Path, *, force: bool, before: Callable[[], None] | None = None) -> bool:
    """Do what `write_repository` does, and show the difference where --force is needed."""
    try:
        return write_repository(files, output, force=force, before=before)
    except ReplacementError as error:
        for line in error.diff.splitlines():
            complain(line)
        raise


def summary(plan: Plan, output: Path, *, format: str = DEFAULT_FORMAT, is_replaced: bool = False) -> list[str]:
    """Return what a person wants to know after a build, one thing a line."""
    wrote = "wrote" if not is_replaced else "replaced"
    title = f"{wrote} {output}: {plan.title}, as {FORMATS[format].title}"
    return [title, *details(plan, format=format), start_line(plan, output, format=format)]


def details(plan: Plan, *, format: str = DEFAULT_FORMAT) -> list[str]:
    """Return what `summary` says of the plan."""
    if plan.gpu is None or plan.budget is None or plan.profile is None:
        return [f"  {plan.engine} engine"]
    budget = plan.budget
    recipe = f", recipe {plan.recipe.id}" if plan.recipe else ""
    engine = [f"  {plan_view.engine_version(plan)}: {plan.image_for(format) or plan_view.how_to_get(plan)}"]
    if format == DYNAMO:
        engine = [f"  {plan.image_for(format)}", f"  {dynamo_mismatch(plan)}"]
    left_out = ", ".join(omission.key for omission in plan.omissions)
    room = f"{budget.kv_tokens:,} tokens" if budget.pool is None else f"{budget.pool.num_blocks:,} blocks"
    runs = min(plan.max_concurrency, budget.concurrent_requests(plan.workload.isl or 0, plan.workload.osl or 0))
    return [
        f"  {plan.precision}, profile {plan.profile.name}{recipe}",
        f"  {plan.world_size} x {plan.gpu.title}: of {budget.memory / GIB:.0f} GiB each, "
        f"{budget.weights / GIB:.1f} weights, {budget.kv_cache / GIB:.1f} KV cache ({room}), "
        f"{budget.cuda_graphs / GIB:.1f} CUDA graphs, {(budget.workspace - budget.cuda_graphs) / GIB:.1f} workspace, "
        f"{budget.free / GIB:.1f} left free",
        f"  {runs:,} request{'' if runs == 1 else 's'} at once of {plan.workload.isl:,} tokens in and "
        f"{plan.workload.osl:,} out",
        *engine,
        _checkpoint_line(plan),
        *([f"  left out: {left_out}; `deepseek-triton plan` says why"] if left_out else []),
    ]


def _checkpoint_line(plan: Plan) -> str:
    assert plan.checkpoint is not None  # a plan for GPUs always has one
    if plan.request.model and plan.request.model != plan.checkpoint.model:
        seen = "as the container sees it" if is_path(plan.request.model) else "on Hugging Face, for it to download"
        return f"  checkpoint: {plan.request.model}, {seen}"
    where = "inside the folder" if plan.carries_checkpoint else "for the container to download; --model names a folder"
    return f"  checkpoint: {plan.checkpoint.model}, {sized(plan.checkpoint.weight_bytes)} {where}"


def start_line(plan: Plan, output: Path, *, format: str = DEFAULT_FORMAT) -> str:
    """Say how the plan that was written in the folder `output` is started."""
    if plan.gpu is None:
        return f"run it here: deepseek-triton serve {shlex.quote(str(output))}"
    script = shlex.quote(f"{output}/{FORMATS[format].start}")
    if format == DYNAMO:
        return f"apply it: kubectl apply -f {script}"
    if plan.num_nodes == 1:
        return f"run it there: {script}"
    if plan.vllm is not None:
        return f"run it on each of {plan.num_nodes} nodes: {script}, with NODE_RANK and MASTER_ADDR, or by Slurm"
    return f"run it on {plan.num_nodes} nodes: {script} on the first, with HOSTS naming all, or by Slurm; it says how"


def _quant_config(plan: Plan) -> "QuantConfigChange":
    """Plan the change of hf_quant_config.json. Raises ToolError when the checkpoint's folder is not on this machine."""
    from deepseek_triton_build import quant_config_change

    folder = Path(plan.request.model or "")
    if plan.checkpoint is None or not plan.request.model or not folder.is_dir():
        found = f"found {plan.request.model}" if plan.request.model else "found none"
        raise ToolError(
            f"--write-quant-config changes the checkpoint: expected --model with its folder on this machine, {found}",
            exit_code=2,
        )
    if plan.vllm is not None:
        raise ToolError("--write-quant-config is for TensorRT-LLM; vLLM has kv_cache_dtype for it", exit_code=2)
    dtype = plan.canonical["kv_cache_config.dtype"]
    own: KvAlgo | None = "FP8" if plan.checkpoint.kv_cache_quant_algo == "FP8" else None
    return quant_config_change(folder, "FP8" if dtype == "fp8" else own)


# Context and generation servers


def build_pair(
    request: DisaggregatedRequest, output: Path, *, force: bool = False, format: str = DEFAULT_FORMAT, as_json: bool
) -> None:
    """Write the plan for `request` as the folder `output`, in `format`, and print a summary, or a document.

    :raises BuildError: when it can't be planned or written, and nothing is left behind.
    """
    if format == DYNAMO:
        request = replace(request, both=format_request(format, request.both))
    plan = make_disaggregated_plan(request)
    files = pair_files(plan, version=__version__, format=format)
    is_replaced = write_folder(files, output, force=force)
    with to_reader():
        if as_json:
            # Which file starts or joins the servers of both sides; in the format triton each side has its own only.
            start = {DEFAULT_FORMAT: None, DYNAMO: FORMATS[DYNAMO].start}.get(format, _ORCHESTRATOR_SCRIPT)
            document = pair_document(plan)
            print_json(_build_document(output, format, start, files, is_replaced=is_replaced, plan=document))
            return
        wrote = "replaced" if is_replaced else "wrote"
        gpus = f", {plan.num_gpus} GPUs in all" if plan.num_gpus else ""
        sides = " and ".join(f"{plan.count(side)} {side} server{'s' * (plan.count(side) > 1)}" for side in plan.sides)
        title = f"{wrote} {output}: {plan.context.title}, for {sides}{gpus}, as {PAIR_FORMATS[format]}"
        first, second = (details(server, format=format) for server in plan.sides.values())
        both = [line for line in first if line in second]
        lines = [title, "each server:", *both]
        for side, server in plan.sides.items():
            folder = Path(side) if format == DYNAMO else output / side
            own = [line for line in details(server, format=format) if line not in both]
            lines += [f"{folder}, {_number(plan, side)}:", *own]
            lines += [] if format == DYNAMO else [start_line(server, folder, format=format)]
        for line in [*lines, _join_line(plan, output, format)]:
            print(paragraph(printable(line), "", "    "))
        common = [each for each in plan.context.warnings if each in plan.generation.warnings]
        plan_view.show_warnings([*plan.warnings, *common])
        for side, server in plan.sides.items():
            plan_view.show_warnings([each for each in server.warnings if each not in common], f" of a {side} server")


def show_pair(request: DisaggregatedRequest, *, as_json: bool, brief: bool, against: Path | None = None) -> None:
    """Print the plan for `request`; a brief one is without the settings.

    :param against: a folder that `build` wrote. Only what would change in it is shown.
    """
    plan = make_disaggregated_plan(request)
    if against is not None:
        from deepseek_triton_tools.plans.folder_changes import show_diff

        for side, server in plan.sides.items():
            show_diff(server, against / side)
        return
    with to_reader():
        if as_json:
            print_json(pair_document(plan))
            return
        for side, server in plan.sides.items():
            print(styled(f"{side.capitalize()}: {_number(plan, side)}", "1"), flush=True)
            plan_view.show_plan(server, as_json=False, brief=brief)
            print()
        plan_view.show_warnings(plan.warnings)


def pair_document(plan: DisaggregatedPlan) -> dict[str, Any]:
    """Return `plan` for json.dumps. Each side is a document of `plan`."""
    return {
        "schema": _PAIR_SCHEMA,
        "variant": plan.context.variant.name,
        "context_servers": plan.num_context,
        "generation_servers": plan.num_generation,
        "gpus": plan.num_gpus or None,
        **{side: plan_view.plan_document(server) for side, server in plan.sides.items()},
        "warnings": [plan_view.warning_document(warned) for warned in plan.warnings],
    }


def _number(plan: DisaggregatedPlan, side: str) -> str:
    """Say how many servers a side has."""
    count = plan.count(side)
    return "one server" if count == 1 else f"the same for {count} servers"


def _join_line(plan: DisaggregatedPlan, output: Path, format: str) -> str:
    """Say how the servers are joined: by the gateway, with a name for each, or by another program."""
    if format == DYNAMO:
        return start_line(plan.context, output, format=format)
    if format != DEFAULT_FORMAT:
        return f"join them: {shlex.quote(str(output / _ORCHESTRATOR_SCRIPT))}; it says how the servers are started"
    words = [
        word
        for option, side in (("--context-server", "context"), ("--server", "generation"))
        for number in range(1, plan.count(side) + 1)
        for word in (option, f"http://{side}{number}:8000")
    ]
    return f"join them: deepseek-triton gateway {shlex.join(words)}"
