"""A request to /v1/chat/completions as a request to the model's server.

Forms of the answer are asked for in the words of OpenAI, vLLM and TensorRT-LLM.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from deepseek_triton_tools.gateway.openai_fields import (
    CONTRACT_NAMES,
    COUNTS,
    MOST_INT32,
    a_list,
    an_object,
    between,
    boolean,
    check_names,
    choices,
    closed_object,
    given_fields,
    invalid,
    json_text,
    model_inputs,
    stream_options,
    text,
    wrong,
)

_WORDS = {
    "json": "a JSON schema",
    "json_object": "true or false",
    "regex": "a text",
    "choice": "a list of texts",
    "grammar": "a text",
    "structural_tag": "an object",
}
"""A form in vLLM's words -> what its value is."""
GUIDE_FIELDS = ("response_format", "structured_outputs", *(f"guided_{word}" for word in _WORDS))
"""The fields of a request that ask for a form. OpenAI has the first one, vLLM the others."""


def guided_fields(request: Mapping[str, object]) -> dict[str, object]:
    """Return the contract's `guided_*` field for what the request's GUIDE_FIELDS ask; none for plain text.

    request: any of GUIDE_FIELDS; None is the same as absent.

    Raises OpenAIError for a form that is wrong, unknown, or asked for beside another one.
    """
    forms = _forms(request)
    if len(forms) > 1:
        names = " and ".join(forms)
        raise invalid(f"{names}: expected one of them, because an answer has one form.", param=next(iter(forms)))
    return next(iter(forms.values()), {})


def _forms(request: Mapping[str, object]) -> dict[str, dict[str, object]]:
    """The fields of the request that ask for a form, and the contract's field of each."""
    forms: dict[str, dict[str, object]] = {}
    for name in GUIDE_FIELDS:
        value = request.get(name)
        if value is None:
            continue
        if name == "response_format":
            forms[name] = _of_response_format(value)
        elif name == "structured_outputs":
            forms[name] = _of_structured_outputs(value)
        else:
            forms[name] = _of_word(name.removeprefix("guided_"), name, value)
    return {name: form for name, form in forms.items() if form}


_SENT_AS = (
    *((contract, name) for name, contract in CONTRACT_NAMES.items()),
    ("max_tokens", "max_completion_tokens"),
    ("logprobs", "top_logprobs"),
    ("prompt_logprobs", "echo"),
    ("text_input", "prompt"),
    ("input_ids", "prompt"),
    ("input_ids", "tokens"),
)
"""The contract's name of a field, and a field of requests that becomes it."""


def sent_names(request: Mapping[str, object]) -> dict[str, str]:
    """The contract's name of each field that this request, which has been read, has by another name -> that name."""
    names = {contract: name for contract, name in _SENT_AS if request.get(name) not in (None, False)}
    # Beside tools the model's server makes a structural tag of any form, and of a strict tool without one.
    for name in (*_forms(request), *(["tools"] if request.get("tools") else [])):
        for word in _WORDS:
            names.setdefault(f"guided_{word}", name)
    return names


def format_of_responses(text_format: object) -> object:
    """The Responses API's `text.format` as chat's `response_format`, which has the schema one level deeper."""
    if isinstance(text_format, dict) and text_format.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": {k: v for k, v in text_format.items() if k != "type"}}
    return text_format


def _of_response_format(value: object) -> dict[str, object]:
    document = an_object("response_format", value)
    match kind := document.get("type"):
        case "text" | "json_object":
            closed_object("response_format", document, ("type",))
            return {} if kind == "text" else {"guided_json_object": True}
        case "json_schema":
            schema = closed_object("response_format", document, ("type", kind)).get(kind)
            schema = closed_object(f"response_format.{kind}", schema, ("name", "description", "schema", "strict"))
            return _of_word("json", "response_format.json_schema.schema", schema.get("schema"))
        case "regex" | "ebnf" as word:  # TensorRT-LLM's
            closed_object("response_format", document, ("type", word))
            return _of_word("grammar" if word == "ebnf" else word, f"response_format.{word}", document.get(word))
        case "structural_tag":
            return _of_word("structural_tag", "response_format", document)
    known = "text, json_object, json_schema, regex, ebnf or structural_tag"
    raise invalid(f"response_format.type: expected {known}, got {kind!r}.", param="response_format.type")


def _of_structured_outputs(value: object) -> dict[str, object]:
    # vLLM's clients send all of its fields, with null or false for what they don't ask.
    document = {
        word: guide
        for word, guide in an_object("structured_outputs", value).items()
        if guide is not None and guide is not False
    }
    if len(document) > 1 or not document.keys() <= _WORDS.keys():
        expected = f"one of {', '.join(_WORDS)}"
        raise invalid(
            f"structured_outputs: expected {expected}, got {', '.join(document)}.", param="structured_outputs"
        )
    for word, guide in document.items():
        return _of_word(word, f"structured_outputs.{word}", guide)
    return {}


