"""The Responses API by openai-python: text, reasoning, calls and their streams. The gateway keeps no state of them."""

import json

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel

from conformance.asked import (
    BERLIN,
    BERLIN_ANSWER,
    BERLIN_ARGUMENTS,
    BERLIN_RESULT,
    FRANCE,
    PARIS,
    SUM,
    SUM_ANSWER,
    THINKING,
    THOUGHT,
    WEATHER_TOOL,
)

pytestmark = pytest.mark.sample
FLAT_TOOL = {"type": "function", **WEATHER_TOOL["function"]}
"""The Responses API has the function's fields beside its type."""


@pytest.fixture(scope="module")
def client(base_url):
    with OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def asked(model_name):
    return {"model": model_name, "temperature": 0}


@pytest.mark.parametrize("question", [FRANCE[0]["content"], FRANCE], ids=["text", "messages"])
def test_a_text(client, asked, question):
    response = client.responses.create(input=question, **asked)
    assert response.output_text == PARIS
    assert (response.status, response.error, response.incomplete_details) == ("completed", None, None)
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert response.store is not True
    short = client.responses.create(input=question, instructions="Answer in one word.", **asked)
    assert short.output_text == "Paris"
    cut = client.responses.create(input=question, max_output_tokens=3, **asked)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def test_the_stream_helper_puts_a_text_together(client, asked):
    with client.responses.stream(input=FRANCE[0]["content"], **asked) as stream:
        events = list(stream)
        final = stream.get_final_response()
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == PARIS
    assert final.output_text == PARIS


def test_reasoning_is_an_item_of_its_own(client, asked):
    response = client.responses.create(input=SUM[0]["content"], extra_body=THINKING, **asked)
    reasoning, message = response.output
    assert reasoning.type == "reasoning"
    assert "".join(part.text for part in reasoning.content or []).endswith(THOUGHT)
    assert message.type == "message"
    assert response.output_text == SUM_ANSWER
    assert response.usage.output_tokens_details.reasoning_tokens > 0


def test_a_call_and_its_result(client, asked):
    first = client.responses.create(input=BERLIN, tools=[FLAT_TOOL], **asked)
    [call] = first.output
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments)) == ("get_weather", BERLIN_ARGUMENTS)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": BERLIN_RESULT}
    second = client.responses.create(input=[*BERLIN, call.model_dump(), result], tools=[FLAT_TOOL], **asked)
    assert second.output_text == BERLIN_ANSWER


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "name": "get_weather"}], ids=str)
def test_a_call_streams(client, asked, choice):
    with client.responses.stream(input=BERLIN, tools=[FLAT_TOOL], tool_choice=choice, **asked) as stream:
        events = list(stream)
        final = stream.get_final_response()
    [call] = final.output
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments)) == ("get_weather", BERLIN_ARGUMENTS)
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert json.loads("".join(deltas)) == BERLIN_ARGUMENTS


def test_parse_reads_the_arguments_of_a_strict_tool(client, asked):
    class get_weather(BaseModel):
        city: str

    response = client.responses.parse(input=BERLIN, tools=[openai.pydantic_function_tool(get_weather)], **asked)

    [call] = response.output
    assert call.type == "function_call"
    assert call.parsed_arguments == get_weather(city="Berlin")


def test_state_and_built_in_tools_are_refused_by_name(client, asked):
    refused = {"previous_response_id": "resp_1", "background": True, "tools": [{"type": "web_search"}]}
    for name, value in {**refused, "conversation": "conv_1"}.items():
        with pytest.raises(openai.BadRequestError, match=name):
            client.responses.create(input="Hello", **asked, **{name: value})
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_1")
