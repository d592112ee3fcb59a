"""The files of a model that people read: model.yaml, what the engine is started with, each setting with its reason in a
comment above, and config.pbtxt, the model as Triton sees it; the wire contract as the tables of docs/contract.md too.
"""

import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from deepseek_triton_build.data.own_files import contract
from deepseek_triton_build.data.planned_settings import Setting, SettingsFile, footnotes
from deepseek_triton_build.text import LINE_WIDTH, comment_lines, yaml_flow

if TYPE_CHECKING:
    from deepseek_triton_build.planning.plan import Plan

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
    inputs = _tensor_rows(tables.REQUEST_INPUTS)
    inputs.append([f"`{tables.TIMEOUT_US.name}`", "INT64", "parameter", tables.TIMEOUT_US.meaning])
    errors = [
        [f"`{code.value}`", tables.TRITON_CODES[code], meaning] for code, meaning in tables.ERROR_MEANINGS.items()
    ]
    parts = [
        _section("Inputs", inputs, "input | type | shape | meaning"),
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


def yaml_lines(settings: Sequence[Setting]) -> list[str]:
    """Return `settings` as nested sections. A reason stands above the first of the lines that it is for, and a source
    that several reasons rest on once, at the top."""
    notes = footnotes(settings)
    sources = (line for source, number in notes.items() for line in comment_lines(f"[{number}] {source}"))
    return [*sources, *_yaml_section([(setting.key.split("."), setting) for setting in settings], notes, indent="")]


def settings_file_text(file: SettingsFile, *, stamp: str) -> str:
    settings = [replace(setting, key=setting.key.removeprefix(f"{file.section}.")) for setting in file.settings]
    return "\n".join([f"# {stamp}", *comment_lines(f"{file.section}, by its path"), *yaml_lines(settings)]) + "\n"


_Row = tuple[Sequence[str], Setting]
"""The names of a setting's path below the section that is written, and the setting."""


def _yaml_section(rows: list[_Row], notes: Mapping[str, int], indent: str) -> Iterator[str]:
    # In the order of first use, so that no section is opened twice: parsers take the last one without a word.
    named: dict[str, list[_Row]] = {}
    for (name, *rest), setting in rows:
        named.setdefault(name, []).append((rest, setting))
    above = ""
    for name, members in named.items():
        if any(path for path, _ in members):
            yield f"{indent}{name}:"
            yield from _yaml_section(members, notes, indent + "  ")
            above = ""
            continue
        [(_, setting)] = members
        if setting.comment != above:
            yield from comment_lines(setting.comment_with(notes), indent)
            above = setting.comment
        yield from _entry(name, setting.value, indent)


def _entry(name: str, value: Any, indent: str) -> Iterator[str]:
    line = f"{indent}{name}: {yaml_flow(value)}"
    if len(line) <= LINE_WIDTH or not isinstance(value, list | tuple | dict):
        yield line
        return
    if isinstance(value, list | tuple) and all(isinstance(item, list | tuple) for item in value):
        yield f"{indent}{name}:"
        yield from _wrapped(value, indent + "  ")
        return
    import yaml

    block = yaml.safe_dump(value, default_flow_style=False, sort_keys=False, width=math.inf)
    yield f"{indent}{name}:"
    yield from textwrap.indent(block, indent + "  ").splitlines()


def _wrapped(items: Iterable[Any], indent: str) -> Iterator[str]:
    """Yield a list of lists in flow style, with as many of them on a line as fit."""
    line = f"{indent}["
    for number, item in enumerate(map(yaml_flow, items)):
        if number and len(f"{line}, {item}") >= LINE_WIDTH:
            yield f"{line},"
            line = f"{indent} {item}"
        else:
            line += f", {item}" if number else item
    yield f"{line}]"


_OURS = "triton_config."


def model_yaml(plan: "Plan", *, stamp: str) -> str:
    """Return the text: LLM arguments at the top level, where upstream's model.py reads them; ours in triton_config."""
    lines = [f"# {stamp}", "# LLM arguments; the backend's own settings are under triton_config."]
    lines += yaml_lines(plan.settings)
    return "\n".join(lines) + "\n"


def llm_arguments(plan: "Plan") -> list[Setting]:
    """Return the settings that are the engine's arguments, under the release's own keys."""
    return [setting for setting in plan.settings if not setting.key.startswith(_OURS)]
