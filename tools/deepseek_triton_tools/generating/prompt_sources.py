"""What is asked: a prompt or a conversation, from the command line, a file or standard input.

One request is a mapping with "prompt" or "messages", as `Client.generate_many` takes it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepseek_triton_tools.tool_errors import ToolError

Request = dict[str, Any]


def request_of(args: argparse.Namespace) -> Request:
    """The one request of `generate`.

    :raises ToolError: when there is not exactly one, or it can't be read.
    """
    sources = {"PROMPT": args.prompt, "--file": args.file, "--messages": args.messages}
    given = [name for name, value in sources.items() if value is not None]
    if len(given) > 1:
        raise ToolError(f"give one of {' and '.join(given)}", exit_code=2)
    if args.messages is not None:
        request: Request = {"messages": _messages(args.messages)}
    elif args.file is not None or args.prompt == "-" or not given:
        if not given and sys.stdin.isatty():
            raise ToolError("give a prompt, --file FILE, --messages FILE or --input FILE, or pipe one in", exit_code=2)
        request = {"prompt": read_text(args.file or Path("-"))}
    else:
        request = {"prompt": args.prompt}
    return as_asked(request, chat=args.chat, system=args.system)


def as_asked(request: Mapping[str, Any], *, chat: bool, system: str | None) -> Request:
    """`request` as a conversation where that is wanted; a system message of its own stays."""
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
    """What is wrong with a conversation; None when nothing is."""
    if isinstance(messages, str):
        return None
    if not isinstance(messages, list) or not messages:
        return f"messages: expected a list of messages, got {messages!r:.100}"
    for position, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return f'messages[{position}]: expected {{"role": ..., "content": ...}}, got {message!r:.100}'
    return None


def read_text(path: Path) -> str:
    """The whole of a file; `-` is standard input.

    :raises ToolError: when it can't be read or is not UTF-8.
    """
    name = "standard input" if str(path) == "-" else str(path)
    try:
        content = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
        return content.decode("utf-8")
    except OSError as error:
        raise ToolError(f"{name} can't be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ToolError(f"{name} is not UTF-8: {error.reason} at byte {error.start}") from error


def _messages(path: Path) -> Any:
    try:
        messages = json.loads(read_text(path))
    except ValueError as error:
        raise ToolError(f"{path} is not JSON: {error}") from error
    problem = problem_of_messages(messages)
    if problem is not None:
        raise ToolError(f"{path}: {problem}")
    return messages
