"""A request to the Responses API, as the chat request that asks the same.

Clients send back the items of earlier responses as they got them, with ids, statuses and nulls, and items of ours are
made of one model's turn each. Here one turn of the assistant is one message again: its reasoning, text and calls.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from deepseek_triton_tools.gateway.chat_request import ChatRequest, format_of_responses, read_chat_request
from deepseek_triton_tools.gateway.openai_fields import (
    OpenAIError,
    a_list,
    closed_object,
    given_fields,
    invalid,
    text,
    with_names,
    wrong,
)

_ROLES = ("user", "system", "developer", "assistant")
_UNREAD_PARTS = ("thinking", "redacted_thinking", "reasoning", "reasoning_content", "reasoning_text")
"""Parts of answers that other APIs give back: reasoning is not shown to the model again."""
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
        match kind := item.get("type") or ("message" if "role" in item else None):
            case "message":
                role = item.get("role")
                if role not in _ROLES:
                    raise invalid(f"{place}.role: expected {', '.join(_ROLES)}, got {role!r}.", param="input")
                content = item.get("content")
                if content is not None or role == "user":  # clients keep answers and instructions without a text
                    unread = _UNREAD_PARTS if role == "assistant" else ()
                    content = _joined(f"{place}.content", content, unread=unread)
                if role == "assistant":
                    self._assistant(without=("content", "tool_calls"))["content"] = content
                else:
                    self.add({"role": role, "content": content or ""})
            case "reasoning":
                # It begins a turn. A summary is not what the model has thought, so it is not given back to it.
                parts = {"reasoning_text": "text", "text": "text"}
                reasoning = _joined(f"{place}.content", item.get("content") or [], parts)
                turn = self._assistant(without=("reasoning_content", "content", "tool_calls"))
                if reasoning:
                    turn["reasoning_content"] = reasoning
            case "function_call":
                name, call_id, arguments = (
                    text(f"{place}.{field}", item.get(field)) for field in ("name", "call_id", "arguments")
                )
                calls = self._assistant(without=()).setdefault("tool_calls", [])
                assert isinstance(calls, list)
                function = {"name": name, "arguments": arguments}
                calls.append({"id": call_id, "type": "function", "function": function})
            case "function_call_output":
                call_id = text(f"{place}.call_id", item.get("call_id"))
                output = _joined(f"{place}.output", given_fields(item).get("output", ""))
                self.add({"role": "tool", "tool_call_id": call_id, "content": output})
            case "item_reference":
                raise invalid(f"{place}: this gateway keeps no items: send the item itself.", param="input")
            case _:
                known = "message, reasoning, function_call, function_call_output"
                raise invalid(f"{place}.type: expected one of {known}, got {kind!r}.", param="input")

    def _assistant(self, *, without: tuple[str, ...]) -> dict[str, object]:
        """The assistant's present turn, or a new one if the present one has any of the fields already."""
        if self._turn is None or any(self._turn.get(name) is not None for name in without):
            self._turn = {"role": "assistant", "content": None}
            self.messages.append(self._turn)
        return self._turn


