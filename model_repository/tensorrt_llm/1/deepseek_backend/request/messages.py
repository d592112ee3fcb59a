"""Conversations, read from JSON and brought into the one form that everything after this reads.

Chat templates differ in what they take, and most drop what they don't know without a word. So here content becomes one
text, "developer" becomes "system", arguments become JSON text, results of tools stand in the order of their calls (no
template writes a call's id), and reasoning before the last user message is left out, as every template means to.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

from deepseek_backend.contract import MAX_MESSAGES
from deepseek_backend.engines.generate_request import Messages
from deepseek_backend.field_values import check_characters, listed, quoted, read_json
from deepseek_backend.request.tool_use import check_tool_name

_ROLES = ("system", "developer", "user", "assistant", "tool")
_REASONING = ("reasoning_content", "reasoning")
"""Names of an answer's reasoning on several servers. The first one is kept."""


def read_messages(text: str) -> Messages:
    """Return the conversation in `text`, a JSON array of objects with a role and a content.

    Further keys are kept for the chat template. Parts of a content other than text are refused.

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
    _check_prefixes(messages)
    return _results_in_order(_without_old_reasoning(messages))


def _message(where: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise ValueError(f"{where}: expected an object with role and content, got {_named(message)}")
    if "role" not in message or not ("content" in message or _has_tool_calls(message)):
        got = ", ".join(quoted(key) for key in list(message)[:5]) or "no key at all"
        raise ValueError(f"{where}: expected an object with role and content, got {got}")
    role = message["role"]
    if role not in _ROLES:
        raise ValueError(f"{where}.role: expected one of {', '.join(_ROLES)}, got {_named(role)}")
    check_characters(where, message)
    read = {**message, "role": "system" if role == "developer" else role, "content": _content(where, message)}
    calls = read.pop("tool_calls", None)
    if calls:
        read["tool_calls"] = _tool_calls(where, role, calls)
    return read


def _content(where: str, message: Mapping[str, Any]) -> str | None:
    """Return the content as one string. It is None only beside tool calls: templates tell that from an empty string."""
    content = message.get("content")
    if isinstance(content, str) or (content is None and _has_tool_calls(message)):
        return content
    if not isinstance(content, list):
        raise ValueError(f"{where}.content: expected text or an array of text parts, got {_named(content)}")
    return "".join(_part(f"{where}.content[{position}]", part) for position, part in enumerate(content))


def _part(where: str, part: Any) -> str:
    if not isinstance(part, dict):
        raise ValueError(f"{where}: expected an object of type 'text', got {_named(part)}")
    if part.get("type") != "text":
        raise ValueError(f"{where}: expected a part of type 'text', got one of type {_named(part.get('type'))}")
    text = part.get("text")
    if not isinstance(text, str):
        raise ValueError(f"{where}.text: expected a string, got {_named(text)}")
    return text


def _tool_calls(where: str, role: str, calls: Any) -> list[dict[str, Any]]:
    if role != "assistant":
        raise ValueError(f"{where}.tool_calls: expected on messages of the assistant only, got one of role {role}")
    if not isinstance(calls, list):
        raise ValueError(f"{where}.tool_calls: expected an array, got {_named(calls)}")
    return [_tool_call(f"{where}.tool_calls[{position}]", call) for position, call in enumerate(calls)]


def _tool_call(where: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) and call.get("type", "function") == "function" else None
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


def _check_prefixes(messages: Sequence[Mapping[str, Any]]) -> None:
    """Check `prefix`, by which DeepSeek's API asks for the continuation of a message."""
    for position, message in enumerate(messages):
        if not message.get("prefix"):
            continue
        where = f"messages[{position}].prefix"
        if message["prefix"] is not True:
            raise ValueError(f"{where}: expected true or false, got {quoted(message['prefix'])}")
        if position != len(messages) - 1 or message["role"] != "assistant" or _has_tool_calls(message):
            raise ValueError(f"{where}: expected on the last message only, the assistant's, without tool calls")


def _without_old_reasoning(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    last_user = max((place for place, message in enumerate(messages) if message["role"] == "user"), default=-1)
    kept = []
    for place, message in enumerate(messages):
        reasoning = next((message[name] for name in _REASONING if isinstance(message.get(name), str)), "")
        rest = {key: value for key, value in message.items() if key not in _REASONING}
        kept.append({**rest, _REASONING[0]: reasoning} if reasoning and place > last_user else rest)
    return kept


def _results_in_order(messages: Sequence[dict[str, Any]]) -> Messages:
    """Put the results that follow an assistant's calls in the order of the calls.

    Results whose call is not named keep their places: an id is all that tells them apart.
    """
    ordered: list[Mapping[str, Any]] = []
    position = 0
    while position < len(messages):
        ordered.append(messages[position])
        position += 1
        calls = messages[position - 1].get("tool_calls")
        if not calls:
            continue
        end = position
        while end < len(messages) and messages[end]["role"] == "tool":
            end += 1
        ordered += _sorted_results(messages, position, end, [call.get("id") for call in calls])
        position = end
    return ordered


def _sorted_results(
    messages: Sequence[dict[str, Any]], first: int, end: int, call_ids: Sequence[Any]
) -> Sequence[dict[str, Any]]:
    results = messages[first:end]
    if not all(call_ids) or not all(result.get("tool_call_id") for result in results):
        return results
    # By their JSON, because an id may be any value, and a conversation can have thousands of calls.
    places = {json.dumps(call_id): place for place, call_id in reversed(list(enumerate(call_ids)))}
    wanted = [places.get(json.dumps(result["tool_call_id"])) for result in results]
    if None in wanted:
        position = wanted.index(None)
        raise ValueError(
            f"messages[{first + position}].tool_call_id: expected the id of a call before it, {listed(call_ids)}, got "
            f"{quoted(results[position]['tool_call_id'])}"
        )
    return [result for _, result in sorted(zip(wanted, results, strict=True), key=itemgetter(0))]


def _has_tool_calls(message: Mapping[str, Any]) -> bool:
    return bool(message.get("tool_calls"))


def _named(value: object) -> str:
    """Name `value` in an error message, in few words even where it holds a whole conversation."""
    if isinstance(value, dict):
        return "an object"
    return "an array" if isinstance(value, list) else quoted(value)
