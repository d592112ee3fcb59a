"""A conversation as a prompt, in the form that DeepSeek-V3.1's chat template gives it; without tools."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepseek_backend.engines.generate_request import Messages
from deepseek_backend.engines.reasoning_tags import CLOSING, OPENING
from deepseek_backend.engines.simulated.filler_text import BOS, EOS
from deepseek_backend.errors import RequestError
from deepseek_backend.field_values import quoted

_USER, _ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
_ROLES = ("system", "user", "assistant")


def render(messages: Messages, template_kwargs: Mapping[str, Any]) -> str:
    """System messages first, wherever they stand; the prompt ends where the answer begins.

    :raises RequestError: for a role or an argument that it does not know, and for tool calls.
    """
    thinking = _read_thinking(template_kwargs)
    turns = [_turn(position, message) for position, message in enumerate(messages)]
    system = "\n\n".join(message["content"] for message in messages if message["role"] == "system")
    return f"{BOS}{system}{''.join(turns)}{_ASSISTANT}{OPENING if thinking else CLOSING}"


def _read_thinking(template_kwargs: Mapping[str, Any]) -> bool:
    unknown = [name for name in template_kwargs if name != "thinking"]
    if unknown:
        names = ", ".join(quoted(name) for name in unknown)
        raise RequestError(f"chat_template_kwargs: the simulator's chat form has no {names}; it knows thinking")
    thinking = template_kwargs.get("thinking", False)
    if not isinstance(thinking, bool):
        raise RequestError(f"chat_template_kwargs.thinking: expected true or false, got {quoted(thinking)}")
    return thinking


def _turn(position: int, message: Mapping[str, Any]) -> str:
    role, content = message["role"], message["content"]
    if role not in _ROLES:
        raise RequestError(f"messages[{position}].role: expected one of {', '.join(_ROLES)}, got {quoted(role)}")
    if message.get("tool_calls"):
        raise RequestError(f"messages[{position}]: tool_calls are not in this template")
    if role == "user":
        return f"{_USER}{content}"
    answer = content.split(CLOSING, 1)[-1]  # without the thinking
    return f"{_ASSISTANT}{CLOSING}{answer}{EOS}" if role == "assistant" else ""
