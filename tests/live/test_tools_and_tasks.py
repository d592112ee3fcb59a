"""Tools, and the tasks that generate nothing, under a real tritonserver: on the wire and through every client.

The model is the trained tiny one, so a call is one that a model has written, and its result is read by a model.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from deepseek_triton_client import InvalidRequest
from deepseek_triton_tools.server.server_process import ServerProcess
from support.client_kinds import ClientKind
from support.servers import url
from support.wire import WAYS, WHOLE, Answer, Way, ask
from tiny_checkpoint.special_tokens import CALL, CALLS, END_CALL, END_CALLS, SEPARATOR

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
QUESTION = [{"role": "user", "content": "What is the weather in Berlin?"}]
ARGUMENTS = '{"city": "Berlin"}'
RAW_CALL = f"{CALLS}{CALL}get_weather{SEPARATOR}{ARGUMENTS}{END_CALL}{END_CALLS}"
FENCED_CALL = f"{CALLS}{CALL}function{SEPARATOR}get_weather\n```json\n{ARGUMENTS}\n```{END_CALL}{END_CALLS}"

each_way = pytest.mark.parametrize("way", WAYS, ids=str)


def chat(server: ServerProcess, way: Way, messages: list[dict[str, Any]], **fields: Any) -> Answer:
    body = {"messages": json.dumps(messages), "max_tokens": 200, "separate_reasoning": True, **fields}
    return ask(server, way, body).answer()


@each_way
def test_a_tool_is_called_with_v31s_words(v31_server: ServerProcess, way: Way) -> None:
    for choice in ({}, {"tool_choice": "auto"}):
        answer = chat(v31_server, way, QUESTION, tools=json.dumps([ADD, WEATHER]), **choice)
        assert answer.text == RAW_CALL
        assert answer.finish_reason == "stop"


@each_way
def test_a_tool_is_called_with_r1s_words_after_its_reasoning(r1_server: ServerProcess, way: Way) -> None:
    answer = chat(r1_server, way, QUESTION, tools=json.dumps([ADD, WEATHER]))
    assert answer.text == FENCED_CALL
    assert answer.reasoning


@each_way
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_required_call_is_whole_and_not_thought_about(
    v31_server: ServerProcess, r1_server: ServerProcess, way: Way, choice: Any
) -> None:
    """Both models answer "Hi" without a call when they may."""
    wanted = choice if isinstance(choice, str) else json.dumps(choice)
    asked = {"tools": json.dumps([WEATHER]), "tool_choice": wanted}
    for server, call, kwargs in ((v31_server, RAW_CALL, '{"thinking": true}'), (r1_server, FENCED_CALL, "{}")):
        answer = chat(server, way, QUESTION, chat_template_kwargs=kwargs, **asked)
        assert (answer.reasoning, answer.text) == ("", call)


@each_way
def test_no_tool_is_seen_with_the_choice_none(v31_server: ServerProcess, way: Way) -> None:
    answer = chat(v31_server, way, QUESTION, tools=json.dumps([WEATHER]), tool_choice="none")
    assert answer.text == chat(v31_server, way, QUESTION).text
    assert CALLS not in answer.text


@each_way
@pytest.mark.parametrize("name", ["v31_server", "r1_server"])
def test_a_conversation_goes_on_after_results_that_came_in_any_order(
    request: pytest.FixtureRequest, name: str, way: Way
) -> None:
    server = request.getfixturevalue(name)
    calls = [
        {"id": "x", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Berlin"}}},
    ]
    sunny = json.dumps({"temperature": 21, "sky": "cloudy"})
    messages = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": calls, "reasoning_content": "Hm."},
        {"role": "tool", "content": [{"type": "text", "text": sunny}], "tool_call_id": "x"},
    ]
    answer = chat(server, way, messages, tools=json.dumps([WEATHER]))
    assert answer.text == "It is 21 °C and cloudy in Berlin."


@each_way
def test_a_prefix_is_continued(v31_server: ServerProcess, way: Way) -> None:
    messages = [
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": "The capital of", "prefix": True},
    ]
    assert chat(v31_server, way, messages).text == " France is Paris."


@each_way
def test_tokens_of_the_reasoning_are_counted(v31_server: ServerProcess, way: Way) -> None:
    thinking = {"chat_template_kwargs": '{"thinking": true}', "return_output_ids": True}
    body = {
        "messages": json.dumps([{"role": "user", "content": "What is 47 + 38?"}]),
        "max_tokens": 200,
        "separate_reasoning": True,
        **thinking,
    }
    reply = ask(v31_server, way, body)
    ids = reply.answer().token_ids
    closing = tokens(v31_server, text_input="</think>", add_special_tokens=False)

    counts = [response["num_reasoning_tokens"] for response in reply.chunks if "num_reasoning_tokens" in response]
    assert counts == [[ids.index(closing[0]) + 1]]


# --- tasks ------------------------------------------------------------------------------------------------------------


def post(server: ServerProcess, **body: Any) -> dict[str, Any]:
    address = f"{url(server, 'http')}/v2/models/tensorrt_llm/generate"
    document: dict[str, Any] = httpx.post(address, json={"text_input": "", **body}, timeout=60).json()
    return document


def tokens(server: ServerProcess, **body: Any) -> list[int]:
    found = post(server, task="tokenize", **body)["output_ids"]
    return found if isinstance(found, list) else [found]


def test_tokens_and_text_are_those_of_a_generation(v31_server: ServerProcess) -> None:
    generated = ask(v31_server, WHOLE[0], {"text_input": "Hello 👋 there", "max_tokens": 1}).answer()
    found = post(v31_server, text_input="Hello 👋 there", task="tokenize")
    back = post(v31_server, input_ids=found["output_ids"], task="detokenize")["text_output"]

    assert found["num_input_tokens"] == len(found["output_ids"]) == generated.num_input_tokens
    assert back == "<｜begin▁of▁sentence｜>Hello 👋 there"
    assert (
        post(v31_server, input_ids=found["output_ids"], task="detokenize", skip_special_tokens=True)["text_output"]
        == "Hello 👋 there"
    )


def test_a_conversation_is_tokenized_as_it_is_asked(v31_server: ServerProcess) -> None:
    asked = {"messages": json.dumps(QUESTION), "tools": json.dumps([WEATHER])}
    found = post(v31_server, task="tokenize", chat_template_kwargs='{"thinking": true}', **asked)
    text = post(v31_server, input_ids=found["output_ids"], task="detokenize")["text_output"]

    assert text.count("<｜begin▁of▁sentence｜>") == 1
    assert "get_weather" in text
    assert text.endswith("<｜User｜>What is the weather in Berlin?<｜Assistant｜><think>")


def test_the_model_says_what_it_is(v31_server: ServerProcess, r1_server: ServerProcess) -> None:
    v31, r1 = (json.loads(post(server, task="describe")["model_info"]) for server in (v31_server, r1_server))

    assert (v31["name"], v31["engine"], v31["max_seq_len"], v31["vocab_size"]) == ("tiny", "reference", 4096, 1280)
    assert (v31["tool_form"], v31["thinking_switch"]) == ("raw_json", True)
    assert (r1["tool_form"], r1["thinking_switch"]) == ("fenced", False)
    assert "tool▁calls▁begin" in v31["chat_template"]
    assert (v31["bos_token"], v31["eos_token"]) == ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>")
    assert v31["fields"]["temperature"] == ""
    assert v31["fields"]["guided_json"].startswith("the reference engine has no guided decoding")


def test_every_client_asks_for_tools_and_tasks(v31_server: ServerProcess, client_kind: ClientKind) -> None:
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
