"""The wire contract as config.pbtxt, the model as Triton sees it, and as the tables of docs/contract.md."""

from __future__ import annotations

from typing import Any

from deepseek_triton_build.data.own_files import contract
from deepseek_triton_build.text import comment_lines

_DECOUPLED = "Responses are sent as they are made: streams need this, and a request without a stream gets one response."
_NOT_DECOUPLED = "Each request gets one response: ModelInfer and /infer need this, and streams are refused."


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


def declaration(kind: str, tensor: Any) -> str:
    """Return the line that declares a tensor of the wire contract.

    :param kind: `input` or `output`.
    """
    optional = ", optional: true" if kind == "input" and tensor.optional else ""
    dims = ", ".join(map(str, tensor.dims))
    return f'{kind} [ {{ name: "{tensor.name}", data_type: {tensor.dtype.value}, dims: [ {dims} ]{optional} }} ]'


def contract_tables() -> str:
    """Return the tables of docs/contract.md, in Markdown."""
    tables = contract()
    fields = [
        [f"`{field.name}`", _type(field.dtype) + ", a list" * field.many, field.range_text(), field.meaning]
        for field in tables.SAMPLING_FIELDS
    ]
    errors = [
        [f"`{code.value}`", tables.TRITON_CODES[code], meaning] for code, meaning in tables.ERROR_MEANINGS.items()
    ]
    parts = [
        _section("Inputs", _tensor_rows(tables.REQUEST_INPUTS), "input | type | shape | meaning"),
        _section("Sampling fields", fields, "field | type | range | meaning"),
        _section("Outputs", _tensor_rows(tables.OUTPUTS), "output | type | shape | meaning"),
        _section("Error codes", errors, "code | Triton status | meaning"),
        "Every error message begins with its code in brackets, because gRPC streams and server-sent events "
        "(SSE) do not carry the status.\n",
    ]
    return "\n".join(parts)


def _section(title: str, rows: Any, columns: str) -> str:
    names = columns.split(" | ")
    lines = [f"## {title}", "", _row(names), _row(["---"] * len(names)), *map(_row, rows)]
    return "\n".join(lines) + "\n"


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _tensor_rows(tensors: Any) -> list[list[str]]:
    return [[f"`{t.name}`", _type(t.dtype), f"[{', '.join(map(str, t.dims))}]", t.meaning] for t in tensors]


def _type(dtype: Any) -> str:
    return str(dtype.value).removeprefix("TYPE_")