def _joined(
    place: str, content: object, kinds: Mapping[str, str] = _TEXT_PARTS, *, unread: Collection[str] = ()
) -> str:
    """The text of a content, which is a text or a list of parts. unread: types of parts that are left out."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong(place, "a text or a list of parts", content)
    pieces = []
    for at, part in enumerate(content):
        if not isinstance(part, dict):
            raise wrong(f"{place}[{at}]", "an object", part)
        kind = part.get("type")
        if kind in unread:
            continue
        if not isinstance(kind, str) or kind not in kinds:
            expected = " or ".join(kinds)
            message = f"{place}[{at}].type: expected {expected}, got {kind!r}. The model reads text only."
            raise invalid(message, param="input")
        pieces.append(text(f"{place}[{at}].{kinds[kind]}", part.get(kinds[kind])))
    return "".join(pieces)


NO_STATE = "this gateway keeps no responses: send the whole conversation as input"

_REFUSED = {
    "previous_response_id": NO_STATE,
    "conversation": NO_STATE,
    "prompt": "this gateway keeps no prompt templates: send the text as input and instructions",
}
"""Field -> why it is refused. Only null asks for nothing: an empty id is a mistake of whoever wanted state."""
_REFUSED_UNLESS_EMPTY = {
    "background": "a response ends with its connection here: nothing goes on in the background",
    "background_options": "a response ends with its connection here: nothing goes on in the background",
    "context_management": "the conversation is never shortened here",
    "moderation": "there is no moderation here",
    "access_programs": "there are none here",
    "image": "the model reads text only",
}
"""Field -> why it is refused. False and what is empty ask for nothing, and clients send both unasked."""
_OWN_WORDS = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
"""Field of chat that errors may name -> where this API has it."""
_PLACE_OF_A_MESSAGE = re.compile(r"^messages\[\d+\]|(?<=; )messages\[\d+\]")
"""Its number is not that of an item."""
_OURS = {
    "input",
    "instructions",
    "tools",
    "tool_choice",
    "text",
    "include",
    "reasoning",
    "stream_options",
    "truncation",
}
"""Fields that are read here and don't go on."""
_WITHOUT_EFFECT = {"max_tool_calls", "client_metadata", "prompt_cache_options"}
"""Fields that change nothing here: the first is about built-in tools only, the others are for a hosted service."""
_INCLUDED_LOGPROBS = "message.output_text.logprobs"
_INCLUDES = (_INCLUDED_LOGPROBS, "reasoning.encrypted_content")
"""Values that may be asked for. Encrypted reasoning is never given: the reasoning itself is in the item's content."""
_ECHOED: dict[str, object] = {
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "reasoning": {"effort": None, "summary": None},
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": None,
}
"""Fields of the request that the response repeats, with the value for a request without them."""
_ECHOED_IF_GIVEN = ("prompt_cache_key", "safety_identifier", "user")
"""Fields that a response has only if the request has them: null is no value of theirs."""


class ResponsesRequest(NamedTuple):
    """chat: the chat request that asks the same. echoed: the fields that the response repeats."""

    chat: ChatRequest
    echoed: dict[str, object]


def read_responses_request(document: object) -> ResponsesRequest:
    """Raises OpenAIError, which names the field: also for what needs state, and for what the model can't read."""
    chat, echoed = translated(given_fields(document))
    try:
        return ResponsesRequest(read_chat_request(chat), echoed)
    except OpenAIError as error:
        raise in_own_words(error) from None


def in_own_words(error: OpenAIError) -> OpenAIError:
    """An error of the chat request, or of the model's server, with the names that fields have in this API."""
    message = re.sub(r"^(tools\[\d+\])\.function(?=[.:])", r"\1", _PLACE_OF_A_MESSAGE.sub("messages", error.message))
    message = with_names(message, _OWN_WORDS)
    chats = (error.param or "").partition(".")[0]
    param = _OWN_WORDS[chats].partition(".")[0] if chats in _OWN_WORDS else error.param
    return replace(error, message=message, param=param)


def with_item(message: str, items: object, messages: Any) -> str:
    """The server's message with the item that is a call or a result, for its place among the chat's messages."""
    found = re.match(r"messages\[(\d+)\]\.(?:tool_calls\[(\d+)\]\.function\.|tool_(?=call_id))", message)
    if not found or not isinstance(items, list):
        return message
    before, call = messages[: int(found[1])], found[2]
    number = sum(len(turn.get("tool_calls", ())) if call else turn["role"] == "tool" for turn in before)
    places = [at for at, item in enumerate(items) if item.get("type") == f"function_call{'' if call else '_output'}"]
    return f"input[{places[number + int(call or 0)]}].{message[found.end() :]}"


