"""The parts that come from a server become a response, however they are cut."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepseek_triton_tools.gateway.app.responses_answer import ResponsesAnswer
from deepseek_triton_tools.gateway.protocol.responses_output import ResponseWriter
from deepseek_triton_tools.gateway.protocol.responses_request import read_responses_request
from deepseek_triton_tools.gateway.triton.call import Part
from gateway.openai_facts import faults

CALL = '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'
TWO_CALLS = f"I look.<｜tool▁calls▁begin｜>{CALL}{CALL}<｜tool▁calls▁end｜>"
LAST = Part(finish_reason="stop", num_input_tokens=5, num_output_tokens=3, num_cached_tokens=4, num_reasoning_tokens=2)


TOOLS = {"tools": [{"type": "function", "name": "f"}]}


def answered(parts: list[Part], **fields: object) -> dict[str, Any]:
    """Return the response as JSON."""
    writer = ResponseWriter("m", {})
    answer = ResponsesAnswer(writer, read_responses_request({"input": "hi", **fields}).chat)
    writer.begin()
    for part in parts:
        answer.take([part])
        if answer.choice.done:
            break
    answer.end()
    document: dict[str, Any] = json.loads(json.dumps(writer.document))
    return document


def shape(response: dict[str, Any]) -> list[tuple[str, ...]]:
    """The items without their ids."""
    return [
        (item["type"], item["name"], item["arguments"], item["status"])
        if item["type"] == "function_call"
        else (item["type"], item["content"][0]["text"], item["status"])
        for item in response["output"]
    ]


def test_reasoning_text_and_calls_are_items_in_their_order() -> None:
    response = answered([Part(reasoning="hm"), Part(text=TWO_CALLS), LAST], **TOOLS)
    assert shape(response) == [
        ("reasoning", "hm", "completed"),
        ("message", "I look.", "completed"),
        ("function_call", "f", '{"a": 1}', "completed"),
        ("function_call", "f", '{"a": 1}', "completed"),
    ]
    assert response["status"] == "completed"


REQUEST = {
    "model": "m",
    "input": "hi",
    "tools": [{"type": "function", "name": "f"}],
    "tool_choice": {"type": "function", "name": "f"},
    "include": ["message.output_text.logprobs"],
    "reasoning": {"effort": "low"},
    "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
}


@pytest.mark.parametrize("echoed", [{"model": "m", "input": "hi"}, REQUEST], ids=["bare", "with all"])
@pytest.mark.parametrize("finish_reason", ["stop", "length"])
def test_response_and_events_have_the_shapes_of_openais_description(echoed: dict[str, Any], finish_reason: str) -> None:
    asked = read_responses_request(echoed)
    writer = ResponseWriter("m", asked.echoed)
    answer = ResponsesAnswer(writer, asked.chat)
    logprobs = '[{"5": {"logprob": -0.5, "rank": 1, "decoded_token": "a"}}]'
    parts = [Part(reasoning="hm"), Part(text=TWO_CALLS, logprobs=logprobs)]
    stream = (
        writer.begin() + answer.take([*parts, Part(finish_reason=finish_reason, num_output_tokens=9)]) + answer.end()
    )
    assert faults(json.loads(json.dumps(writer.document)), "Response") == []
    found = [json.loads(line[6:]) for line in stream.decode().split("\n") if line.startswith("data: ")]
    assert len(found) > 8
    assert [fault for event in found for fault in faults(event, "ResponseStreamEvent")] == []


def test_a_response_that_failed_has_openais_shape() -> None:
    asked = read_responses_request(REQUEST)
    writer = ResponseWriter("m", asked.echoed)
    answer = ResponsesAnswer(writer, asked.chat)
    answer.take([Part(text="Once")])
    events = answer.fail("server_error", "gone").decode()
    assert faults(json.loads(json.dumps(writer.document)), "Response") == []
    assert events.split("\n\n")[-2].startswith("event: response.failed\n")


def test_usage_has_the_details() -> None:
    response = answered([Part(text="a", num_output_tokens=2), LAST])
    assert response["usage"] == {
        "input_tokens": 5,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 10,
    }


def test_one_part_may_end_the_reasoning_and_begin_the_answer() -> None:
    response = answered([Part(reasoning="hm", text="Yes", finish_reason="stop")])
    assert shape(response) == [("reasoning", "hm", "completed"), ("message", "Yes", "completed")]


def test_without_tools_a_call_is_text() -> None:
    response = answered([Part(text=TWO_CALLS, finish_reason="stop")])
    assert shape(response) == [("message", TWO_CALLS, "completed")]


def test_an_answer_that_is_cut_is_incomplete() -> None:
    response = answered([Part(text=TWO_CALLS[:60], finish_reason="length")], **TOOLS)
    assert shape(response) == [("message", "I look.", "completed"), ("function_call", "f", "{", "incomplete")]
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}


def test_one_call_at_a_time_ends_the_response_early() -> None:
    response = answered([Part(text=TWO_CALLS), Part(text="more"), LAST], parallel_tool_calls=False, **TOOLS)
    assert [kind for kind, *_ in shape(response)] == ["message", "function_call"]
    assert response["status"] == "completed"


@settings(max_examples=50)
@given(st.lists(st.integers(0, len(TWO_CALLS)), max_size=8))
def test_any_cut_gives_the_same_response(places: list[int]) -> None:
    edges = [0, *sorted(places), len(TWO_CALLS)]
    parts = [Part(text=TWO_CALLS[start:end]) for start, end in pairwise(edges)]
    assert shape(answered([*parts, LAST], **TOOLS)) == shape(answered([Part(text=TWO_CALLS), LAST], **TOOLS))
