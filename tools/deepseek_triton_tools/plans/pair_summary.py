"""A plan of context and generation servers: shown, or written as a folder with a summary of what was written."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from deepseek_triton_build import (
    DEFAULT_FORMAT,
    DYNAMO,
    FORMATS,
    PAIR_FORMATS,
    DisaggregatedPlan,
    DisaggregatedRequest,
    format_request,
    make_disaggregated_plan,
    pair_files,
)
from deepseek_triton_tools._version import __version__
from deepseek_triton_tools.plans.build_summary import SCHEMA as BUILD_SCHEMA
from deepseek_triton_tools.plans.build_summary import details, start_line, write_folder
from deepseek_triton_tools.plans.plan_document import plan_document, warning_document
from deepseek_triton_tools.plans.plan_view import show_plan, show_warnings
from deepseek_triton_tools.terminal.output_streams import print_json, printable, to_reader
from deepseek_triton_tools.terminal.tables import paragraph, styled

SCHEMA = "deepseek-triton/pair/1"
ORCHESTRATOR_SCRIPT = "orchestrator.sh"


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
            document = {
                "schema": BUILD_SCHEMA,
                "output": str(output),
                "format": format,
                "start": _start(format),
                "replaced": is_replaced,
                "files": [file.path.as_posix() for file in files],
                "quant_config": None,
                "plan": pair_document(plan),
            }
            print_json(document)
            return
        wrote = "replaced" if is_replaced else "wrote"
        title = f"{wrote} {output}: {plan.context.variant.title}, {_counts(plan)}, as {PAIR_FORMATS[format]}"
        print(paragraph(printable(title), "", "    "))
        for side, server in plan.sides.items():
            folder = Path(side) if format == DYNAMO else output / side
            lines = [f"{folder}, {_number(plan, side)}:", *details(server, format=format)]
            lines += [] if format == DYNAMO else [start_line(server, folder, format=format)]
            for line in lines:
                print(paragraph(printable(line), "", "    "))
        print(paragraph(printable(_join_line(plan, output, format)), "", "    "))
        show_warnings(plan)
        for side, server in plan.sides.items():
            show_warnings(server, f" of a {side} server")


def show_pair(request: DisaggregatedRequest, *, as_json: bool, brief: bool, against: Path | None = None) -> None:
    """Print the plan for `request`; a brief one is without the settings.

    :param against: a folder that `build` wrote. Only what would change in it is shown.
    """
    plan = make_disaggregated_plan(request)
    if against is not None:
        from deepseek_triton_tools.plans.plan_diff import show_diff

        for side, server in plan.sides.items():
            show_diff(server, against / side)
        return
    with to_reader():
        if as_json:
            print_json(pair_document(plan))
            return
        for side, server in plan.sides.items():
            print(styled(f"{side.capitalize()}: {_number(plan, side)}", "1"), flush=True)
            show_plan(server, as_json=False, brief=brief)
            print()
        show_warnings(plan)


def pair_document(plan: DisaggregatedPlan) -> dict[str, Any]:
    """Return `plan` for json.dumps. Each side is a document of `plan`."""
    return {
        "schema": SCHEMA,
        "variant": plan.context.variant.name,
        "context_servers": plan.num_context,
        "generation_servers": plan.num_generation,
        "gpus": plan.num_gpus or None,
        **{side: plan_document(server) for side, server in plan.sides.items()},
        "warnings": [warning_document(warned) for warned in plan.warnings],
    }


def _counts(plan: DisaggregatedPlan) -> str:
    gpus = f", {plan.num_gpus} GPUs in all" if plan.num_gpus else ""
    sides = " and ".join(f"{plan.count(side)} {side} server{'s' * (plan.count(side) > 1)}" for side in plan.sides)
    return f"for {sides}{gpus}"


def _number(plan: DisaggregatedPlan, side: str) -> str:
    """Say how many servers a side has."""
    count = plan.count(side)
    return "one server" if count == 1 else f"the same for {count} servers"


def _start(format: str) -> str | None:
    """Return the file that starts or joins the servers of both sides; None where each side has its own only."""
    if format == DYNAMO:
        return FORMATS[DYNAMO].start
    return None if format == DEFAULT_FORMAT else ORCHESTRATOR_SCRIPT


def _join_line(plan: DisaggregatedPlan, output: Path, format: str) -> str:
    """Say how the servers are joined: by the gateway, with a name for each, or by another program."""
    if format == DYNAMO:
        return start_line(plan.context, output, format=format)
    if format != DEFAULT_FORMAT:
        return f"join them: {shlex.quote(str(output / ORCHESTRATOR_SCRIPT))}; it says how the servers are started"
    words = [
        word
        for option, side in (("--context-server", "context"), ("--server", "generation"))
        for number in range(1, plan.count(side) + 1)
        for word in (option, f"http://{side}{number}:8000")
    ]
    return f"join them: deepseek-triton gateway {shlex.join(words)}"
