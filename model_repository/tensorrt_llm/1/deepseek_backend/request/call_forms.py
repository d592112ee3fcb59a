"""How tools, calls and results are written for the checkpoints whose chat templates leave something of it out.

DeepSeek's own templates of V3, R1 and V3.1 show no tools to the model. They write calls, but not as the model wrote
them: that of V3 and R1 only where content is null, closes a list of calls from the second call on, and begins it only
once in a conversation. So a conversation's calls and results are written here, as the text of the assistant's turn.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepseek_backend.engines.tags import (
    CALL_BEGIN,
    CALL_END,
    CALLS_BEGIN,
    CALLS_END,
    CLOSING,
    DSML,
    DSML_BEGIN,
    RESULT_BEGIN,
    RESULT_END,
    RESULTS_BEGIN,
    RESULTS_END,
    SEPARATOR,
)


@dataclass(frozen=True, kw_only=True)
class CallForm:
    """One way to write calls."""

    name: str
    """Value of model_info's `tool_form`."""
    begins: str
    """Text before the name of the first call."""
    after_name: str
    """Text between a call's name and its arguments."""
    call_begins: str = CALL_BEGIN
    after_arguments: str = CALL_END
    between_calls: str = ""
    results_begin: str = ""
    between_results: str = ""
    results_end: str = ""
    instruction: str = ""
    """The text below the list of tools that tells the model how to call one."""

    def beginning(self, name: str) -> str:
        """Return the beginning of a call: up to its arguments, or up to its name where that is ""."""
        return f"{self.begins}{name}{self.after_name}" if name else self.begins

    def calls(self, calls: Sequence[Mapping[str, Any]]) -> str:
        """Return calls as the model writes them."""
        written = [
            f"{self.call_begins}{function['name']}{self.after_name}{function['arguments']}{self.after_arguments}"
            for function in (call["function"] for call in calls)
        ]
        return f"{CALLS_BEGIN}{self.between_calls.join(written)}{CALLS_END}"

    def tools_text(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """Return the part of the system text that shows the tools."""
        listed = "".join(_tool_text(tool["function"]) for tool in tools)
        return f"## Tools\nYou have access to the following tools:\n\n{listed}{self.instruction}"

    def turn(self, messages: Sequence[Mapping[str, Any]], eos_token: str) -> str:
        """Return a turn of the assistant, with the results that tools gave meanwhile, as one text.

        An answer inside it ends with `eos_token`; the last message does not.
        """
        text = ""
        after_results = False
        for position, message in enumerate(messages):
            content = message["content"] or ""
            if message["role"] == "tool":
                text += self.between_results if after_results else self.results_begin
                text += f"{RESULT_BEGIN}{content}{RESULT_END}"
                after_results = True
                continue
            if after_results:
                text += self.results_end
            text += content if message.get("prefix") else content.split(CLOSING, 1)[-1]
            text += self.calls(message["tool_calls"]) if message.get("tool_calls") else ""
            text += eos_token if position < len(messages) - 1 else ""
            after_results = False
        return text + (self.results_end if after_results else "")


def _tool_text(function: Mapping[str, Any]) -> str:
    parameters = json.dumps(function.get("parameters") or {}, ensure_ascii=False)
    return f"### {function['name']}\nDescription: {function.get('description', '')}\n\nParameters: {parameters}\n\n"


RAW_JSON = CallForm(
    name="raw_json",
    begins=CALLS_BEGIN + CALL_BEGIN,
    after_name=SEPARATOR,
    # The words that the model was trained with, from DeepSeek-V3.1's model card.
    instruction=f"""IMPORTANT: ALWAYS adhere to this exact format for tool use:
{CALLS_BEGIN}{CALL_BEGIN}tool_call_name{SEPARATOR}tool_call_arguments{CALL_END}{{additional_tool_calls}}{CALLS_END}

Where:
- `tool_call_name` must be an exact match to one of the available tools
- `tool_call_arguments` must be valid JSON that strictly follows the tool's Parameters Schema
- For multiple tool calls, chain them directly without separators or spaces
""",
)
"""DeepSeek-V3.1 and V3.2-Exp."""

FENCED = CallForm(
    name="fenced",
    begins=f"{CALLS_BEGIN}{CALL_BEGIN}function{SEPARATOR}",
    after_name="\n```json\n",
    call_begins=f"{CALL_BEGIN}function{SEPARATOR}",
    after_arguments=f"\n```{CALL_END}",
    between_calls="\n",
    results_begin=RESULTS_BEGIN,
    between_results="\n",
    results_end=RESULTS_END,
    # DeepSeek gives no text for these models.
    instruction=f"""To call a tool, write exactly this, with its name for NAME and one JSON object as its arguments:
{CALLS_BEGIN}{CALL_BEGIN}function{SEPARATOR}NAME
```json
{{"KEY": "VALUE"}}
```{CALL_END}{CALLS_END}
To call several tools, write a block from {CALL_BEGIN} to {CALL_END} for each, one below the other, before {CALLS_END}.
""",
)
"""DeepSeek-V3, R1 and R1-0528."""

DSML_FORM = CallForm(
    name="dsml",
    begins=f'\n\n{DSML_BEGIN}\n<{DSML}invoke name="',
    after_name='">\n',
)
"""DeepSeek-V3.2, whose tokenizers render conversations by themselves; without one `dsml_prompt` does."""

FORMS = {form.name: form for form in (RAW_JSON, FENCED, DSML_FORM)}

OTHER_FORM = CallForm(name="template", begins="", after_name="")
"""A chat template that renders tools, and calls in a form that is not known here."""
