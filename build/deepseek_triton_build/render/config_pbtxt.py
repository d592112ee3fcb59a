"""config.pbtxt: the model as Triton sees it."""

from __future__ import annotations

from typing import Any

from deepseek_triton_build.data.model_source import contract
from deepseek_triton_build.text import comment_lines


def config_pbtxt(*, stamp: str, decoupled: bool, backend_name: str = "python") -> str:
    """Return the text of config.pbtxt, written from the wire contract."""
    tables = contract()
    lines = [
        f"# {stamp}",
        'name: "tensorrt_llm"',
        f'backend: "{backend_name}"',
        "# The engine makes the batches, so Triton passes on each request at once.",
        "max_batch_size: 0",
        *comment_lines(_DECOUPLED if decoupled else _NOT_DECOUPLED),
        f"model_transaction_policy {{ decoupled: {str(decoupled).lower()} }}",
    ]
    for kind, tensors in (("input", tables.declared_inputs(decoupled=decoupled)), ("output", tables.OUTPUTS)):
        for tensor in tensors:
            lines += [*comment_lines(tensor.meaning), declaration(kind, tensor)]
    lines += [
        "# The engine takes the GPUs by itself; this instance is only the thread that feeds the engine.",
        "instance_group [ { count: 1, kind: KIND_CPU } ]",
    ]
    return "\n".join(lines) + "\n"


_DECOUPLED = "Responses are sent as they are made: streams need this, and a request without a stream gets one response."
_NOT_DECOUPLED = "Each request gets one response: ModelInfer and /infer need this, and streams are refused."


def declaration(kind: str, tensor: Any) -> str:
    """Return the line that declares a tensor of the wire contract.

    :param kind: `input` or `output`.
    """
    optional = ", optional: true" if kind == "input" and tensor.optional else ""
    dims = ", ".join(map(str, tensor.dims))
    return f'{kind} [ {{ name: "{tensor.name}", data_type: {tensor.dtype.value}, dims: [ {dims} ]{optional} }} ]'