def translated(given: Mapping[str, object]) -> tuple[dict[str, object], dict[str, object]]:
    """Return (the JSON of the chat request that asks the same, the fields that the response repeats)."""
    for name, reason in (_REFUSED | _REFUSED_UNLESS_EMPTY).items():
        if given.get(name) or (name in _REFUSED and name in given):
            raise invalid(f"{name}: {reason}.", param=name, code="unsupported_parameter")
    if given.get("truncation", "disabled") != "disabled":
        message = "truncation: expected disabled, because the conversation is never shortened here."
        raise invalid(message, param="truncation", code="unsupported_value")
    for name in (*_OWN_WORDS, "n"):
        if name in given:
            hint = f"Here it is {_OWN_WORDS[name]}." if name in _OWN_WORDS else "A response is one answer."
            raise invalid(f"{name}: this is a field of chat completions. {hint}", param=name, code="unknown_parameter")
    if "input" not in given:
        raise invalid("input: expected a text or a list of items, got nothing.", param="input")
    own = _OURS | _WITHOUT_EFFECT | _REFUSED_UNLESS_EMPTY.keys()
    chat: dict[str, object] = {name: value for name, value in given.items() if name not in own}
    if "max_output_tokens" in chat:
        chat["max_completion_tokens"] = chat.pop("max_output_tokens")
    instructions = text("instructions", given.get("instructions", ""))
    chat["messages"] = chat_messages(given["input"], instructions=instructions)
    tools = a_list("tools", given.get("tools", []))
    chat |= _chat_tools(tools, given.get("tool_choice"))
    chat |= _answer_form(given)
    echoed = {name: given.get(name, absent) for name, absent in _ECHOED.items()}
    echoed |= {name: given[name] for name in _ECHOED_IF_GIVEN if name in given}
    # OpenAI's description of a response has these two in every tool.
    echoed["tools"] = [{"parameters": None, "strict": None, **tool} for tool in tools if isinstance(tool, dict)]
    return chat, echoed


def _refuse_chats_form(where: str, given: Mapping[str, object]) -> None:
    if "function" in given and "name" not in given:
        message = f"{where}.name: expected it here: this API has no `function` object around it."
        raise invalid(message, param=where.partition("[")[0])


def _chat_tools(given: list[object], choice: object) -> dict[str, object]:
    """The tools and the choice among them, in chat's form."""
    functions = []
    for at, tool in enumerate(given):
        if not isinstance(tool, dict):
            raise wrong(f"tools[{at}]", "an object", tool)
        if tool.get("type") != "function":
            message = f"tools[{at}].type: expected function, got {tool.get('type')!r}. The gateway runs no tools."
            raise invalid(message, param="tools", code="unsupported_value")
        _refuse_chats_form(f"tools[{at}]", tool)
        names = ["name", "description", "parameters", "strict"]
        if tool.get("parameters") is None:  # the server finds them misspelt
            without = ("type", "allowed_callers", "defer_loading", "output_schema", *names)
            names += [name for name in tool if name not in without]
        functions.append({name: tool[name] for name in names if tool.get(name) is not None})
    if isinstance(choice, dict):
        match kind := choice.get("type"):
            case "allowed_tools":
                closed_object("tool_choice", choice, ("type", "mode", "tools"))
                allowed = {
                    str(tool.get("name")) if isinstance(tool, dict) else ""
                    for tool in a_list("tool_choice.tools", choice.get("tools"))
                }
                if missing := sorted(allowed - {str(function.get("name")) for function in functions}):
                    message = f"tool_choice.tools: no function tool has the name {missing[0]!r}."
                    raise invalid(message, param="tool_choice")
                functions = [function for function in functions if str(function.get("name")) in allowed]
                choice = choice.get("mode", "auto")
            case "function":
                _refuse_chats_form("tool_choice", choice)
                choice = {"type": "function", "function": {"name": choice.get("name")}}
            case _:
                message = f"tool_choice.type: expected function or allowed_tools, got {kind!r}."
                raise invalid(f"{message} Only function tools are known.", param="tool_choice")
    chat: dict[str, object] = {}
    if functions:
        chat["tools"] = [{"type": "function", "function": function} for function in functions]
    if choice is not None:
        chat["tool_choice"] = choice
    return chat


def _answer_form(given: Mapping[str, object]) -> dict[str, object]:
    """The answer's form, log-probabilities and how much the model may think."""
    chat: dict[str, object] = {}
    if (text_format := closed_object("text", given.get("text", {}), ("format", "verbosity")).get("format")) is not None:
        chat["response_format"] = format_of_responses(text_format)
    include = a_list("include", given.get("include", []))
    for name in include:
        if name not in _INCLUDES:
            message = f"include: expected {' or '.join(_INCLUDES)}, got {name!r}."
            raise invalid(message, param="include", code="unsupported_value")
    if _INCLUDED_LOGPROBS in include or given.get("top_logprobs"):
        chat["logprobs"] = True
    keys = ("effort", "summary", "generate_summary", "context", "mode")
    if (effort := closed_object("reasoning", given.get("reasoning", {}), keys).get("effort")) is not None:
        chat["reasoning_effort"] = effort
    return chat
