"""Requests to the Responses API become the chat requests that ask the same."""

import pytest

from deepseek_triton_tools.gateway.openai_fields import OpenAIError
from deepseek_triton_tools.gateway.responses_request import read_responses_request, translated

TOOL = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
CHAT_TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True},
}
USER = {"role": "user", "content": "hi"}


def chat(**fields):
    given = {"model": "m", "input": "hi", **fields}
    return translated({name: value for name, value in given.items() if value is not None})[0]


def test_fields():
    named = {"type": "function", "name": "f"}
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [named]}
    logprobs = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    table = [
        ({}, {}),
        ({"instructions": "Be brief."}, {"messages": [{"role": "system", "content": "Be brief."}, USER]}),
        ({"temperature": 0.5, "top_p": None, "user": None}, {"temperature": 0.5}),
        ({"max_output_tokens": 5}, {"max_completion_tokens": 5}),
        ({"reasoning": {"effort": "low", "summary": "auto"}}, {"reasoning_effort": "low"}),
        ({"reasoning": {"effort": None, "context": "auto", "mode": "pro"}, "text": {"verbosity": "low"}}, {}),
        ({"stream": True, "stream_options": {"include_obfuscation": False}}, {"stream": True}),
        ({"background": False, "max_tool_calls": 3, "include": [], "truncation": "disabled"}, {}),
        (logprobs, {"logprobs": True, "top_logprobs": 2}),
        ({"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
        ({"tools": [{**TOOL, "defer_loading": True, "x": 1}]}, {"tools": [CHAT_TOOL]}),
        (
            {"tools": [{**named, "paramters": {}}]},
            {"tools": [{**CHAT_TOOL, "function": {"name": "f", "paramters": {}}}]},
        ),
        (
            {"tools": [TOOL], "tool_choice": named},
            {"tools": [CHAT_TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
        ),
        (
            {"tools": [{**TOOL, "name": "g"}, TOOL], "tool_choice": allowed},
            {"tools": [CHAT_TOOL], "tool_choice": "required"},
        ),
        ({"top_k": 4, "chat_template_kwargs": {}}, {"top_k": 4, "chat_template_kwargs": {}}),
    ]
    assert [chat(**fields) for fields, _ in table] == [
        {"model": "m", "messages": [USER], **expected} for _, expected in table
    ]


def test_a_conversation_with_reasoning_and_calls_is_one_message_for_each_turn():
    def call(number, name, arguments="{}", **more):
        return {"type": "function_call", "call_id": f"call_{number}", "name": name, "arguments": arguments, **more}

    def output(number, text):
        return {"type": "function_call_output", "call_id": f"call_{number}", "output": text}

    def of_chat(number, name, arguments="{}"):
        return {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": arguments}}

    def told(number, text):
        return {"role": "tool", "tool_call_id": f"call_{number}", "content": text}

    hm = [{"type": "reasoning_text", "text": "hm"}]
    summary = [{"type": "summary_text", "text": "not this"}]
    look = [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}]
    items = [
        {"role": "developer", "content": "Use tools."},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "text", "text": "b"}], "id": None},
        {"type": "reasoning", "id": "r", "summary": summary, "content": hm, "encrypted_content": None, "status": None},
        {"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": look},
        call(1, "f", id="f", status=None),
        call(2, "g", '{"a":1}', id=None),
        output(2, [{"type": "input_text", "text": "two"}]),
        output(1, "one"),
        {"type": "reasoning", "id": "rs_2", "summary": []},
        call(3, "f"),
        output(3, ""),
        {"role": "assistant", "content": "First."},
        {"role": "assistant", "content": "Second."},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "broken off"}]},
        {"role": "user", "content": "Go on."},
    ]
    calls = [of_chat(1, "f"), of_chat(2, "g", '{"a":1}')]
    assert chat(input=items)["messages"] == [
        {"role": "developer", "content": "Use tools."},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "hm", "tool_calls": calls},
        told(2, "two"),
        told(1, "one"),
        {"role": "assistant", "content": None, "tool_calls": [of_chat(3, "f")]},
        told(3, ""),
        {"role": "assistant", "content": "First."},
        {"role": "assistant", "content": "Second."},
        {"role": "user", "content": "Go on."},
    ]


def test_items_without_a_text_are_read_as_clients_keep_them():
    thought = [{"type": "thinking", "thinking": "hm"}, {"type": "output_text", "text": "yes"}]
    items = [
        {"role": "developer", "content": None},
        USER,
        {"role": "assistant", "content": thought},
        USER,
        {"role": "assistant", "content": None},
        {"type": "function_call_output", "call_id": "c", "output": None},
    ]
    told = {"role": "tool", "tool_call_id": "c", "content": ""}
    answered = [USER, {"role": "assistant", "content": "yes"}, USER, told]
    assert chat(input=items)["messages"] == [{"role": "developer", "content": ""}, *answered]


IMAGE = {"role": "user", "content": [{"type": "input_image", "image_url": "http://x"}]}


