"""Renders a conversation for DeepSeek-V4 and V4.1, which have no chat template.

It follows DeepSeek's own renderer (deepseek-recipe 0.2.0) and not the tokenizers of engines: vLLM's puts tools before
the system's text, has thinking off by default in some versions, and does not continue an answer.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from deepseek_backend.config import CHAT_ENCODINGS
from deepseek_backend.contract import ErrorCode
from deepseek_backend.engines.generate_request import Messages
from deepseek_backend.engines.tags import CLOSING, DSML, OPENING, V4_CALLS, V41_CALLS
from deepseek_backend.errors import RequestError
from deepseek_backend.field_values import listed, quoted, read_object
from deepseek_backend.messages import ToolUse


class Rendered(NamedTuple):
    """A prompt, and the beginning of the answer that it ends with; "" where it ends before the answer."""

    prompt: str
    begun: str = ""
    continues_reasoning: bool = False
    """The prompt ends within the reasoning, behind some text of it."""


_BOS, _EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
# The words that the models were trained with.
_ABSOLUTE = """Reasoning Effort: Absolute maximum with no shortcuts permitted.
You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root cause, \
rigorously stress-testing your logic against all potential paths, edge cases, and adversarial scenarios.
Explicitly write out your entire deliberation process, documenting every intermediate step, considered alternative, \
and rejected hypothesis to ensure absolutely no assumption is left unchecked.

"""
_BEYOND = """Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.
You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: exhaustively decompose the \
problem into its most fundamental components, trace every causal chain to its root, and resolve the underlying cause \
rather than any surface symptom.
Do not stop reasoning until you have independently verified the solution from multiple angles and are certain that no \
assumption remains unchecked and no error remains undiscovered.

"""
_NUMBER = "Reasoning Effort: {} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
_TOOLS = f"""## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a \
"<{DSML}@calls>" block like the following:

<{DSML}@calls>
<{DSML}@invoke name="$TOOL_NAME">
<{DSML}@parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{DSML}@parameter>
...
</{DSML}@invoke>
<{DSML}@invoke name="$TOOL_NAME2">
...
</{DSML}@invoke>
</{DSML}@calls>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, \
objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by {OPENING}), you MUST output your complete reasoning inside \
{OPENING}...{CLOSING} BEFORE any tool calls or final response.

Otherwise, output directly after {CLOSING} with tool calls or final response.

### Available Tool Schemas

