"""Requests: a prompt or a conversation, from a file, from standard input or from a row of a file.

One request is a mapping with "prompt" or "messages", as `Client.generate_many` takes it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from deepseek_triton_tools.terminal.output_streams import complain
from deepseek_triton_tools.tool_errors import ToolError

Request = dict[str, Any]


def as_asked(request: Mapping[str, Any], *, chat: bool, system: str | None) -> Request:
    """Turn `request` into a conversation where that is wanted. A system message of its own stays. Raises ToolError for
    token ids, which are no message."""
    asked = dict(request)
    if "prompt" in asked and (chat or system is not None):
        content = asked.pop("prompt")
        if not isinstance(content, str):
            raise ToolError("token ids are no message: leave out --chat and --system")
        asked["messages"] = [{"role": "user", "content": content}]
    if system is not None:
        messages = asked["messages"]
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        if not any(message["role"] == "system" for message in messages):
            asked["messages"] = [{"role": "system", "content": system}, *messages]
    return asked


def problem_of_messages(messages: Any) -> str | None:
    """Say what is wrong with a conversation; None when nothing is."""
    if isinstance(messages, str):
        return None
    if not isinstance(messages, list) or not messages:
        return f"messages: expected a list of messages, got {messages!r:.100}"
    for position, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return f'messages[{position}]: expected {{"role": ..., "content": ...}}, got {message!r:.100}'
    return None


def read_messages(path: Path) -> Any:
    """Read a conversation from a JSON file. Raises ToolError when it can't be read, or holds no conversation."""
    try:
        messages = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise ToolError(f"{path} is not JSON: {error}") from error
    problem = problem_of_messages(messages)
    if problem is not None:
        raise ToolError(f"{path}: {problem}")
    return messages


def read_text(path: Path) -> str:
    """Read the whole of a file; `-` is standard input. Raises ToolError when it can't be read or is not UTF-8."""
    try:
        content = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
        return content.decode("utf-8")
    except OSError as error:
        raise ToolError(f"{file_name(path)} can't be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ToolError(f"{file_name(path)} is not UTF-8: {error.reason} at byte {error.start}") from error


def file_name(path: Path) -> str:
    """The name of an input for messages; `-` is standard input."""
    return "standard input" if str(path) == "-" else str(path)


_ItemT = TypeVar("_ItemT")
_ReadT = TypeVar("_ReadT")

_MOST_PROBLEMS = 10


def checked_rows(
    name: str, kind: str, items: Iterable[tuple[int, _ItemT]], parse: Callable[[_ItemT], _ReadT]
) -> list[_ReadT]:
    """Parse the numbered items of a file. Each problem is one line on stderr.

    :param kind: names an item in messages, such as "line".
    :param parse: raises ToolError for a wrong item.
    :raises ToolError: when one is wrong.
    """
    parsed, num_wrong = [], 0
    for number, item in items:
        try:
            parsed.append(parse(item))
        except ToolError as error:
            num_wrong += 1
            if num_wrong <= _MOST_PROBLEMS:
                complain(f"{name} {kind} {number}: {error}")
    if num_wrong:
        total = num_wrong + len(parsed)
        shown = "" if num_wrong <= _MOST_PROBLEMS else f"; the first {_MOST_PROBLEMS} are listed"
        raise ToolError(f"{num_wrong} of {total} {kind}s of {name} are wrong{shown}")
    return parsed


def json_of_line(line: bytes) -> Any:
    """Raises ToolError, which leaves the line's number to the caller: json's own is always 1, or 2 at its end."""
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise ToolError(f"not JSON: {error.msg} at character {error.pos + 1}") from error
    except (ValueError, RecursionError) as error:
        raise ToolError(f"not JSON: {error}") from error
