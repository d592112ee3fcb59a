"""The inputs `tools` and `tool_choice`, read from JSON."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepseek_backend.contract import MAX_TOOLS
from deepseek_backend.field_values import check_characters, quoted, read_json

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
"""A function's name. DeepSeek's API says the same, without the dot, which bridges to other protocols write."""
_CHOICES = ("auto", "none", "required")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The tools that are shown to the model, and whether it must call one."""

    tools: Sequence[Mapping[str, Any]] = ()
    """Objects of type "function", each with the object `function` and a name in it."""
    required: bool = False
    name: str = ""
    """The tool that must be called; "" leaves the choice to the model."""


NO_TOOLS = ToolUse()


def read_tool_use(tools: str | None, choice: str | None) -> ToolUse:
    """Return what the two inputs ask for; None stands for an input that was not given.

    :raises ValueError: with what was expected and what came.
    """
    given = (read_tools(_json("tools", tools, "array")) if tools else None) or ()
    if not choice:
        return ToolUse(tools=given)
    wanted = choice if choice in _CHOICES else _json("tool_choice", choice, "object")
    if wanted == "none":
        return NO_TOOLS
    if wanted == "auto":
        return ToolUse(tools=given)
    names = [tool["function"]["name"] for tool in given]
    if not names:
        raise ValueError(f"tool_choice: expected tools beside {quoted(wanted)}, got none")
    if wanted == "required":
        return ToolUse(tools=given, required=True, name=names[0] if len(names) == 1 else "")
    return ToolUse(tools=given, required=True, name=_chosen(wanted, names))


def read_tools(document: object) -> list[Mapping[str, Any]]:
    """Return the tools in `document`, JSON that has been read.

    :raises ValueError: with what was expected and what came.
    """
    if not isinstance(document, list):
        raise ValueError(f"tools: expected a JSON array of functions, got {quoted(document)}")
    if len(document) > MAX_TOOLS:
        raise ValueError(f"tools: expected at most {MAX_TOOLS}, got {len(document)}")
    check_characters("tools", document)
    tools = [_tool(f"tools[{position}]", tool) for position, tool in enumerate(document)]
    names = [tool["function"]["name"] for tool in tools]
    twice = next((name for position, name in enumerate(names) if name in names[:position]), None)
    if twice is not None:
        raise ValueError(f"tools: expected each name once, got {twice!r} twice")
    return tools


def _tool(where: str, tool: object) -> Mapping[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
        raise ValueError(f'{where}: expected {{"type": "function", "function": {{...}}}}, got {quoted(tool)}')
    function = tool["function"]
    check_tool_name(f"{where}.function.name", function.get("name"))
    description, parameters = function.get("description"), function.get("parameters")
    if description is not None and not isinstance(description, str):
        raise ValueError(f"{where}.function.description: expected text, got {quoted(description)}")
    if parameters is not None and not isinstance(parameters, dict):
        raise ValueError(f"{where}.function.parameters: expected a JSON schema, an object, got {quoted(parameters)}")
    # Clients write null for "not given", and a template would show it.
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def check_tool_name(where: str, name: object) -> None:
    """Refuse what is no name of a function.

    :raises ValueError: with what was expected and what came.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"{where}: expected 1 to 64 letters, digits, '_', '-' or '.', got {quoted(name)}")


def _chosen(wanted: object, names: Sequence[str]) -> str:
    function = wanted.get("function") if isinstance(wanted, dict) and wanted.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if name is None:
        raise ValueError(
            f'tool_choice: expected {", ".join(_CHOICES)} or {{"type": "function", "function": {{"name": ...}}}}, got '
            f"{quoted(wanted)}"
        )
    if name not in names:
        raise ValueError(f"tool_choice: expected one of the tools, {', '.join(names)}, got {quoted(name)}")
    return str(name)


def _json(where: str, text: str, kind: str) -> Any:
    try:
        return read_json(text)
    except ValueError as error:
        expected = f"one of {', '.join(_CHOICES)} or a JSON object" if kind == "object" else "a JSON array"
        raise ValueError(f"{where}: expected {expected}, got {quoted(text)} ({error})") from None
