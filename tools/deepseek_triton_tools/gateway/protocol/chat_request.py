"""A request to /v1/chat/completions as a request to the model's server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from deepseek_triton_tools.gateway.protocol.openai_errors import invalid
from deepseek_triton_tools.gateway.protocol.openai_fields import (
    COUNTS,
    MOST_INT32,
    a_list,
    an_object,
    between,
    boolean,
    check_names,
    choices,
    given_fields,
    json_text,
    model_inputs,
    stream_options,
    text,
    wrong,
)
from deepseek_triton_tools.gateway.protocol.structured_output import GUIDE_FIELDS, guided_fields

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
