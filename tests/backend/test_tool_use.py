from __future__ import annotations

import json
from typing import Any

import pytest

from deepseek_backend.request.tool_use import NO_TOOLS, ToolUse, read_tool_use


def tool(name: Any = "f", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


def named(name: Any) -> str:
    return json.dumps(tool(name))


ONE, TWO = [tool("f")], [tool("f"), tool("g", description="G", parameters={"type": "object"})]


@pytest.mark.parametrize(
    ("tools", "choice", "expected"),
    [
        ([], None, NO_TOOLS),
        ([], "auto", NO_TOOLS),
        (TWO, None, ToolUse(tools=TWO)),
        (TWO, "auto", ToolUse(tools=TWO)),
        (TWO, '"auto"', ToolUse(tools=TWO)),
        (TWO, "none", NO_TOOLS),
        (TWO, "required", ToolUse(tools=TWO, required=True)),
        (ONE, "required", ToolUse(tools=ONE, required=True, name="f")),
        (TWO, named("g"), ToolUse(tools=TWO, required=True, name="g")),
        ([tool("f", description=None, strict=True)], None, ToolUse(tools=[tool("f", strict=True)])),
    ],
)
def test_tools_and_the_choice_among_them(tools: list[Any], choice: str | None, expected: ToolUse) -> None:
    assert read_tool_use(json.dumps(tools), choice) == expected


@pytest.mark.parametrize(
    ("tools", "choice", "problem"),
    [
        ("{", None, r"^tools: expected a JSON array, got '\{' \(Expecting"),
        ({}, None, r"^tools: expected a JSON array of functions, got {}$"),
        (["f"], None, r"""^tools\[0\]: expected {"type": "function", .*, got 'f'$"""),
        ([{"type": "web_search"}], None, r"^tools\[0\]: expected .*, got {'type': 'web_search'}$"),
        ([{"type": "function", "name": "f"}], None, r"^tools\[0\]: expected "),
        ([tool(None)], None, r"^tools\[0\].function.name: expected 1 to 64 letters.*, got None$"),
        ([tool("a" * 65)], None, r"^tools\[0\].function.name: expected 1 to 64 letters"),
        ([tool("a b")], None, r"^tools\[0\].function.name: .*, got 'a b'$"),
        ([tool("f", description=1)], None, r"^tools\[0\].function.description: expected text, got 1$"),
        ([tool("f", parameters=[])], None, r"^tools\[0\].function.parameters: expected a JSON schema, .* got \[\]$"),
        ([tool("f", x="\ud83d")], None, r"^tools: expected whole characters"),
        ([*TWO, tool("f")], None, r"^tools: expected each name once, got 'f' twice$"),
        ([tool(f"f{n}") for n in range(129)], None, r"^tools: expected at most 128, got 129$"),
        ([], "required", r"^tool_choice: expected tools beside 'required', got none$"),
        (ONE, "any", r"^tool_choice: expected one of auto, none, required or a JSON object, got 'any'"),
        (ONE, "3", r"^tool_choice: expected auto, none, required or .*, got 3$"),
        (ONE, '{"type": "function"}', r"^tool_choice: expected auto, none, required or "),
        (TWO, named("h"), r"^tool_choice: expected one of the tools, f, g, got 'h'$"),
        (TWO, named(["f"]), r"^tool_choice: expected one of the tools, f, g, got \['f'\]$"),
    ],
)
def test_what_is_wrong_is_said_with_what_was_expected_and_what_came(
    tools: Any, choice: str | None, problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        read_tool_use(tools if isinstance(tools, str) else json.dumps(tools), choice)
