"""A plan -> the text of its files. Deterministic: the same plan gives the same bytes."""

from __future__ import annotations

import json
import textwrap
from typing import Any

from deepseek_triton_build.plan import Plan, Setting
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
        lines.append(f"{indent}{key}: {_scalar(setting)}")
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
    """start.sh: runs the folder it lies in, in a stock Triton container."""
    launcher = "trtllm-llmapi-launch " if plan.engine == "tensorrt_llm" else ""
    image = f"nvcr.io/nvidia/tritonserver:{plan.release.containers[0]}-trtllm-python-py3" if plan.release else ""
    where = f"in {image}, with nothing installed" if image else "where tritonserver, torch and transformers are"
    why = (
        "# trtllm-llmapi-launch starts the MPI world that the engine's workers join; plain tritonserver can't spawn them.\n"
        if launcher
        else ""
    )
    return f"""\
#!/usr/bin/env bash
# {stamp}
# Serves the repository this script lies in, {where}.
# HTTP_PORT, GRPC_PORT and METRICS_PORT move the ports; further arguments go to tritonserver.
set -euo pipefail
repository=$(cd "$(dirname "${{BASH_SOURCE[0]}}")" && pwd)
{why}exec {launcher}tritonserver \\
  --model-repository "$repository" \\
  --http-port "${{HTTP_PORT:-8000}}" --grpc-port "${{GRPC_PORT:-8001}}" --metrics-port "${{METRICS_PORT:-8002}}" \\
  "$@"
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


def _scalar(setting: Setting) -> str:
    """YAML for a scalar: JSON, which is YAML, except that plain words need no quotes."""
    value = setting.value
    if isinstance(value, str) and value.replace("-", "").replace("_", "").replace("/", "").replace(".", "").isalnum():
        return value if not _looks_like_another_type(value) else json.dumps(value)
    return json.dumps(value, ensure_ascii=False)


def _looks_like_another_type(word: str) -> bool:
    if word.lower() in {"true", "false", "null", "yes", "no", "on", "off", "y", "n", "none"}:
        return True
    return word[0].isdigit() or word[0] in "-."