def _of_word(word: str, name: str, value: object) -> dict[str, object]:
    """The contract's field for a form in vLLM's words, which the request has as its field `name`."""
    if word == "json" and isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except msgspec.DecodeError as error:
            raise invalid(f"{name}: expected a JSON schema, got text that is not JSON: {error}.", param=name) from None
    match word, value:
        case "json", dict():
            return {"guided_json": json_text(value)}
        case "json_object", bool():
            return {"guided_json_object": True} if value else {}
        case (("regex" | "grammar"), str()) if value:
            return {f"guided_{word}": value}
        case "choice", [_, *_] as texts if all(isinstance(one, str) and one for one in texts):
            # Only what has a meaning is escaped: grammars know few escapes.
            literals = [re.sub(r"[\\^$.|?*+()\[\]{}/-]", r"\\\g<0>", str(one)) for one in texts]
            return {"guided_regex": f"({'|'.join(literals)})"}
        case "structural_tag", (str() | dict()):
            return {"guided_structural_tag": value if isinstance(value, str) else json_text(value)}
    raise wrong(name, _WORDS[word], value, param=name)


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
        "add_generation_prompt",
        "continue_final_message",
        "prompt_cache_key",
        *GUIDE_FIELDS,
    }
)
"""Fields of chat alone that are no sampling fields."""
EFFORT = "reasoning_effort"
"""Stands among a request's inputs until the model is known, which may tell efforts apart, or may not."""
NUMBERS = "1-100"
"""Stands for numbers among a model's efforts."""
_NO_THINKING = ("none", "minimal")
_EFFORTS = (*_NO_THINKING, "low", "medium", "high", "xhigh", "max", "ultra")
_MOST_TOP_LOGPROBS = 20


@dataclass(slots=True)
class ModelRequest:
    """A request for chat or completions: what it says to the gateway itself, and the inputs that the gateway sends on.

    inputs: the body of Triton's generate endpoint, but for `streaming` and a completion's prompt. copies: how many of
    the choices each answer is given as. made_per_choice: how many answers are made for each choice that is no copy
    (`best_of` / `n`). most_tokens: of one prompt's answers together; None where the client gave no max_tokens.
    """

    model: str
    stream: bool
    include_usage: bool
    continuous_usage: bool
    num_choices: int
    copies: int
    made_per_choice: float
    most_tokens: int | None
    cache_key: str
    inputs: dict[str, object] = field(init=False)


Request = TypeVar("Request", bound=ModelRequest)


def read_common(
    kind: type[Request], given: Mapping[str, object], *, own: Iterable[str], max_tokens: int | None
) -> tuple[Request, dict[str, object]]:
    """The request but for its inputs, and the sampling parameters that the gateway itself sets. Raises OpenAIError.

    own: the fields that are neither for sampling nor inputs.
    """
    check_names(given, own)
    stream = boolean("stream", given.get("stream", False))
    include_usage, continuous_usage = stream_options(given)
    sampling = guided_fields(given)
    num_choices, copies, num_answers, fields = choices(given)
    request = kind(
        model=text("model", given.get("model", "")),
        stream=stream,
        include_usage=include_usage,
        continuous_usage=continuous_usage,
        num_choices=num_choices,
        copies=copies,
        made_per_choice=num_answers * copies / num_choices,
        most_tokens=None if max_tokens is None else max_tokens * num_answers,
        cache_key=text("prompt_cache_key", given.get("prompt_cache_key", "")),
    )
    return request, sampling | fields


@dataclass(slots=True)
class ChatRequest(ModelRequest):
    """has_tools: calls are looked for in the text. drop_calls: calls that the model makes all the same are left out.
    only_first_call: nothing after one call is given. top_logprobs: None for no log-probabilities. thinks: the answer
    has the fields of the reasoning without any too, as at DeepSeek, whose clients don't ask whether they are there."""

    messages: list[object] = field(default_factory=list)
    include_reasoning: bool = True
    top_logprobs: int | None = None
    has_tools: bool = False
    drop_calls: bool = False
    only_first_call: bool = False
    thinks: bool = False


