"""A plan, written as a folder; and the summary of what was written."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from deepseek_triton_build import (
    DEFAULT_FORMAT,
    DYNAMO,
    FORMATS,
    File,
    Plan,
    PlanRequest,
    ReplacementError,
    dynamo_mismatch,
    format_files,
    format_request,
    make_plan,
    write_repository,
)
from deepseek_triton_build.arithmetic import GIB
from deepseek_triton_tools._version import __version__
from deepseek_triton_tools.plans.plan_document import plan_document
from deepseek_triton_tools.plans.plan_view import engine_version, how_to_get, show_warnings
from deepseek_triton_tools.terminal.output_streams import complain, print_json, printable, to_reader
from deepseek_triton_tools.terminal.tables import paragraph
from deepseek_triton_tools.tool_errors import ToolError

if TYPE_CHECKING:
    from deepseek_triton_build import KvAlgo, QuantConfigChange


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
    before = None if change is None else lambda: changes.append(_apply(change))
    is_replaced = write_folder(files, output, force=force, before=before)
    with to_reader():
        if as_json:
            document = {
                "schema": SCHEMA,
                "output": str(output),
                "format": format,
                "start": FORMATS[format].start,
                "replaced": is_replaced,
                "files": [file.path.as_posix() for file in files],
                "quant_config": next(iter(changes), None),
                "plan": plan_document(plan),
            }
            print_json(document)
            return
        for line in [*summary(plan, output, format=format, is_replaced=is_replaced), *changes]:
            print(paragraph(printable(line), "", "    "))
        show_warnings(plan)


SCHEMA = "deepseek-triton/build/1"


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
    title = f"{wrote} {output}: {plan.variant.title}, as {FORMATS[format].title}"
    return [title, *details(plan, format=format), start_line(plan, output, format=format)]


def details(plan: Plan, *, format: str = DEFAULT_FORMAT) -> list[str]:
    """Return what `summary` says of the plan."""
    if plan.gpu is None or plan.budget is None or plan.profile is None:
        return [f"  {plan.engine} engine"]
    budget = plan.budget
    recipe = f", recipe {plan.recipe.id}" if plan.recipe else ""
    runs = min(plan.max_concurrency, budget.concurrent_requests(plan.workload.isl or 0, plan.workload.osl or 0))
    return [
        f"  {plan.precision}, profile {plan.profile.name}{recipe}",
        f"  {plan.world_size} x {plan.gpu.title}: of {budget.memory / GIB:.0f} GiB each, "
        f"{budget.weights / GIB:.1f} weights, {budget.kv_cache / GIB:.1f} KV cache ({budget.kv_tokens:,} tokens), "
        f"{budget.cuda_graphs / GIB:.1f} CUDA graphs, {(budget.workspace - budget.cuda_graphs) / GIB:.1f} workspace, "
        f"{budget.free / GIB:.1f} left free",
        f"  {runs:,} request{'' if runs == 1 else 's'} at once of {plan.workload.isl:,} tokens in and "
        f"{plan.workload.osl:,} out",
        *_engine_lines(plan, format),
        _checkpoint_line(plan),
        *_omission_lines(plan),
    ]


def _engine_lines(plan: Plan, format: str) -> list[str]:
    if format == DYNAMO:
        return [f"  {plan.image_for(format)}", f"  {dynamo_mismatch(plan)}"]
    return [f"  {engine_version(plan)}: {plan.image_for(format) or how_to_get(plan)}"]


def _checkpoint_line(plan: Plan) -> str:
    assert plan.checkpoint is not None  # a plan for GPUs always has one
    if plan.request.model and plan.request.model != plan.checkpoint.model:
        return f"  checkpoint: {plan.request.model}, as the container sees it"
    size = plan.checkpoint.weight_bytes / 1e9
    if plan.carries_checkpoint:
        return f"  checkpoint: {plan.checkpoint.model}, {size * 1000:.0f} MB inside the folder"
    return f"  checkpoint: {plan.checkpoint.model}, {size:.0f} GB for the container to download; --model names a folder"


def _omission_lines(plan: Plan) -> list[str]:
    if not plan.omissions:
        return []
    return [f"  left out: {', '.join(omission.key for omission in plan.omissions)}; `deepseek-triton plan` says why"]


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


def _quant_config(plan: Plan) -> QuantConfigChange:
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


def _apply(change: QuantConfigChange) -> str:
    """Change the checkpoint, and say so in a line."""
    from deepseek_triton_build import write_quant_config

    backup = write_quant_config(change)
    return change.summary + (f"; as it was: {backup}" if backup else "")
