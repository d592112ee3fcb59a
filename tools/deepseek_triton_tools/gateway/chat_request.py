"""A request to /v1/chat/completions as a request to the model's server.

Forms of the answer are asked for in the words of OpenAI, vLLM and TensorRT-LLM.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from deepseek_triton_tools.gateway.openai_fields import (
    COUNTS,
    MOST_INT32,
    a_list,
    an_object,
    between,
    boolean,
    check_names,
    choices,
    given_fields,
    invalid,
    json_text,
    model_inputs,
    stream_options,
    text,
    wrong,
)

GUIDE_FIELDS = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_json_object",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "guided_structural_tag",
)
"""The fields of a request that ask for a form. OpenAI has the first one, vLLM the others."""


def guided_fields(request: Mapping[str, object]) -> dict[str, object]:
    """Return the contract's `guided_*` field for what the request's GUIDE_FIELDS ask; none for plain text.

    request: any of GUIDE_FIELDS; None is the same as absent.

    Raises OpenAIError for a form that is wrong, unknown, or asked for beside another one.
    """
    found = {name: field for name in GUIDE_FIELDS if (field := _guide(name, request.get(name)))}
    if len(found) > 1:
        names = " and ".join(found)
        raise invalid(f"{names}: expected one of them, because an answer has one form.", param=next(iter(found)))
    return next(iter(found.values()), {})


def format_of_responses(text_format: object) -> object:
    """The Responses API's `text.format` as chat's `response_format`, which has the schema one level deeper."""
    if isinstance(text_format, dict) and text_format.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": {k: v for k, v in text_format.items() if k != "type"}}
    return text_format


def _guide(name: str, value: object) -> dict[str, object]:
    if value is None:
        return {}
    if name == "response_format":
        return _of_response_format(value)
    if name == "structured_outputs":
        return _of_structured_outputs(value)
    return _WRITERS[name.removeprefix("guided_")](name, value)


def _of_response_format(value: object) -> dict[str, object]:
    document = _an_object("response_format", value)
    kind = document.get("type")
    match kind:
        case "text":
            return {}
        case "json_object":
            return {"guided_json_object": True}
        case "json_schema":
            schema = _an_object("response_format.json_schema", document.get("json_schema"))
            return _json("response_format.json_schema.schema", schema.get("schema"))
        case "regex" | "ebnf" as key:  # TensorRT-LLM's
            return _WRITERS["grammar" if key == "ebnf" else key](f"response_format.{key}", document.get(key))
        case "structural_tag":
            return _structural_tag("response_format", document)
    known = "text, json_object, json_schema, regex, ebnf or structural_tag"
    raise invalid(f"response_format.type: expected {known}, got {kind!r}.", param="response_format.type")


def _of_structured_outputs(value: object) -> dict[str, object]:
    document = {
        name: guide
        for name, guide in _an_object("structured_outputs", value).items()
        # vLLM's clients send all of its fields, with null or false for what they don't ask.
        if guide is not None and guide is not False
    }
    unknown = [name for name in document if name not in _WRITERS]
    if unknown or len(document) > 1:
        raise invalid(
            f"structured_outputs: expected one of {', '.join(_WRITERS)}, got {', '.join(document)}.",
            param="structured_outputs",
        )
    return {
        key: field
        for name, guide in document.items()
        for key, field in _WRITERS[name](f"structured_outputs.{name}", guide).items()
    }


def _json(name: str, value: object) -> dict[str, object]:
    """A JSON schema, as an object or as its text."""
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except msgspec.DecodeError as error:
            raise invalid(f"{name}: expected a JSON schema, got text that is not JSON: {error}.", param=name) from None
    return {"guided_json": json_text(_an_object(name, value, "a JSON schema"))}


def _json_object(name: str, value: object) -> dict[str, object]:
    if not isinstance(value, bool):
        raise invalid(f"{name}: expected true or false, got {_shown(value)}.", param=name)
    return {"guided_json_object": True} if value else {}


def _text(field: str) -> Callable[[str, object], dict[str, object]]:
    def write(name: str, value: object) -> dict[str, object]:
        if not isinstance(value, str) or not value:
            raise invalid(f"{name}: expected a text, got {_shown(value)}.", param=name)
        return {field: value}

    return write


def _choice(name: str, value: object) -> dict[str, object]:
    if not isinstance(value, list) or not value or not all(isinstance(choice, str) and choice for choice in value):
        raise invalid(f"{name}: expected a list of texts, got {_shown(value)}.", param=name)
    return {"guided_regex": "(" + "|".join(map(_literal, value)) + ")"}


def _structural_tag(name: str, value: object) -> dict[str, object]:
    return {"guided_structural_tag": value if isinstance(value, str) else json_text(_an_object(name, value))}


_WRITERS: dict[str, Callable[[str, object], dict[str, object]]] = {
    "json": _json,
    "json_object": _json_object,
    "regex": _text("guided_regex"),
    "choice": _choice,
    "grammar": _text("guided_grammar"),
    "structural_tag": _structural_tag,
}
"""A guide in vLLM's words -> what makes the contract's field of it."""


def _literal(text: str) -> str:
    """A regular expression for the text itself. Only what has a meaning is escaped: grammars know few escapes."""
    return re.sub(r"[\\^$.|?*+()\[\]{}/-]", r"\\\g<0>", text)


def _an_object(name: str, value: object, what: str = "an object") -> dict[str, object]:
    if not isinstance(value, dict):
        raise invalid(f"{name}: expected {what}, got {_shown(value)}.", param=name)
    return value


def _shown(value: object) -> str:
    """The value in an error message: as JSON, and not all of a long one."""
    text = "nothing" if value is None else json_text(value)
    return text if len(text) <= 60 else text[:57] + "..."


CHAT_FIELDS = frozenset(
    {
        "model",
        "messages",
        "stream",
        "stream_options",
        "max_completion_tokens",
        "logprobs",
        "top_logprobs",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "thinking",
        "reasoning_effort",
        "chat_template_kwargs",
        "include_reasoning",
        "separate_reasoning",
        "stream_reasoning",
        "add_generation_prompt",
        "continue_final_message",
        "prompt_cache_key",
        *GUIDE_FIELDS,
    }
)
"""Fields of chat alone that are no sampling fields."""
_NO_THINKING = ("none", "minimal")
_EFFORTS = (*_NO_THINKING, "low", "medium", "high", "xhigh", "max")
_MOST_TOP_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request's facts for the gateway itself, and the inputs that it sends on.

    inputs: the body of Triton's generate endpoint, but for `streaming`. has_tools: calls are looked for in the text.
    drop_calls: calls that the model makes all the same are left out. only_first_call: nothing after one call is given.
    most_tokens: of all answers together; None where the client gave no max_tokens.
    """

    model: str
    messages: list[object]
    inputs: dict[str, object]
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    num_choices: int = 1
    copies: int = 1
    """How many of the choices each answer is given as."""
    most_tokens: int | None = None
    include_reasoning: bool = True
    top_logprobs: int | None = None
    """None for no log-probabilities."""
    has_tools: bool = False
    drop_calls: bool = False
    only_first_call: bool = False
    cache_key: str = ""


