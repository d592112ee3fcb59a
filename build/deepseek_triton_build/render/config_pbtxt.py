"""config.pbtxt: the model as Triton sees it."""

from __future__ import annotations

from typing import Any

from deepseek_triton_build.data.model_source import contract
from deepseek_triton_build.render.yaml_text import comment


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


def _tensor(kind: str, tensor: Any) -> list[str]:
    optional = ", optional: true" if kind == "input" and tensor.optional else ""
    dims = ", ".join(map(str, tensor.dims))
    return [
        *comment(tensor.meaning),
        f'{kind} [ {{ name: "{tensor.name}", data_type: {tensor.dtype.value}, dims: [ {dims} ]{optional} }} ]',
    ]
