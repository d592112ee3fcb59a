"""Conversations and their tools, read from JSON and brought into the one form that everything after this reads."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from deepseek_backend.contract import MAX_MESSAGES, MAX_TOOLS, ROLES
from deepseek_backend.engines.generate_request import Messages
from deepseek_backend.field_values import check_characters, listed, quoted, read_json

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt, in one of three forms. `messages` are rendered to text before an engine gets them."""

    text: str = ""
    token_ids: tuple[int, ...] | None = None
    messages: Messages | None = None


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
    # Clients add keys of their own. One that stands where a known one should is refused.
    absent = [key for key in ("parameters", "description", "strict") if function.get(key) is None]
    for key, value in list(function.items())[:20]:  # a request may give thousands
        meant = get_close_matches(key[:64], absent, n=1, cutoff=0.7)
        if not meant and "parameters" in absent and isinstance(value, dict) and value.get("type") == "object":
            meant = ["parameters"]
        if meant and value is not None:
            raise ValueError(f"{where}.function: no key {quoted(key)}; did you mean {meant[0]!r}?")
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


# Clients keep an answer that was all reasoning, the result of a function without one, and empty instructions, with null
# for the text.
_MAY_BE_EMPTY = ("system", "developer", "assistant", "tool")
# The last two are those of OpenAI's Responses API.
_TEXT_PARTS = ("text", "input_text", "output_text")
# Parts of answers that other APIs give back. Reasoning is not shown to the model again, and DeepSeek has no refusals.
_UNREAD_PARTS = ("thinking", "redacted_thinking", "reasoning", "reasoning_content", "reasoning_text", "refusal")
_IMAGE_PARTS = ("image_url", "image", "input_image")
_REASONING = ("reasoning_content", "reasoning")
"""Names of an answer's reasoning on several servers. The first one is kept."""


def read_messages(text: str) -> Messages:
    """Return the conversation in `text`, a JSON array of objects with a role and a content.

    Further keys are kept for the chat template. The parts of a content stay apart, for `joined`. Those other than text
    are refused, but for images and for those of an answer that are no text to be read again.

    :raises ValueError: with what was expected and what came.
    """
    try:
        document = read_json(text)
    except ValueError as error:
        raise ValueError(f"messages: expected a JSON array, got text that is not JSON ({error})") from None
    if not isinstance(document, list):
        raise ValueError(f"messages: expected a JSON array of messages, got {_named(document)}")
    if not document:
        raise ValueError("messages: expected at least one message, got an empty array")
    if len(document) > MAX_MESSAGES:
        raise ValueError(f"messages: expected at most {MAX_MESSAGES:,} messages, got {len(document):,}")
    messages = [_message(f"messages[{position}]", message) for position, message in enumerate(document)]
    for position, message in enumerate(messages):  # by `prefix` DeepSeek's API asks for a message's continuation
        if not message.get("prefix"):
            continue
        where = f"messages[{position}].prefix"
        if message["prefix"] is not True:
            raise ValueError(f"{where}: expected true or false, got {quoted(message['prefix'])}")
        if position != len(messages) - 1 or message["role"] != "assistant" or message.get("tool_calls"):
            raise ValueError(f"{where}: expected on the last message only, the assistant's, without tool calls")
    return _results_in_order([_with_one_reasoning(message) for message in messages])


