"""Settings as YAML, each with its reason in a comment above; model.yaml, what the engine is started with."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from deepseek_triton_build.data.planned_settings import Setting, SettingsFile, footnotes
from deepseek_triton_build.text import LINE_WIDTH, comment_lines, yaml_flow

if TYPE_CHECKING:
    from deepseek_triton_build.planning.plan import Plan


def yaml_lines(settings: Sequence[Setting]) -> list[str]:
    """Return `settings` as nested sections. A reason stands above the first of the lines that it is for, and a source
    that several reasons rest on once, at the top."""
    notes = footnotes(settings)
    sources = (line for source, number in notes.items() for line in comment_lines(f"[{number}] {source}"))
    return [*sources, *_section([(setting.key.split("."), setting) for setting in settings], notes, indent="")]


def settings_file_text(file: SettingsFile, *, stamp: str) -> str:
    """Return the text of `file`."""
    settings = [replace(setting, key=setting.key.removeprefix(f"{file.section}.")) for setting in file.settings]
    return "\n".join([f"# {stamp}", *comment_lines(f"{file.section}, by its path"), *yaml_lines(settings)]) + "\n"


_Row = tuple[Sequence[str], Setting]
"""The names of a setting's path below the section that is written, and the setting."""


def _section(rows: list[_Row], notes: Mapping[str, int], indent: str) -> Iterator[str]:
    # In the order of first use, so that no section is opened twice: parsers take the last one without a word.
    named: dict[str, list[_Row]] = {}
    for (name, *rest), setting in rows:
        named.setdefault(name, []).append((rest, setting))
    above = ""
    for name, members in named.items():
        if any(path for path, _ in members):
            yield f"{indent}{name}:"
            yield from _section(members, notes, indent + "  ")
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


def model_yaml(plan: Plan, *, stamp: str) -> str:
    """Return the text: LLM arguments at the top level, where upstream's model.py reads them; ours in triton_config."""
    lines = [f"# {stamp}", "# LLM arguments; the backend's own settings are under triton_config."]
    lines += yaml_lines(plan.settings)
    return "\n".join(lines) + "\n"


def llm_arguments(plan: Plan) -> list[Setting]:
    """Return the settings that are the engine's arguments, under the release's own keys."""
    return [setting for setting in plan.settings if not setting.key.startswith(_OURS)]