def read_chat_request(document: object) -> ChatRequest:
    """Raises OpenAIError, which names the field."""
    given = given_fields(document)
    check_names(given, CHAT_FIELDS)
    messages = a_list("messages", given.get("messages"))
    stream = boolean("stream", given.get("stream", False))
    include_usage, continuous_usage = stream_options(given)
    max_tokens = _max_tokens(given)
    top_logprobs = _top_logprobs(given)
    sampling: dict[str, object] = {} if top_logprobs is None else {"logprobs": top_logprobs}
    tools = a_list("tools", given.get("tools", []))
    parallel = boolean("parallel_tool_calls", given.get("parallel_tool_calls", True))
    # A conversation with calls in it needs the parser too: the model may go on calling.
    has_tools = bool(tools) or any(isinstance(message, dict) and message.get("tool_calls") for message in messages)
    sampling |= guided_fields(given)
    num_choices, copies, num_answers, fields = choices(given)
    sampling |= fields
    if max_tokens is not None:
        sampling["max_tokens"] = max_tokens
    inputs = model_inputs(given, sampling)
    inputs |= rendering(given, messages, tools)
    if top_logprobs is not None:
        inputs["return_logprobs"] = True
    only_first_call = has_tools and not parallel
    if continuous_usage or only_first_call:
        # The last response, which has the counts anyway, may never come.
        inputs |= COUNTS
    return ChatRequest(
        model=text("model", given.get("model", "")),
        messages=messages,
        inputs=inputs,
        stream=stream,
        include_usage=include_usage,
        continuous_usage=continuous_usage,
        num_choices=num_choices,
        copies=copies,
        most_tokens=None if max_tokens is None else max_tokens * num_answers,
        include_reasoning=boolean("include_reasoning", given.get("include_reasoning", True)),
        top_logprobs=top_logprobs,
        has_tools=has_tools,
        drop_calls=given.get("tool_choice") == "none",
        only_first_call=only_first_call,
        cache_key=text("prompt_cache_key", given.get("prompt_cache_key", "")),
    )


