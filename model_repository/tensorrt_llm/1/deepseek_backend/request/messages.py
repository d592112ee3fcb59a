"""Conversations, read from JSON. The engine renders them with the checkpoint's own chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from deepseek_backend.engines.generate_request import Messages
from deepseek_backend.field_values import check_characters, quoted


def read_messages(text: str) -> Messages:
    """Return the conversation in `text`, a JSON array of objects with a role and a content.

    The chat template decides which roles and which further keys, such as tool_calls, it takes: they are kept as they
    are. A content in OpenAI's form, a list of parts, is joined into one string with nothing in between; parts other
    than text are refused.

    :raises ValueError: with what was expected and what came.
    """
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"messages: expected a JSON array, got text that is not JSON ({error})") from None
    if not isinstance(document, list):
        raise ValueError(f"messages: expected a JSON array of messages, got {_named(document)}")
    if not document:
        raise ValueError("messages: expected at least one message, got an empty array")
    return [_message(f"messages[{position}]", message) for position, message in enumerate(document)]


def _message(where: str, message: Any) -> Mapping[str, Any]:
    if not isinstance(message, dict):
        raise ValueError(f"{where}: expected an object with role and content, got {_named(message)}")
    if "role" not in message or not ("content" in message or _has_tool_calls(message)):
        got = ", ".join(quoted(key) for key in list(message)[:5]) or "no key at all"
        raise ValueError(f"{where}: expected an object with role and content, got {got}")
    role = message["role"]
    if not isinstance(role, str) or not role:
        raise ValueError(f"{where}.role: expected a string that is not empty, got {_named(role)}")
    check_characters(where, message)
    return {**message, "content": _content(where, message)}


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


def _has_tool_calls(message: Mapping[str, Any]) -> bool:
    return bool(message.get("tool_calls"))


def _named(value: object) -> str:
    """Name `value` in an error message, in few words even where it holds a whole conversation."""
    if isinstance(value, dict):
        return "an object"
    return "an array" if isinstance(value, list) else quoted(value)