REFUSED = [
    ({"input": None}, "input", "got nothing"),
    ({"input": []}, "input", "at least one message"),
    ({"input": 3}, "input", "got 3"),
    ({"input": ["a"]}, "input", "input[0]: expected an object"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "input[0]: this gateway keeps no items"),
    ({"input": [{"type": "web_search_call"}]}, "input", "input[0].type: expected one of message, reasoning"),
    ({"input": [{"role": "critic", "content": ""}]}, "input", "input[0].role: expected user, system"),
    ({"input": [IMAGE]}, "input", "input[0].content[0].type: expected input_text or output_text"),
    ({"input": [{"role": "user"}]}, "input", "input[0].content: expected a text or a list of parts, got nothing"),
    ({"input": [{"type": "function_call", "name": "f", "call_id": "c"}]}, "input", "input[0].arguments: expected"),
    ({"input": [{"type": ["message"]}]}, "input", "input[0].type: expected one of"),
    ({"instructions": ["a"]}, "instructions", "expected a text, got ["),
    ({"previous_response_id": "resp_1"}, "previous_response_id", "keeps no"),
    ({"conversation": "conv_1"}, "conversation", "keeps no"),
    ({"prompt": {"id": "p"}}, "prompt", "keeps no"),
    ({"previous_response_id": ""}, "previous_response_id", "keeps no"),
    ({"conversation": {}}, "conversation", "keeps no"),
    ({"prompt": ""}, "prompt", "keeps no"),
    ({"background": True}, "background", ""),
    ({"truncation": "auto"}, "truncation", "expected disabled"),
    ({"tools": [{"type": "web_search"}]}, "tools", "tools[0].type: expected function, got 'web_search'"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "tools[0].name: expected it here"),
    ({"tools": "f"}, "tools", "expected a list"),
    ({"tool_choice": {"type": "function", "function": {}}}, "tool_choice", "tool_choice.name: expected it here"),
    ({"tool_choice": {"type": "mcp"}}, "tool_choice", "tool_choice.type: expected function or allowed_tools"),
    (
        {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "g"}]}, "tools": [TOOL]},
        "tool_choice",
        "tool_choice.tools: no function tool has the name 'g'",
    ),
    ({"include": ["file_search_call.results"]}, "include", "expected message.output_text.logprobs or"),
    ({"max_tokens": 5}, "max_tokens", "Here it is max_output_tokens"),
    ({"messages": []}, "messages", "Here it is input"),
    ({"n": 2}, "n", "a field of chat completions"),
    ({"max_output_tokens": "5"}, "max_output_tokens", 'expected a whole number, got "5"'),
    ({"reasoning": {"effort": "huge"}}, "reasoning", "reasoning.effort: expected one of none"),
    ({"text": {"format": {"type": "xml"}}}, "text", "text.format.type: expected text, json_object"),
    ({"text": "json"}, "text", "expected an object"),
    ({"text": {"fromat": {"type": "json_object"}}}, "text", "text: unknown field 'fromat'"),
    ({"reasoning": {"efort": "high"}}, "reasoning", "unknown field 'efort'"),
    ({"tool_choice": {"type": "allowed_tools", "mod": "required"}}, "tool_choice", "unknown field 'mod'"),
    ({"text": {"format": {"type": "json_schema", "schema": 5}}}, "text", "text.format.schema: expected a JSON"),
    ({"text": {"format": {"type": "json_schema"}}}, "text", "text.format.schema: expected a JSON schema, got noth"),
    ({"continue_final_message": True}, "input", "needs a last message of the assistant"),
    ({"temprature": 1}, "temprature", "did you mean temperature?"),
    ({"max_output_token": 3}, "max_output_token", "did you mean max_output_tokens?"),
    ({"messages_": 3}, "messages_", "did you mean input?"),
    ({"response_formt": 3}, "response_formt", "did you mean text.format?"),
    (
        {"thinking": {"type": "enabled"}, "chat_template_kwargs": {"thinking": False}},
        "chat_template_kwargs",
        "contradict",
    ),
]


def test_what_is_not_done_is_refused_by_name(subtests):
    for fields, param, words in REFUSED:
        with subtests.test(fields=fields):
            with pytest.raises(OpenAIError) as caught:
                read_responses_request({"model": "m", "input": "hi", **fields})
            assert (caught.value.status, caught.value.param) == (400, param)
            assert words in caught.value.message


def test_it_becomes_a_chat_request_and_the_response_repeats_it():
    asked = read_responses_request({"input": "hi", "max_output_tokens": 7, "store": True, "tools": [TOOL]}).chat
    assert (asked.messages, asked.most_tokens, asked.has_tools, asked.stream) == ([USER], 7, True, False)
    given = {"temperature": 0.5, "tools": [TOOL], "metadata": {"a": "b"}}
    echoed = read_responses_request({"model": "m", "input": "hi", **given}).echoed
    assert {"top_p": None, "tool_choice": "auto", **given}.items() <= echoed.items()
