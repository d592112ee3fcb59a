"""Each field of chat and text completions: what it sets at the model's server, and what is said of a wrong one."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from deepseek_triton_tools.gateway.protocol.chat_request import ChatRequest, read_chat_request
from deepseek_triton_tools.gateway.protocol.completion_request import read_completion_request
from deepseek_triton_tools.gateway.protocol.openai_errors import OpenAIError
from deepseek_triton_tools.gateway.protocol.openai_fields import (
    INPUTS,
    MOST_ITEMS,
    MOST_TOKEN_IDS,
    REFUSED,
    SAMPLING,
    WITHOUT_EFFECT,
)

MESSAGES = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
CALLED = [*MESSAGES, {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]}]


def chat(**fields: object) -> ChatRequest:
    return read_chat_request({"messages": MESSAGES, **fields})


def sampling(inputs: dict[str, Any]) -> dict[str, Any]:
    """All but the one answer that is asked for unless there is an `n`, because model.yaml may ask for several."""
    found: dict[str, Any] = json.loads(inputs["sampling_parameters"])
    return {name: value for name, value in found.items() if (name, value) != ("n", 1)}


def refusal(kind: str, **fields: object) -> OpenAIError:
    read = read_chat_request if kind == "chat" else read_completion_request
    with pytest.raises(OpenAIError) as raised:
        read({**({"messages": MESSAGES} if kind == "chat" else {"prompt": "Hi"}), **fields})
    assert raised.value.status == 400
    return raised.value


VALUES: dict[str, tuple[object, object]] = {
    "max_tokens": (7.0, 7),
    "temperature": (0.5, 0.5),
    "top_p": (1, 1),
    "top_k": (3, 3),
    "min_p": (0.1, 0.1),
    "n": (2, 2),
    "stop": ("END", ["END"]),
    "seed": (-5, -5),
    "presence_penalty": (-1.5, -1.5),
    "frequency_penalty": (2, 2),
    "repetition_penalty": (1.1, 1.1),
    "min_tokens": (1, 1),
    "ignore_eos": (True, True),
    "stop_token_ids": ([1, 2], [1, 2]),
    "include_stop_str_in_output": (True, True),
    "skip_special_tokens": (False, False),
    "add_special_tokens": (False, False),
    "bad_words": (["no", "never"], ["no", "never"]),
    "logit_bias": ({"5": -100, "6": 0.5}, {"5": -100, "6": 0.5}),
    "prompt_logprobs": (1, 1),
    "truncate_prompt_tokens": (9, 9),
}


@pytest.mark.parametrize("name", SAMPLING)
def test_a_sampling_field_arrives(name: str) -> None:
    given, expected = VALUES[name]
    for inputs in (chat(**{name: given}).inputs, read_completion_request({"prompt": "Hi", name: given}).inputs):
        more = {"temperature": 1.0} if name == "n" else {}  # the model's own may be greedy
        assert sampling(inputs) == {SAMPLING[name][0]: expected, **more}


@pytest.mark.parametrize("kind", ["chat", "completion"])
@pytest.mark.parametrize("name", [*SAMPLING, *INPUTS])
def test_a_value_of_the_wrong_type_is_refused_by_name(kind: str, name: str) -> None:
    error = refusal(kind, **{name: {"a": 1}})
    assert error.param == name
    assert error.message.startswith(f"{name}: expected ")
    assert error.message.endswith('got {"a":1}.')


@pytest.mark.parametrize("name", INPUTS)
def test_an_input_arrives(name: str) -> None:
    assert chat(**{name: 5}).inputs[name] == 5
    assert refusal("chat", **{name: 2**31}).param == name


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_a_field_without_effect_is_accepted(name: str) -> None:
    assert chat(**{name: "anything"}) == chat()


@pytest.mark.parametrize("name", REFUSED)
def test_a_field_is_refused_with_the_reason(name: str) -> None:
    reason, harmless = REFUSED[name]
    error = refusal("chat", **{name: ["something"]})
    assert (error.param, error.code) == (name, "unsupported_parameter")
    assert reason in error.message
    for value in (None, *harmless):
        assert chat(**{name: value}) == chat()


def test_a_null_is_as_absent() -> None:
    names = {*SAMPLING, *INPUTS, *REFUSED, "tools", "tool_choice", "stream_options", "response_format", "thinking"}
    assert chat(**dict.fromkeys(names)) == chat()


@pytest.mark.parametrize(
    ("kind", "name", "near"),
    [
        ("chat", "temprature", "temperature"),
        ("chat", "max_token", "max_tokens"),
        ("chat", "prompt", ""),
        ("completion", "messages", ""),
        ("completion", "sufix", "suffix"),
        ("chat", "x" * 500, ""),
        ("chat", "", ""),
    ],
)
def test_an_unknown_field_is_refused_with_the_nearest_name(kind: str, name: str, near: str) -> None:
    error = refusal(kind, **{name: 1})
    assert (error.param, error.code) == (name[:80], "unknown_parameter")
    assert error.message.endswith(f"Did you mean {near}?" if near else ".")
    assert len(error.message) < 150


@pytest.mark.parametrize("document", [None, [], "text", 5, {}, {"messages": []}, {"messages": None}, {"messages": "a"}])
def test_what_is_no_chat(document: object) -> None:
    with pytest.raises(OpenAIError, match="expected"):
        read_chat_request(document)


BAD_CHAT: list[tuple[dict[str, object], str, str]] = [
    ({"n": 0}, "n", "1 to 64"),
    ({"n": 65}, "n", "1 to 64"),
    ({"n": 10**30}, "n", "1 to 64"),
    ({"n": True}, "n", "a whole number"),
    ({"max_tokens": 0}, "max_tokens", "1 to 2147483647"),
    ({"max_tokens": -(10**9)}, "max_tokens", "1 to 2147483647"),
    ({"max_tokens": 1.5}, "max_tokens", "a whole number"),
    ({"max_completion_tokens": 2**31}, "max_completion_tokens", "1 to 2147483647"),
    ({"top_logprobs": 1}, "top_logprobs", "needs logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "0 to 20"),
    ({"logprobs": 5}, "logprobs", "true or false"),
    ({"stop": ["a", 1]}, "stop", r"stop\[1\]: expected a text"),
    ({"stream": "yes"}, "stream", "true or false"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream true"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options", "true or false"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options", "unknown field 'usage'"),
    ({"tools": {}}, "tools", "a list"),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls", "true or false"),
    ({"thinking": True}, "thinking", "an object"),
    ({"thinking": {"type": "on"}}, "thinking", "enabled or disabled"),
    ({"thinking": {}}, "thinking", "enabled or disabled"),
    ({"reasoning_effort": "huge"}, "reasoning_effort", "one of none, minimal, low"),
    ({"chat_template_kwargs": {"thinking": "yes"}}, "chat_template_kwargs", "true or false"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs", "an object"),
    ({"thinking": {"type": "enabled"}, "reasoning_effort": "none"}, "thinking", "contradict"),
    ({"add_generation_prompt": False}, "add_generation_prompt", "true"),
    ({"continue_final_message": True}, "messages", "the assistant"),
    ({"model": 5}, "model", "a text"),
    ({"logit_bias": {"5" * 1000: "x"}}, "logit_bias", r"logit_bias\[5{40}\]: expected a number"),
]


@pytest.mark.parametrize(("fields", "param", "words"), BAD_CHAT)
def test_a_wrong_chat_is_refused(fields: dict[str, object], param: str, words: str) -> None:
    with pytest.raises(OpenAIError, match=words) as raised:
        chat(**fields)
    assert (raised.value.status, raised.value.param) == (400, param)


@pytest.mark.parametrize(
    "fields", [{"max_tokens": 9}, {"max_completion_tokens": 9}, {"max_tokens": 1, "max_completion_tokens": 9}]
)
def test_max_tokens_has_two_names_and_the_newer_one_wins(fields: dict[str, object]) -> None:
    asked = chat(**fields)
    assert (asked.most_tokens, sampling(asked.inputs)) == (9, {"max_tokens": 9})


@pytest.mark.parametrize(
    ("fields", "thinking"),
    [
        ({"thinking": {"type": "enabled"}}, True),
        ({"thinking": {"type": "disabled"}}, False),
        ({"reasoning_effort": "high"}, True),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "minimal"}, False),
        ({"chat_template_kwargs": {"thinking": True}}, True),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"chat_template_kwargs": {"enable_thinking": True, "thinking": True}, "reasoning_effort": "low"}, True),
    ],
)
def test_thinking_has_four_switches(fields: dict[str, object], thinking: bool) -> None:
    assert json.loads(str(chat(**fields).inputs["chat_template_kwargs"])) == {"thinking": thinking}


def test_nothing_is_said_of_thinking_unless_it_was_asked() -> None:
    assert "chat_template_kwargs" not in chat().inputs
    other = chat(chat_template_kwargs={"style": "short"}).inputs["chat_template_kwargs"]
    assert json.loads(str(other)) == {"style": "short"}


def test_messages_go_on_as_they_came() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "Łódź 😀"}]}]
    assert json.loads(str(chat(messages=messages).inputs["messages"])) == messages


def test_the_last_message_is_continued() -> None:
    last = {"role": "assistant", "content": "Once"}
    asked = chat(messages=[*MESSAGES, last], continue_final_message=True)
    assert json.loads(str(asked.inputs["messages"]))[-1] == {**last, "prefix": True}


@pytest.mark.parametrize(
    ("choice", "sent"),
    [
        (None, None),
        ("auto", "auto"),
        ("none", "none"),
        ("required", "required"),
        ({"type": "function", "function": {"name": "f"}}, '{"type":"function","function":{"name":"f"}}'),
    ],
)
def test_tools(choice: object, sent: object) -> None:
    asked = chat(tools=[TOOL], tool_choice=choice)
    assert json.loads(str(asked.inputs["tools"])) == [TOOL]
    assert asked.inputs.get("tool_choice") == sent
    assert (asked.has_tools, asked.drop_calls) == (True, choice == "none")


def test_no_tools() -> None:
    assert not chat(tools=[], tool_choice="auto").has_tools
    assert "tool_choice" not in chat(tools=[], tool_choice="none").inputs
    assert chat(tool_choice="required").inputs["tool_choice"] == "required"  # the server says what is wrong
    assert chat(messages=CALLED).has_tools


def test_logprobs_of_chat() -> None:
    assert chat().top_logprobs is None
    asked = chat(logprobs=True, top_logprobs=3)
    assert (asked.top_logprobs, asked.inputs["return_logprobs"]) == (3, True)
    assert sampling(asked.inputs) == {"logprobs": 3}


@pytest.mark.parametrize("fields", [{"tools": [TOOL], "parallel_tool_calls": False}, {"stream": True}])
def test_counts_are_asked_for_where_the_last_response_may_not_come(fields: dict[str, object]) -> None:
    if "stream" in fields:
        fields = {**fields, "stream_options": {"continuous_usage_stats": True}}
    inputs = chat(**fields).inputs
    assert inputs["return_num_input_tokens"]
    assert inputs["return_num_output_tokens"]
    assert "return_num_input_tokens" not in chat().inputs


@pytest.mark.parametrize(
    ("prompt", "forms"),
    [
        ("Hi", [{"text_input": "Hi"}]),
        ([1, 2], [{"text_input": "", "input_ids": [1, 2]}]),
        (["a", "b"], [{"text_input": "a"}, {"text_input": "b"}]),
        ([[1], [2, 3]], [{"text_input": "", "input_ids": [1]}, {"text_input": "", "input_ids": [2, 3]}]),
        (["a", [1]], [{"text_input": "a"}, {"text_input": "", "input_ids": [1]}]),
    ],
)
def test_prompts(prompt: object, forms: list[dict[str, object]]) -> None:
    asked = read_completion_request({"prompt": prompt})
    found = [asked.prompt_inputs(each) for each in asked.prompts]
    assert found == [{**form, "sampling_parameters": '{"n":1}'} for form in forms]


BAD_COMPLETIONS: list[tuple[dict[str, object], str, str]] = [
    ({"prompt": None}, "prompt", "a list"),
    ({"prompt": ""}, "prompt", "got nothing"),
    ({"prompt": []}, "prompt", "got nothing"),
    ({"prompt": ["a", ""]}, "prompt", "got nothing"),
    ({"prompt": [[]]}, "prompt", "got nothing"),
    ({"prompt": [1, "a"]}, "prompt", "a list"),
    ({"prompt": [True]}, "prompt", "a whole number"),
    ({"prompt": [-1]}, "prompt", "0 to 2147483647"),
    ({"prompt": [[2**31]]}, "prompt", "0 to 2147483647"),
    ({"prompt": ["a"] * 257}, "prompt", "at most 256"),
    ({"max_tokens": 0}, "max_tokens", "1 to"),
    ({"max_tokens": 0, "echo": True, "stream": True}, "stream", "nothing to stream"),
    ({"logprobs": 21}, "logprobs", "0 to 20"),
    ({"logprobs": True}, "logprobs", "a whole number"),
    ({"suffix": "b", "prompt": [1]}, "suffix", "not token ids"),
    ({"suffix": "b", "echo": True}, "echo", "not possible together"),
    ({"suffix": 5}, "suffix", "a text"),
    ({"n": 0}, "n", "1 to 64"),
    ({"best_of": "two"}, "best_of", "a whole number"),
    ({"echo": 1}, "echo", "true or false"),
]


@pytest.mark.parametrize(("fields", "param", "words"), BAD_COMPLETIONS)
def test_a_wrong_completion_is_refused(fields: dict[str, object], param: str, words: str) -> None:
    with pytest.raises(OpenAIError, match=words) as raised:
        read_completion_request({"prompt": "Hi", **fields})
    assert (raised.value.status, raised.value.param) == (400, param)


def test_a_hole_is_filled() -> None:
    (prompt,) = read_completion_request({"prompt": "def f(", "suffix": "return 1"}).prompts
    assert prompt == "<｜fim▁begin｜>def f(<｜fim▁hole｜>return 1<｜fim▁end｜>"


def test_logprobs_of_an_echo() -> None:
    asked = read_completion_request({"prompt": "Hi", "echo": True, "logprobs": 1, "max_tokens": 0})
    assert asked.only_echo
    assert sampling(asked.inputs) == {"max_tokens": 1, "logprobs": 1, "prompt_logprobs": 1}
    assert asked.inputs["return_logprobs"] is True


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("stop", lambda count: ["a"] * count),
        ("stop_token_ids", lambda count: [1] * count),
        ("logit_bias", lambda count: {str(number): 1 for number in range(count)}),
    ],
)
def test_a_list_is_read_up_to_its_limit(field: str, values: Callable[[int], object]) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    read_chat_request({**body, field: values(MOST_ITEMS)})
    with pytest.raises(OpenAIError, match=rf"{field}: expected at most 1,024 (values|tokens), got 1025\."):
        read_chat_request({**body, field: values(MOST_ITEMS + 1)})


def test_token_ids_are_read_up_to_their_limit() -> None:
    assert len(read_completion_request({"prompt": [7] * MOST_TOKEN_IDS}).prompts[0]) == MOST_TOKEN_IDS
    with pytest.raises(OpenAIError, match=r"prompt: expected at most 1,048,576 token ids, got 1048577\."):
        read_completion_request({"prompt": [7] * (MOST_TOKEN_IDS + 1)})


def test_an_error_does_not_quote_a_whole_request() -> None:
    with pytest.raises(OpenAIError) as caught:
        read_chat_request({"messages": [], "response_format": {"type": "a" * 100_000}})
    assert len(caught.value.message) == 4003