def _message(where: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise ValueError(f"{where}: expected an object with role and content, got {_named(message)}")
    if "role" not in message or not ("content" in message or message["role"] in _MAY_BE_EMPTY):
        got = ", ".join(quoted(key) for key in list(message)[:5]) or "no key at all"
        got += " without content" if "role" in message else ""
        raise ValueError(f"{where}: expected an object with role and content, got {got}")
    role = message["role"]
    if role not in ROLES:
        raise ValueError(f"{where}.role: expected one of {', '.join(ROLES)}, got {_named(role)}")
    check_characters(where, message)
    read = {**message, "role": "system" if role == "developer" else role, "content": _content(where, message)}
    if message.get("function_call"):
        raise ValueError(f"{where}.function_call: expected tool_calls, which has taken its place")
    calls = read.pop("tool_calls", None)
    if calls:
        if role != "assistant":
            raise ValueError(f"{where}.tool_calls: expected on messages of the assistant only, got one of role {role}")
        if not isinstance(calls, list):
            raise ValueError(f"{where}.tool_calls: expected an array, got {_named(calls)}")
        read["tool_calls"] = [_tool_call(f"{where}.tool_calls[{place}]", call) for place, call in enumerate(calls)]
    return read


class _Image(str):
    """Stands for an image among the parts of a content; the value is the type that the client gave."""


def _content(where: str, message: Mapping[str, Any]) -> str | tuple[str, ...] | None:
    """Return the content, several parts as a tuple. It is None only beside tool calls: templates tell that from "".

    An image is a tuple of its own, too.
    """
    content = message.get("content")
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return content
    if content is None and message["role"] in _MAY_BE_EMPTY:
        return ""
    if not isinstance(content, list):
        raise ValueError(f"{where}.content: expected text or an array of text parts, got {_named(content)}")
    parts = [_part(f"{where}.content[{position}]", part, message["role"]) for position, part in enumerate(content)]
    texts = tuple(part for part in parts if part is not None)
    return texts if len(texts) > 1 or any(isinstance(part, _Image) for part in texts) else "".join(texts)


def _part(where: str, part: Any, role: str) -> str | None:
    """Return the text of a part; None for one that is not read."""
    if isinstance(part, str) and role in _MAY_BE_EMPTY:  # LangChain keeps an answer so
        return part
    if not isinstance(part, dict):
        raise ValueError(f"{where}: expected an object of type 'text', got {_named(part)}")
    if role == "assistant" and part.get("type") in _UNREAD_PARTS:
        return None
    if part.get("type") in _IMAGE_PARTS and role in ("user", "tool"):
        return _Image(part["type"])
    if part.get("type") not in _TEXT_PARTS:
        raise ValueError(f"{where}: expected a part of type 'text', got one of type {_named(part.get('type'))}")
    text = part.get("text", ...)
    if text is None and role in _MAY_BE_EMPTY:
        return ""
    if not isinstance(text, str):
        raise ValueError(f"{where}.text: expected a string, got {_named(part.get('text'))}")
    return text


def _tool_call(where: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) and call.get("type") in (None, "function") else None
    if not isinstance(function, dict):
        raise ValueError(f'{where}: expected {{"type": "function", "function": {{...}}}}, got {quoted(call)}')
    check_tool_name(f"{where}.function.name", function.get("name"))
    arguments = function.get("arguments")
    if arguments is None or arguments == "":
        arguments = "{}"
    elif isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif not isinstance(arguments, str):
        raise ValueError(f"{where}.function.arguments: expected JSON text or an object, got {_named(arguments)}")
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


def _with_one_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    reasoning = next((message[name] for name in _REASONING if isinstance(message.get(name), str)), "")
    rest = {key: value for key, value in message.items() if key not in _REASONING}
    return {**rest, _REASONING[0]: reasoning} if reasoning else rest


def without_old_reasoning(messages: Messages) -> Messages:
    """Return the conversation without the reasoning of answers before the last message of the user."""
    last_user = max((place for place, message in enumerate(messages) if message["role"] == "user"), default=-1)
    return [
        {key: value for key, value in message.items() if key != _REASONING[0]} if place < last_user else message
        for place, message in enumerate(messages)
    ]


def joined(messages: Messages, separator: str, *, image: str = "") -> Messages:
    """Return the conversation with one text in each message.

    :param image: stands for an image.
    :raises ValueError: for an image where `image` is "".
    """
    whole = []
    for place, message in enumerate(messages):
        parts = message["content"]
        if isinstance(parts, tuple):
            for number, part in enumerate(parts):
                if isinstance(part, _Image) and not image:
                    where = f"messages[{place}].content[{number}]"
                    raise ValueError(f"{where}: expected a part of type 'text', got one of type {quoted(str(part))}")
            parts = separator.join(image if isinstance(part, _Image) else part for part in parts)
            message = {**message, "content": parts}
        whole.append(message)
    return whole


def _results_in_order(messages: Sequence[dict[str, Any]]) -> Messages:
    """Put the results that follow an assistant's calls in the order of the calls.

    Results whose call is not named keep their places: an id is all that tells them apart.
    """
    ordered: list[Mapping[str, Any]] = []
    position, is_called = 0, False
    while position < len(messages):
        is_called = is_called or bool(messages[position].get("tool_calls"))
        if messages[position]["role"] == "tool" and not is_called:
            raise ValueError(
                f"messages[{position}]: expected a call before this result, got no message with tool_calls; the call "
                'goes into a message of the assistant, as "tool_calls": [{"function": {"name": ..., "arguments": ...}}]'
            )
        ordered.append(messages[position])
        position += 1
        calls = messages[position - 1].get("tool_calls")
        if not calls:
            continue
        first = position
        while position < len(messages) and messages[position]["role"] == "tool":
            position += 1
        results, call_ids = messages[first:position], [call.get("id") for call in calls]
        if all(call_ids) and all(result.get("tool_call_id") for result in results):
            # By their JSON, because an id may be any value, and a conversation can have thousands of calls.
            places = {json.dumps(call_id): place for place, call_id in reversed(list(enumerate(call_ids)))}
            for number, result in enumerate(results, first):
                if json.dumps(result["tool_call_id"]) not in places:
                    raise ValueError(
                        f"messages[{number}].tool_call_id: expected the id of a call before it, {listed(call_ids)}, "
                        f"got {quoted(result['tool_call_id'])}"
                    )
            results = sorted(results, key=lambda result: places[json.dumps(result["tool_call_id"])])
        ordered += results
    return ordered


def unanswerable(messages: Messages) -> str:
    """Return why a model can't answer the conversation, and what to do; "" where it can.

    Behind an answer a template opens another one, which no model was trained on. Messages of the system don't count:
    templates put all of them first.
    """
    place = max((place for place, message in enumerate(messages) if message["role"] != "system"), default=0)
    last = messages[place]
    if last["role"] != "assistant" or last.get("prefix"):
        return ""
    hint = 'to have it continued, add "prefix": true to it' + ", and put it last" * (place < len(messages) - 1)
    if last.get("tool_calls"):
        hint = "send the results of its calls, as messages of role tool"
    elif not last["content"]:
        hint = "leave it out"
    return f"messages[{place}]: expected a last message of the user or of a tool, got one of the assistant; {hint}"


def _named(value: object) -> str:
    """Name `value` in an error message, in few words even where it holds a whole conversation."""
    if isinstance(value, dict):
        return "an object"
    return "an array" if isinstance(value, list) else quoted(value)