def _max_tokens(given: Mapping[str, object]) -> int | None:
    """max_completion_tokens is the newer name, and wins where a client sends both."""
    for name in ("max_completion_tokens", "max_tokens"):
        if name in given:
            return between(name, given[name], 1, MOST_INT32)
    return None


def _top_logprobs(given: Mapping[str, object]) -> int | None:
    wanted = boolean("logprobs", given.get("logprobs", False))
    top = between("top_logprobs", given.get("top_logprobs", 0), 0, _MOST_TOP_LOGPROBS)
    if top and not wanted:
        raise invalid("top_logprobs needs logprobs true.", param="top_logprobs")
    return top if wanted else None


def rendering(given: Mapping[str, object], messages: list[object], tools: list[object]) -> dict[str, object]:
    """The inputs that the prompt is made of. Raises OpenAIError."""
    if not messages:
        raise invalid("messages: expected at least one message, got none.", param="messages")
    continues = boolean("continue_final_message", given.get("continue_final_message", False))
    # vLLM's clients turn it off where they have a message continued, because vLLM wants that.
    if not boolean("add_generation_prompt", given.get("add_generation_prompt", True)) and not continues:
        raise wrong("add_generation_prompt", "true: a prompt is rendered to be answered", False)
    if continues:
        last = messages[-1]
        if not isinstance(last, dict) or last.get("role") != "assistant":
            raise invalid("continue_final_message needs a last message of the assistant.", param="messages")
        messages = [*messages[:-1], {**last, "prefix": True}]
    inputs: dict[str, object] = {
        "messages": json_text(messages),
        "separate_reasoning": boolean("separate_reasoning", given.get("separate_reasoning", True)),
    }
    if tools:
        inputs["tools"] = json_text(tools)
    choice = given.get("tool_choice")
    if choice is not None and (tools or choice not in ("auto", "none")):
        inputs["tool_choice"] = choice if isinstance(choice, str) else json_text(choice)
    if kwargs := _template_arguments(given):
        inputs["chat_template_kwargs"] = json_text(kwargs)
    return inputs


def _template_arguments(given: Mapping[str, object]) -> dict[str, object]:
    """`chat_template_kwargs` with the thinking switch, which has four names."""
    arguments = dict(an_object("chat_template_kwargs", given.get("chat_template_kwargs", {})))
    switches: dict[str, object] = {}
    if "thinking" in arguments:
        switches["chat_template_kwargs.thinking"] = arguments["thinking"]
    if "enable_thinking" in arguments:
        switches["chat_template_kwargs.enable_thinking"] = arguments.pop("enable_thinking")
    if "thinking" in given:
        kind = an_object("thinking", given["thinking"]).get("type")
        if kind not in ("enabled", "disabled"):
            raise wrong("thinking.type", "enabled or disabled", kind)
        switches["thinking.type"] = kind == "enabled"
    if "reasoning_effort" in given:
        effort = text("reasoning_effort", given["reasoning_effort"])
        if effort not in _EFFORTS:
            raise wrong("reasoning_effort", f"one of {', '.join(_EFFORTS)}", effort)
        switches["reasoning_effort"] = effort not in _NO_THINKING
    values = {boolean(name, value) for name, value in switches.items()}
    if len(values) > 1:
        raise invalid(f"{' and '.join(switches)} contradict each other.", param=next(iter(switches)).partition(".")[0])
    if values:
        arguments["thinking"] = values.pop()
    return arguments
