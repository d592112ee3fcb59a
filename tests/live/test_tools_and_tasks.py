"""Tools, and the tasks that generate nothing, under a real tritonserver: on the wire and through every client.

The model is the trained tiny one, so a call is one that a model has written, and its result is read by a model.
"""

import json
from typing import Any

import pytest

from deepseek_triton_client import InvalidRequest
from deepseek_triton_tools.server.server_process import ServerProcess
from support import wire
from support.wire import STREAMS, WAYS, WHOLE, Answer, Way, ask
from tiny_checkpoint.architecture import CALL, CALLS, END_CALL, END_CALLS, SEPARATOR

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
QUESTION = [{"role": "user", "content": "What is the weather in Berlin?"}]
ARGUMENTS = '{"city": "Berlin"}'
RAW_CALL = f"{CALLS}{CALL}get_weather{SEPARATOR}{ARGUMENTS}{END_CALL}{END_CALLS}"
FENCED_CALL = f"{CALLS}{CALL}function{SEPARATOR}get_weather\n```json\n{ARGUMENTS}\n```{END_CALL}{END_CALLS}"


def chat(server: ServerProcess, way: Way, messages: list[dict[str, Any]], **fields: Any) -> Answer:
    body = {"messages": json.dumps(messages), "max_tokens": 200, "separate_reasoning": True, **fields}
    return ask(server, way, body).answer()


def test_a_required_call_is_whole_and_not_thought_about(v31_server, r1_server):
    """Both models answer "Hi" without a call when they may."""
    named = json.dumps({"type": "function", "function": {"name": "get_weather"}})
    servers = ((v31_server, RAW_CALL, '{"thinking": true}'), (r1_server, FENCED_CALL, "{}"))
    for way, choice in zip(WAYS, ("required", named) * 2, strict=True):
        for server, call, kwargs in servers:
            asked = {"tools": json.dumps([WEATHER]), "tool_choice": choice, "chat_template_kwargs": kwargs}
            answer = chat(server, way, QUESTION, **asked)
            assert (answer.reasoning, answer.text) == ("", call)


def test_no_tool_is_seen_with_the_choice_none_and_a_prefix_is_continued(v31_server):
    answer = chat(v31_server, WHOLE[0], QUESTION, tools=json.dumps([WEATHER]), tool_choice="none")
    begun = [
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": "The capital of", "prefix": True},
    ]

    assert answer.text == chat(v31_server, WHOLE[0], QUESTION).text
    assert CALLS not in answer.text
    assert chat(v31_server, WHOLE[1], begun).text == " France is Paris."


def test_a_conversation_goes_on_after_a_result(v31_server, r1_server):
    call = {"id": "x", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Berlin"}}}
    sunny = json.dumps({"temperature": 21, "sky": "cloudy"})
    messages = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "Hm."},
        {"role": "tool", "content": [{"type": "text", "text": sunny}], "tool_call_id": "x"},
    ]
    for server, way in zip((v31_server, r1_server, r1_server, v31_server), WAYS, strict=True):
        answer = chat(server, way, messages, tools=json.dumps([WEATHER]))
        assert answer.text == "It is 21 °C and cloudy in Berlin."


def test_tokens_of_the_reasoning_are_counted(v31_server):
    body = {
        "messages": json.dumps([{"role": "user", "content": "What is 47 + 38?"}]),
        "max_tokens": 200,
        "separate_reasoning": True,
        "chat_template_kwargs": '{"thinking": true}',
        "return_output_ids": True,
    }
    closing = post(v31_server, task="tokenize", text_input="</think>", add_special_tokens=False)["output_ids"]
    for way in (WHOLE[0], STREAMS[1]):
        reply = ask(v31_server, way, body)
        ids = reply.answer().token_ids

        counts = [response["num_reasoning_tokens"] for response in reply.chunks if "num_reasoning_tokens" in response]
        assert counts == [[ids.index(closing) + 1]]


# --- tasks ------------------------------------------------------------------------------------------------------------


def post(server, **body: Any) -> dict[str, Any]:
    document: dict[str, Any] = wire.post(server, "generate", {"text_input": "", **body}).json()
    return document


def test_tokens_and_text_are_those_of_a_generation(v31_server):
    generated = ask(v31_server, WHOLE[0], {"text_input": "Hello 👋 there", "max_tokens": 1}).answer()
    found = post(v31_server, text_input="Hello 👋 there", task="tokenize")
    back = post(v31_server, input_ids=found["output_ids"], task="detokenize")["text_output"]

    assert found["num_input_tokens"] == len(found["output_ids"]) == generated.num_input_tokens
    assert back == "<｜begin▁of▁sentence｜>Hello 👋 there"
    bare = post(v31_server, input_ids=found["output_ids"], task="detokenize", skip_special_tokens=True)
    assert bare["text_output"] == "Hello 👋 there"


def test_a_conversation_is_tokenized_as_it_is_asked(v31_server):
    asked = {"messages": json.dumps(QUESTION), "tools": json.dumps([WEATHER])}
    found = post(v31_server, task="tokenize", chat_template_kwargs='{"thinking": true}', **asked)
    text = post(v31_server, input_ids=found["output_ids"], task="detokenize")["text_output"]

    assert text.count("<｜begin▁of▁sentence｜>") == 1
    assert "get_weather" in text
    assert text.endswith("<｜User｜>What is the weather in Berlin?<｜Assistant｜><think>")


def test_the_model_says_what_it_is(v31_server, r1_server):
    v31, r1 = (json.loads(post(server, task="describe")["model_info"]) for server in (v31_server, r1_server))

    assert (v31["name"], v31["engine"], v31["max_seq_len"], v31["vocab_size"]) == ("tiny", "reference", 4096, 1280)
    assert (v31["tool_form"], v31["thinking_switch"]) == ("raw_json", True)
    assert (r1["tool_form"], r1["thinking_switch"]) == ("fenced", False)
    assert "tool▁calls▁begin" in v31["chat_template"]
    assert (v31["bos_token"], v31["eos_token"]) == ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>")
    assert v31["fields"]["temperature"] == ""
    assert (v31["fields"]["guided_json"], v31["fields"]["guided_structural_tag"] != "") == ("", True)


def test_every_client_asks_for_tools_and_tasks(v31_server, client_kind):
    with client_kind.client(v31_server) as client:
        called = client.chat(QUESTION, tools=[WEATHER], tool_choice="required", max_tokens=50)
        thought = client.chat("What is 47 + 38?", chat_template_kwargs={"thinking": True}, max_tokens=200)
        token_ids = client.tokenize("Hello")
        text = client.detokenize(token_ids)
        asked = client.tokenize(QUESTION, tools=[WEATHER])
        info = client.model_info()
        with pytest.raises(InvalidRequest, match="input_ids: expected token ids from 0 to 1279, got 99999"):
            client.detokenize([99999])

    assert called.text == RAW_CALL
    assert called.num_reasoning_tokens == 0
    assert 0 < (thought.num_reasoning_tokens or 0) < (thought.num_output_tokens or 0)
    assert text == "<｜begin▁of▁sentence｜>Hello"
    assert "get_weather" in post(v31_server, input_ids=list(asked), task="detokenize")["text_output"]
    assert info["name"] == "tiny"