def read_chat_request(document: object) -> ChatRequest:
    """Raises OpenAIError, which names the field."""
    given = given_fields(document)
    # max_completion_tokens is the newer name, and wins where a client sends both.
    name = "max_completion_tokens" if "max_completion_tokens" in given else "max_tokens"
    max_tokens = between(name, given[name], 1, MOST_INT32) if name in given else None
    request, sampling = read_common(ChatRequest, given, own=CHAT_FIELDS, max_tokens=max_tokens)
    request.messages = a_list("messages", given.get("messages"))
    request.include_reasoning = boolean("include_reasoning", given.get("include_reasoning", True))
    tools = a_list("tools", given.get("tools", []))
    parallel = boolean("parallel_tool_calls", given.get("parallel_tool_calls", True))
    # A conversation with calls in it needs the parser too: the model may go on calling.
    request.has_tools = bool(tools) or any(isinstance(one, dict) and one.get("tool_calls") for one in request.messages)
    request.drop_calls = given.get("tool_choice") == "none"
    request.only_first_call = request.has_tools and not parallel
    if max_tokens is not None:
        sampling["max_tokens"] = max_tokens
    has_logprobs = boolean("logprobs", given.get("logprobs", False))
    top = between("top_logprobs", given.get("top_logprobs", 0), 0, _MOST_TOP_LOGPROBS)
    if top and not has_logprobs:
        raise invalid("top_logprobs needs logprobs true.", param="top_logprobs")
    if has_logprobs:
        sampling["logprobs"] = request.top_logprobs = top
    request.inputs = model_inputs(given, sampling) | rendering(given, request.messages, tools)
    if has_logprobs:
        request.inputs["return_logprobs"] = True
    if request.continuous_usage or request.only_first_call:
        # The last response, which has the counts anyway, may never come.
        request.inputs |= COUNTS
    return request


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
    if (effort := given.get(EFFORT)) is not None:
        is_number = isinstance(effort, int) and not isinstance(effort, bool)
        if effort not in _EFFORTS and not is_number:
            raise wrong(EFFORT, f"one of {', '.join(_EFFORTS)}", effort)
        inputs[EFFORT] = effort
    return inputs


def with_effort(inputs: dict[str, object], efforts: Sequence[str] | None) -> dict[str, object]:
    """The inputs with their effort among the template's arguments. As at DeepSeek, a switch of thinking wins over it.

    efforts: those that the model knows; None: it tells none apart, and only thinks or not. Raises OpenAIError.
    """
    if EFFORT not in inputs:
        return inputs
    effort = inputs[EFFORT]
    kwargs = msgspec.json.decode(str(inputs.get("chat_template_kwargs", "{}")))
    if efforts is None and not isinstance(effort, int):
        kwargs.setdefault("thinking", effort not in _NO_THINKING)
    elif effort in (efforts or ()) or (isinstance(effort, int) and NUMBERS in (efforts or ()) and 1 <= effort <= 100):
        kwargs[EFFORT] = effort
    else:
        raise wrong(EFFORT, f"one of {', '.join(efforts or _EFFORTS)}", effort)
    others = {name: value for name, value in inputs.items() if name != EFFORT}
    return others | {"chat_template_kwargs": json_text(kwargs)}


def will_think(inputs: Mapping[str, object], efforts: Sequence[str] | None) -> bool:
    """Whether the answer has reasoning, be it empty: the request turns it on, or it does not turn it off and the model
    tells `efforts` apart."""
    kwargs = msgspec.json.decode(str(inputs.get("chat_template_kwargs", "{}")))
    is_default = efforts is not None and "none" not in (inputs.get(EFFORT), kwargs.get(EFFORT))
    return bool(kwargs.get("thinking", is_default))


def _template_arguments(given: Mapping[str, object]) -> dict[str, object]:
    """`chat_template_kwargs` with the thinking switch, which has three names."""
    arguments = dict(an_object("chat_template_kwargs", given.get("chat_template_kwargs", {})))
    switches: dict[str, object] = {}
    if "thinking" in arguments:
        switches["chat_template_kwargs.thinking"] = arguments["thinking"]
    if "enable_thinking" in arguments:
        switches["chat_template_kwargs.enable_thinking"] = arguments.pop("enable_thinking")
    if "thinking" in given:
        # Clients of other APIs send more than the type.
        keys = ("type", "budget_tokens", "display", "clear_thinking", "keep")
        thinking = closed_object("thinking", given["thinking"], keys)
        kind = thinking.get("type")
        if thinking.get("budget_tokens") is not None:
            text = "thinking.budget_tokens: nothing bounds thinking alone: use max_tokens, of the whole answer"
            raise invalid(text, param="thinking", code="unsupported_parameter")
        if kind not in ("enabled", "adaptive", "disabled"):
            raise wrong("thinking.type", "enabled, adaptive or disabled", kind)
        switches["thinking.type"] = kind != "disabled"
    values = {boolean(name, value) for name, value in switches.items()}
    if len(values) > 1:
        raise invalid(f"{' and '.join(switches)} contradict each other.", param=next(iter(switches)).partition(".")[0])
    if values:
        arguments["thinking"] = values.pop()
    return arguments
