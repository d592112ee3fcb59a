"""Requests to the Responses API become the chat requests that ask the same."""

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepseek_triton_tools.gateway.protocol.openai_errors import OpenAIError
from deepseek_triton_tools.gateway.protocol.responses_request import read_responses_request, translated

TOOL = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
CHAT_TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True},
}
USER = {"role": "user", "content": "hi"}


def chat(**fields: object) -> dict[str, object]:
    given = {"model": "m", "input": "hi", **fields}
    return translated({name: value for name, value in given.items() if value is not None})[0]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {"messages": [USER]}),
        ({"instructions": "Be brief."}, {"messages": [{"role": "system", "content": "Be brief."}, USER]}),
        ({"temperature": 0.5, "top_p": None, "user": None}, {"messages": [USER], "temperature": 0.5}),
        ({"max_output_tokens": 5}, {"messages": [USER], "max_completion_tokens": 5}),
        ({"reasoning": {"effort": "low", "summary": "auto"}}, {"messages": [USER], "reasoning_effort": "low"}),
        ({"reasoning": {"effort": None}}, {"messages": [USER]}),
        ({"stream": True, "stream_options": {"include_obfuscation": False}}, {"messages": [USER], "stream": True}),
        ({"background": False, "max_tool_calls": 3, "include": [], "truncation": "disabled"}, {"messages": [USER]}),
        (
            {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
            {"messages": [USER], "logprobs": True, "top_logprobs": 2},
        ),
        (
            {"text": {"format": {"type": "json_object"}}},
            {"messages": [USER], "response_format": {"type": "json_object"}},
        ),
        ({"tools": [TOOL], "tool_choice": "auto"}, {"messages": [USER], "tools": [CHAT_TOOL], "tool_choice": "auto"}),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "name": "f"}},
            {
                "messages": [USER],
                "tools": [CHAT_TOOL],
                "tool_choice": {"type": "function", "function": {"name": "f"}},
            },
        ),
        (
            {
                "tools": [{**TOOL, "name": "g"}, TOOL],
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "required",
                    "tools": [{"type": "function", "name": "f"}],
                },
            },
            {"messages": [USER], "tools": [CHAT_TOOL], "tool_choice": "required"},
        ),
        ({"top_k": 4, "chat_template_kwargs": {}}, {"messages": [USER], "top_k": 4, "chat_template_kwargs": {}}),
    ],
)
def test_fields(fields: dict[str, object], expected: dict[str, object]) -> None:
    assert chat(**fields) == {"model": "m", **expected}


def test_a_conversation_with_reasoning_and_calls_is_one_message_for_each_turn() -> None:
    items = [
        {"role": "developer", "content": "Use tools."},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "text", "text": "b"}], "id": None},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [{"type": "summary_text", "text": "not this"}],
            "content": [{"type": "reasoning_text", "text": "hm"}],
            "encrypted_content": None,
            "status": None,
        },
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}],
        },
        {"type": "function_call", "id": "f", "call_id": "call_1", "name": "f", "arguments": "{}", "status": None},
        {"type": "function_call", "id": None, "call_id": "call_2", "name": "g", "arguments": '{"a":1}'},
        {"type": "function_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "two"}]},
        {"type": "function_call_output", "call_id": "call_1", "output": "one"},
        {"type": "reasoning", "id": "rs_2", "summary": []},
        {"type": "function_call", "call_id": "call_3", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "call_3", "output": ""},
        {"role": "assistant", "content": "First."},
        {"role": "assistant", "content": "Second."},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "broken off"}]},
        {"role": "user", "content": "Go on."},
    ]  # fmt: skip
    assert chat(input=items)["messages"] == [
        {"role": "developer", "content": "Use tools."},
        {"role": "user", "content": "ab"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}},
                {"id": "call_2", "type": "function", "function": {"name": "g", "arguments": '{"a":1}'}},
            ],
        },
        {"role": "tool", "tool_call_id": "call_2", "content": "two"},
        {"role": "tool", "tool_call_id": "call_1", "content": "one"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "call_3", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "call_3", "content": ""},
        {"role": "assistant", "content": "First."},
        {"role": "assistant", "content": "Second."},
        {"role": "user", "content": "Go on."},
    ]