%s

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""
_SCHEMA = "\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"
JSON_OBJECT = "json_object"
"""Asks for any JSON object, where another reply format is a JSON schema."""
_STRICT_KEYS = (
    *("type", "$ref", "anyOf", "properties", "items", "additionalProperties", "required", "description", "enum"),
    *("const", "default", "pattern", "format", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    "multipleOf",
)
"""Keys of a strict tool's schema that DeepSeek keeps, in its order."""


@dataclass(frozen=True, kw_only=True)
class V4Form:
    """One way to write V4's prompts."""

    efforts: Mapping[str, str]
    """reasoning_effort -> the text about it, without those that mean the same as another."""
    takes_numbers: bool = False
    """An effort may be a number from 1 to 100."""
    systems_in_place: bool = False
    """A message of the system stays where it is, behind a tag of its own; else all of them come first."""
    calls: str = V4_CALLS
    json_object: str
    """Asks for any JSON object."""

    @property
    def known_efforts(self) -> list[str]:
        """The values of reasoning_effort, also those that mean the same as another."""
        return ["none", *self.efforts, *_SAME_EFFORTS, *(["1-100"] if self.takes_numbers else [])]

    @property
    def blank(self) -> str:
        """The blank before the name of each tag of a call, or none."""
        return self.calls.removesuffix(self.calls.lstrip())

    @property
    def block(self) -> str:
        """The beginning of a block of calls, on lines of its own."""
        return f"\n\n<{DSML}{self.calls}>\n"


# The model behind DeepSeek's API since July 2026; before, only the highest effort had a text.
_WORDS = "\n\nYou are a helpful assistant designed to output JSON.\n## Response Format:\n\nReply with JSON object ONLY."
V4 = V4Form(efforts={"low": "", "high": _ABSOLUTE, "max": _BEYOND}, json_object=_WORDS)
V4_PREVIEW = V4Form(efforts={"low": "", "high": "", "max": _ABSOLUTE}, json_object=_WORDS)
V41 = V4Form(
    efforts={effort: _NUMBER.format(number) for effort, number in {"low": 50, "high": 75, "max": 100}.items()},
    takes_numbers=True,
    systems_in_place=True,
    calls=V41_CALLS,
    json_object=f'{_SCHEMA}{{"type": "json_object"}}',
)
_FORMS = dict(zip(CHAT_ENCODINGS, (V4_PREVIEW, V4, V41), strict=True))
_NEW_NAME = re.compile("0731|0813")
"""Matches names of checkpoints with V4's encoding of July 2026. No key of config.json tells it: V4-Flash-DSpark has the
older one."""
_SAME_EFFORTS = {"minimal": "low", "medium": "high", "xhigh": "high", "ultra": "max"}


def v4_form(model_type: str, name: str, encoding: str | None = None) -> V4Form | None:
    """Return how prompts are written for a checkpoint; None for one that is neither V4 nor V4.1.

    :param model_type: in its config.json.
    :param encoding: the setting `chat_encoding`, which decides where it is there.
    """
    if encoding:
        return _FORMS[encoding]
    if model_type == "deepseek_v41":
        return V41
    if model_type != "deepseek_v4":
        return None
    return V4 if _NEW_NAME.search(name) else V4_PREVIEW


def render_v4(
    form: V4Form,
    messages: Messages,
    template_kwargs: Mapping[str, Any],
    tool_use: ToolUse,
    reply_format: str | Mapping[str, Any] = "",
) -> Rendered:
    """Return the prompt.

    :param messages: the reasoning of earlier turns is in them. A last message with `prefix` is left open.
    :param template_kwargs: `thinking`, which wins over `reasoning_effort` "none". Without either the model thinks.
        Beside a required call it never does, as the prompt begins the call behind the reasoning.
    :param reply_format: JSON_OBJECT, a JSON schema, or "" for text.
    :raises RequestError: for other arguments, and for a continuation or missing results beside tools.
    """
    thinks, effort = _thinking(form, template_kwargs)
    thinks = thinks and not tool_use.required
    tools = [tool for tool in tool_use.tools if tool_use.name in ("", tool["function"]["name"])]
    prefix = messages[-1] if messages and messages[-1].get("prefix") else None
    if prefix is not None and tools:
        raise RequestError(f"messages[{len(messages) - 1}].prefix: expected no tools beside it")
    first_text = ""
    if tools:
        shown = "\n".join(json.dumps(_shown(tool["function"]), ensure_ascii=False) for tool in tools)
        first_text += "\n\n" + _TOOLS.replace("@calls", form.calls).replace("@", form.blank) % shown
    if reply_format == JSON_OBJECT:
        first_text += form.json_object
    elif reply_format:
        first_text += _SCHEMA + json.dumps(reply_format, ensure_ascii=False)
    turns = _Turns(form, keeps_reasoning=thinks and bool(tools))
    messages = [message for message in messages if message["role"] != "system" or message["content"]]
    if not form.systems_in_place:
        systems = [message["content"] for message in messages if message["role"] == "system"]
        first_text = "\n\n".join(systems) + first_text
    elif messages and messages[0]["role"] == "system":
        first_text, messages = messages[0]["content"] + first_text, messages[1:]
    first_text = (effort if thinks else "") + first_text
    text = _BOS + ("<｜System｜>" if form.systems_in_place and first_text else "") + first_text
    text += turns.text(messages if prefix is None else messages[:-1])
    text += "<｜Assistant｜>"
    if prefix is not None:
        reasoning, content = prefix.get("reasoning_content", ""), prefix["content"]
        if not thinks:
            return Rendered(f"{text}{CLOSING}{content}")
        text += f"{OPENING}{reasoning}"
        return Rendered(f"{text}{CLOSING}{content}") if content else Rendered(text, continues_reasoning=True)
    begun = form.block if tool_use.required else ""
    return Rendered(f"{text}{OPENING if thinks else CLOSING}{begun}", begun)


def _thinking(form: V4Form, template_kwargs: Mapping[str, Any]) -> tuple[bool, str]:
    """Return whether the model thinks, and the text about its effort."""
    if unknown := [name for name in template_kwargs if name not in ("thinking", "reasoning_effort")]:
        raise RequestError(
            f"chat_template_kwargs: DeepSeek-V4 has no {listed(unknown)}; it knows thinking and reasoning_effort"
        )
    thinks, effort = template_kwargs.get("thinking"), template_kwargs.get("reasoning_effort")
    if not isinstance(thinks, bool | None):
        raise RequestError(f"chat_template_kwargs.thinking: expected true or false, got {quoted(thinks)}")
    if isinstance(effort, int) and not isinstance(effort, bool) and form.takes_numbers and 1 <= effort <= 100:
        return thinks is not False, _NUMBER.format(effort)
    word = "none" if effort == "none" else _SAME_EFFORTS.get(str(effort or "high"), effort or "high")
    if word != "none" and word not in form.efforts:
        known = ", ".join(form.known_efforts)
        raise RequestError(f"chat_template_kwargs.reasoning_effort: expected one of {known}, got {quoted(effort)}")
    if thinks is None:
        thinks = word != "none"
    return thinks, form.efforts.get(word, form.efforts["high"])


class _Turns:
    """Writes what follows the first text of the system."""

    def __init__(self, form: V4Form, *, keeps_reasoning: bool) -> None:
        self._form = form
        self._keeps_reasoning = keeps_reasoning

    def text(self, messages: Messages) -> str:
        text = ""
        before = ""
        has_question = False
        """The user has said something since a message of another role: V4 joins such messages without empty ones."""
        for place, message in enumerate(messages):
            role, content = message["role"], message["content"] or ""
            if role in ("user", "tool"):
                if before not in ("user", "tool"):
                    text += "<｜User｜>"
                elif role == "tool" or before == "tool" or self._form.systems_in_place or (content and has_question):
                    text += "\n\n"
                text += content if role == "user" else f"<tool_result>{content}</tool_result>"
                has_question = role == "user" and (bool(content) or (before == "user" and has_question))
            elif role == "latest_reminder":
                if before != role or not self._form.systems_in_place:  # of neighbours V4.1 takes the first
                    text += f"<｜latest_reminder｜>{content}"
            elif role == "assistant":
                reasoning = f"{OPENING}{message.get('reasoning_content', '')}" if self._keeps_reasoning else ""
                text += f"<｜Assistant｜>{reasoning}{CLOSING}{content}"
                if calls := message.get("tool_calls"):
                    _check_results(messages, place)
                    text += self._calls(calls)
                text += _EOS
            elif not self._form.systems_in_place:
                continue  # it stands before all turns, and parts none
            else:
                text += f"<｜System｜>{content}"
            before = role
        return text

    def _calls(self, calls: Sequence[Mapping[str, Any]]) -> str:
        invoke, parameter = (f"{DSML}{self._form.blank}{name}" for name in ("invoke", "parameter"))
        written = []
        for call in calls:
            name, text = call["function"]["name"], call["function"]["arguments"]
            arguments = read_object(text)
            if arguments is None:
                arguments = {"arguments": text}
            lines = [
                f'<{parameter} name="{key}" string="{str(isinstance(value, str)).lower()}">'
                f"{value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}</{parameter}>"
                for key, value in arguments.items()
            ]
            if self._form.systems_in_place and not lines:
                lines = [""]  # V4.1 has an empty line here
            written.append("\n".join([f'<{invoke} name="{name}">', *lines, f"</{invoke}>"]))
        return f"{self._form.block}{chr(10).join(written)}\n</{DSML}{self._form.calls}>"


def _check_results(messages: Messages, place: int) -> None:
    """Check that each call of a message has its result.

    :raises RequestError: for the first that has none.
    """
    results = set()
    for message in messages[place + 1 :]:
        if message["role"] != "tool":
            break
        results.add(json.dumps(message.get("tool_call_id")))
    for number, call in enumerate(messages[place]["tool_calls"]):
        if json.dumps(call.get("id")) not in results:
            raise RequestError(
                f"messages[{place}].tool_calls[{number}]: expected a message of role tool with its result, got none",
                code=ErrorCode.INVALID_ARGUMENT,
            )


def _shown(function: Mapping[str, Any]) -> Mapping[str, Any]:
    parameters = function.get("parameters") or {}
    return {
        "name": function["name"],
        "description": function.get("description", ""),
        "parameters": _strict_schema(parameters) if function.get("strict") is True else parameters,
    }


def _strict_schema(value: Any) -> Any:
    """A strict tool's schema as DeepSeek shows it: in one order, without keys that it doesn't enforce."""
    if isinstance(value, list):
        return [_strict_schema(item) for item in value]
    if not isinstance(value, dict):
        return value
    schema = {key: value[key] for key in _STRICT_KEYS if key in value}
    for key in ("anyOf", "items", "additionalProperties"):
        if key in schema:
            schema[key] = _strict_schema(schema[key])
    if "properties" in schema:
        schema["properties"] = {name: _strict_schema(property) for name, property in schema["properties"].items()}
    return schema
