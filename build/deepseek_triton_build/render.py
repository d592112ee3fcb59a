"""A plan -> the text of its files. Deterministic: the same plan gives the same bytes."""

from __future__ import annotations

import math
import textwrap
from typing import Any

import yaml

from deepseek_triton_build.plan import Plan
from deepseek_triton_build.source import contract

_WIDTH = 110


def model_yaml(plan: Plan, *, stamp: str) -> str:
    """model.yaml: LLM arguments at the top level, ours under triton_config, the reason above each."""
    lines = [f"# {stamp}", "# LLM arguments; the backend's own settings are under triton_config."]
    open_sections: list[str] = []
    for setting in plan.settings:
        *sections, key = setting.key.split(".")
        shared = _common_length(open_sections, sections)
        for depth in range(shared, len(sections)):
            lines.append(f"{_indent(depth)}{sections[depth]}:")
        open_sections = sections
        indent = _indent(len(sections))
        lines += [f"{indent}# {line}" for line in textwrap.wrap(setting.reason, _WIDTH - len(indent))]
        lines.append(f"{indent}{key}: {_scalar(setting.value)}")
    return "\n".join(lines) + "\n"


def config_pbtxt(*, stamp: str, name: str = "tensorrt_llm") -> str:
    """config.pbtxt, written from the wire contract."""
    tables = contract()
    lines = [
        f"# {stamp}",
        f'name: "{name}"',
        'backend: "python"',
        "# The engine batches; Triton hands each request on at once.",
        "max_batch_size: 0",
        "# Responses are sent when they are made: streams need it, and /generate takes the one response of the others.",
        "model_transaction_policy { decoupled: true }",
    ]
    for kind, tensors in (("input", tables.INPUTS), ("output", tables.OUTPUTS)):
        for tensor in tensors:
            lines += _tensor(kind, tensor)
    lines += [
        "# The engine owns the GPUs; this instance is the thread that feeds it.",
        "instance_group [ { count: 1, kind: KIND_CPU } ]",
    ]
    return "\n".join(lines) + "\n"


def start_sh(plan: Plan, *, stamp: str) -> str:
    """start.sh: runs the folder it lies in; for TensorRT-LLM, in a stock Triton container with nothing installed."""
    where = "where tritonserver and the engine's packages are installed"
    prelude, launcher = "", "tritonserver"
    if plan.release is not None:
        mpi = plan.release.record["mpi"]
        where = f"in {plan.release.image}, with nothing installed"
        prelude = _OVERLAY_LINES
        launcher = " ".join(mpi["ranks"] + mpi["entry_point"]).format(world_size=plan.world_size)
    return f"""\
#!/usr/bin/env bash
# {stamp}
# Serves the repository this script lies in, {where}.
# HTTP_PORT, GRPC_PORT and METRICS_PORT move the ports; further arguments go to tritonserver, which listens on every
# address of the machine unless told otherwise (--http-address, --grpc-address, --metrics-address).
set -euo pipefail
repository=$(cd "$(dirname "${{BASH_SOURCE[0]}}")" && pwd)
{prelude}exec {launcher} \\
  --model-repository "$repository" \\
  --http-port "${{HTTP_PORT:-8000}}" --grpc-port "${{GRPC_PORT:-8001}}" --metrics-port "${{METRICS_PORT:-8002}}" \\
  "$@"
"""


_OVERLAY_LINES = """\
# The engine's workers are processes of their own; this gives them the work-arounds for the container's known faults.
export PYTHONPATH="$repository/tensorrt_llm/1/deepseek_backend/overlay${PYTHONPATH:+:$PYTHONPATH}"
# One MPI rank for each GPU: rank 0 runs tritonserver, all of them run the engine's workers. Plain tritonserver can't
# spawn workers by itself (MPI_ERR_SPAWN).
"""


def _tensor(kind: str, tensor: Any) -> list[str]:
    optional = ", optional: true" if kind == "input" and tensor.optional else ""
    dims = ", ".join(map(str, tensor.dims))
    return [
        *(f"# {line}" for line in textwrap.wrap(tensor.meaning, _WIDTH)),
        f'{kind} [ {{ name: "{tensor.name}", data_type: {tensor.dtype.value}, dims: [ {dims} ]{optional} }} ]',
    ]


def _indent(depth: int) -> str:
    return "  " * depth


def _common_length(left: list[str], right: list[str]) -> int:
    length = 0
    while length < min(len(left), len(right)) and left[length] == right[length]:
        length += 1
    return length


def _scalar(value: Any) -> str:
    """`value` as YAML on one line: dumped as the one item of a list in flow style, less the brackets."""
    return yaml.safe_dump([value], default_flow_style=True, width=math.inf).strip()[1:-1]