IMAGE = {"role": "user", "content": [{"type": "input_image", "image_url": "http://x"}]}


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"input": None}, "input", "input: expected a text or a list of items, got nothing"),
        ({"input": []}, "input", "input: expected at least one message"),
        ({"input": 3}, "input", "input: expected a text or a list of items, got 3"),
        ({"input": ["a"]}, "input", "input[0]: expected an object, got"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "input[0]: this gateway keeps no items"),
        ({"input": [{"type": "web_search_call"}]}, "input", "input[0].type: expected one of message, reasoning"),
        ({"input": [{"role": "critic", "content": ""}]}, "input", "input[0].role: expected user, system"),
        ({"input": [IMAGE]}, "input", "input[0].content[0].type: expected input_text or output_text"),
        ({"input": [{"role": "user"}]}, "input", "input[0].content: expected a text or a list of parts, got null"),
        ({"input": [{"type": "function_call", "name": "f", "call_id": "c"}]}, "input", "input[0].arguments: expected"),
        ({"input": [{"type": ["message"]}]}, "input", "input[0].type: expected one of"),
        ({"instructions": ["a"]}, "instructions", "instructions: expected a text, got ["),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "previous_response_id: this gateway keeps no"),
        ({"conversation": "conv_1"}, "conversation", "conversation: this gateway keeps no responses"),
        ({"prompt": {"id": "p"}}, "prompt", "prompt: this gateway keeps no prompt templates"),
        ({"background": True}, "background", "background: a response ends with its connection"),
        ({"truncation": "auto"}, "truncation", "truncation: expected disabled"),
        ({"tools": [{"type": "web_search"}]}, "tools", "tools[0].type: expected function, got 'web_search'"),
        ({"tools": "f"}, "tools", "tools: expected a list"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice", "tool_choice.type: expected function or allowed_tools"),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "g"}]}, "tools": [TOOL]},
            "tool_choice",
            "tool_choice.tools: no function tool has the name 'g'",
        ),
        ({"include": ["file_search_call.results"]}, "include", "include: expected message.output_text.logprobs or"),
        ({"max_tokens": 5}, "max_tokens", "max_tokens: this is a field of chat completions. Here it is max_output"),
        ({"n": 2}, "n", "n: this is a field of chat completions. A response is one answer"),
        ({"max_output_tokens": "5"}, "max_output_tokens", 'max_output_tokens: expected a whole number, got "5"'),
        ({"reasoning": {"effort": "huge"}}, "reasoning", "reasoning.effort: expected one of none"),
        ({"text": {"format": {"type": "xml"}}}, "text", "text.format.type: expected text, json_object"),
        ({"temprature": 1}, "temprature", "unknown field 'temprature'. Did you mean temperature?"),
        ({"messages": []}, "messages", "messages: this is a field of chat completions. Here it is input"),
        ({"text": "json"}, "text", "text: expected an object, got"),
        ({"continue_final_message": True}, "input", "continue_final_message needs a last message of the assistant"),
        ({"text": {"format": {"type": "json_schema", "schema": 5}}}, "text", "text.format.schema: expected a JSON"),
        ({"text": {"format": {"type": "json_schema"}}}, "text", "text.format.schema: expected a JSON schema, got noth"),
        (
            {"max_output_token": 3},
            "max_output_token",
            "unknown field 'max_output_token'. Did you mean max_output_t",
        ),
        ({"messages_": 3}, "messages_", "unknown field 'messages_'. Did you mean input?"),
        ({"response_formt": 3}, "response_formt", "unknown field 'response_formt'. Did you mean text.format?"),
        (
            {"thinking": {"type": "enabled"}, "reasoning": {"effort": "none"}},
            "thinking",
            "thinking.type and reasoning.effort contradict each other",
        ),
    ],
)
def test_what_is_not_done_is_refused_by_name(fields: dict[str, object], param: str, message: str) -> None:
    with pytest.raises(OpenAIError) as caught:
        read_responses_request({"model": "m", "input": "hi", **fields})
    assert caught.value.message.startswith(message)
    assert (caught.value.status, caught.value.param) == (400, param)


KEYS = st.sampled_from(
    [
        "input",
        "instructions",
        "tools",
        "tool_choice",
        "text",
        "format",
        "type",
        "name",
        "role",
        "content",
        "schema",
        "call_id",
        "arguments",
        "output",
        "include",
        "reasoning",
        "effort",
        "top_logprobs",
        "stream",
        "model",
        "mode",
        "max_output_tokens",
        "parallel_tool_calls",
        "metadata",
        "truncation",
        "summary",
        "json_schema",
        "function",
    ]
)
WORDS = st.sampled_from(
    [
        "message",
        "function_call",
        "function_call_output",
        "reasoning",
        "item_reference",
        "user",
        "assistant",
        "input_text",
        "output_text",
        "reasoning_text",
        "function",
        "allowed_tools",
        "json_schema",
        "auto",
        "required",
    ]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS | st.text(max_size=3), inner, max_size=5),
    max_leaves=20,
)


@settings(max_examples=500)
@given(st.dictionaries(KEYS, JSON, max_size=6) | JSON)
def test_any_json_is_read_or_refused(document: object) -> None:
    asked = {"input": "hi", **document} if isinstance(document, dict) else document
    with suppress(OpenAIError):
        read_responses_request(document)
    with suppress(OpenAIError):
        read_responses_request(asked)


def test_it_becomes_a_chat_request() -> None:
    asked = read_responses_request({"input": "hi", "max_output_tokens": 7, "store": True, "tools": [TOOL]}).chat
    assert (asked.messages, asked.most_tokens, asked.has_tools, asked.stream) == ([USER], 7, True, False)


def test_the_response_repeats_the_request() -> None:
    asked: dict[str, Any] = {"model": "m", "input": "hi", "temperature": 0.5, "tools": [TOOL], "metadata": {"a": "b"}}
    echoed = read_responses_request(asked).echoed
    assert {name: echoed[name] for name in ("temperature", "tools", "metadata", "top_p", "tool_choice")} == {
        "temperature": 0.5,
        "tools": [TOOL],
        "metadata": {"a": "b"},
        "top_p": None,
        "tool_choice": "auto",
    }
