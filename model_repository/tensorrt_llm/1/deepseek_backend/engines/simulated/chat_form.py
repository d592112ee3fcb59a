"""Renders a conversation in the form of DeepSeek-V3.1's chat template, without tools."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepseek_backend.engines.generate_request import Messages
from deepseek_backend.engines.reasoning_tags import CLOSING, OPENING
from deepseek_backend.engines.simulated.filler_text import BOS, EOS
from deepseek_backend.errors import RequestError
from deepseek_backend.field_values import listed, quoted

_USER, _ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
_ROLES = ("system", "user", "assistant")


def render(messages: Messages, template_kwargs: Mapping[str, Any]) -> str:
    """Return the prompt: all system messages, then the turns, up to where the answer begins.

    :raises RequestError: for an unknown role or argument, and for tool calls.
    """
    reasons = _reads_reasoning(template_kwargs)
    turns = [_turn(position, message) for position, message in enumerate(messages)]
    system = "\n\n".join(message["content"] for message in messages if message["role"] == "system")
    return f"{BOS}{system}{''.join(turns)}{_ASSISTANT}{OPENING if reasons else CLOSING}"


def _reads_reasoning(template_kwargs: Mapping[str, Any]) -> bool:
    """Return the template argument `thinking`: whether the model is to reason."""
    unknown = [name for name in template_kwargs if name != "thinking"]
    if unknown:
        raise RequestError(
            f"chat_template_kwargs: the simulated engine's chat form has no {listed(unknown)}; it knows thinking"
        )
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
    answer = content.split(CLOSING, 1)[-1]  # without its reasoning
    return f"{_ASSISTANT}{CLOSING}{answer}{EOS}" if role == "assistant" else ""
