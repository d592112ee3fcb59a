"""The items of a Responses request's `input`, as the messages of a chat.

Clients send back the items of earlier responses as they got them, with ids, statuses and nulls, and items of ours are
made of one model's turn each. Here one turn of the assistant is one message again: its reasoning, text and calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from deepseek_triton_tools.gateway.protocol.openai_errors import invalid
from deepseek_triton_tools.gateway.protocol.openai_fields import text, wrong

_ROLES = ("user", "system", "developer", "assistant")
_TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""Type of a content part -> its field with the text."""


def chat_messages(items: object, *, instructions: str = "") -> list[dict[str, object]]:
    """Return the messages of a chat that says the same.

    instructions: a system message before all others.

    Raises OpenAIError for an item or a part of a kind that a text model can't read, and names it.
    """
    turns = _ResponseTurns()
    if instructions:
        turns.add({"role": "system", "content": instructions})
    if isinstance(items, str):
        turns.add({"role": "user", "content": items})
    elif isinstance(items, list):
        for at, item in enumerate(items):
            turns.add_item(f"input[{at}]", item)
    else:
        raise wrong("input", "a text or a list of items", items)
    # A turn may have been broken off while the model was thinking: it has said nothing.
    messages = [message for message in turns.messages if message["content"] is not None or "tool_calls" in message]
    if not messages:
        raise invalid("input: expected at least one message, got none.", param="input")
    return messages


class _ResponseTurns:
    def __init__(self) -> None:
        self.messages: list[dict[str, object]] = []
        self._turn: dict[str, object] | None = None
        """The assistant's last message, while items may still belong to it."""

    def add(self, message: dict[str, object]) -> None:
        self.messages.append(message)
        self._turn = None

    def add_item(self, place: str, item: object) -> None:
        if not isinstance(item, dict):
            raise wrong(place, "an object", item)
        kind = item.get("type") or ("message" if "role" in item else None)
        read = self._kinds().get(kind) if isinstance(kind, str) else None
        if kind == "item_reference":
            raise invalid(f"{place}: this gateway keeps no items: send the item itself.", param="input")
        if read is None:
            known = ", ".join(self._kinds())
            raise invalid(f"{place}.type: expected one of {known}, got {kind!r}.", param="input")
        read(place, item)

    def _kinds(self) -> dict[str, Callable[[str, Mapping[str, object]], None]]:
        return {
            "message": self._message,
            "reasoning": self._reasoning,
            "function_call": self._function_call,
            "function_call_output": self._function_call_output,
        }

    def _message(self, place: str, item: Mapping[str, object]) -> None:
        role = item.get("role")
        if role not in _ROLES:
            raise invalid(f"{place}.role: expected {', '.join(_ROLES)}, got {role!r}.", param="input")
        content = _joined(f"{place}.content", item.get("content"))
        if role == "assistant":
            self._assistant(without=("content", "tool_calls"))["content"] = content
        else:
            self.add({"role": role, "content": content})

    def _reasoning(self, place: str, item: Mapping[str, object]) -> None:
        """Reasoning begins a turn. A summary is not what the model has thought, so it is not given back to it."""
        parts = {"reasoning_text": "text", "text": "text"}
        reasoning = _joined(f"{place}.content", item.get("content") or [], parts)
        turn = self._assistant(without=("reasoning_content", "content", "tool_calls"))
        if reasoning:
            turn["reasoning_content"] = reasoning

    def _function_call(self, place: str, item: Mapping[str, object]) -> None:
        name = text(f"{place}.name", item.get("name"))
        call = {
            "id": text(f"{place}.call_id", item.get("call_id")),
            "type": "function",
            "function": {"name": name, "arguments": text(f"{place}.arguments", item.get("arguments"))},
        }
        turn = self._assistant(without=())
        calls = turn.setdefault("tool_calls", [])
        assert isinstance(calls, list)
        calls.append(call)

    def _function_call_output(self, place: str, item: Mapping[str, object]) -> None:
        call_id = text(f"{place}.call_id", item.get("call_id"))
        output = _joined(f"{place}.output", item.get("output"))
        self.add({"role": "tool", "tool_call_id": call_id, "content": output})

    def _assistant(self, *, without: tuple[str, ...]) -> dict[str, object]:
        """The assistant's present turn, or a new one if the present one has any of the fields already."""
        if self._turn is None or any(self._turn.get(name) is not None for name in without):
            self._turn = {"role": "assistant", "content": None}
            self.messages.append(self._turn)
        return self._turn


def _joined(place: str, content: object, kinds: Mapping[str, str] = _TEXT_PARTS) -> str:
    """The text of a content, which is a text or a list of parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong(place, "a text or a list of parts", content)
    return "".join(_part_text(f"{place}[{at}]", part, kinds) for at, part in enumerate(content))


def _part_text(place: str, part: object, kinds: Mapping[str, str]) -> str:
    if not isinstance(part, dict):
        raise wrong(place, "an object", part)
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in kinds:
        raise invalid(
            f"{place}.type: expected {' or '.join(kinds)}, got {kind!r}. The model reads text only.", param="input"
        )
    return text(f"{place}.{kinds[kind]}", part.get(kinds[kind]))
