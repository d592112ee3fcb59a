"""A response while it grows: however its parts are cut, its events tell the same as the response itself."""

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepseek_triton_tools.gateway.responses import ResponsesAnswer, ResponseWriter
from deepseek_triton_tools.gateway.responses_request import read_responses_request
from deepseek_triton_tools.gateway.triton_call import Part
from gateway.openai_facts import faults

LOGPROB = {"token": "a", "bytes": [97], "logprob": -0.5, "top_logprobs": []}
CALL = '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'
TWO_CALLS = f"I look.<｜tool▁calls▁begin｜>{CALL}{CALL}<｜tool▁calls▁end｜>"
LAST = Part(finish_reason="stop", num_input_tokens=5, num_output_tokens=3, num_cached_tokens=4, num_reasoning_tokens=2)
TOOLS = {"tools": [{"type": "function", "name": "f"}]}
REQUEST = {
    "model": "m",
    "input": "hi",
    **TOOLS,
    "tool_choice": {"type": "function", "name": "f"},
    "include": ["message.output_text.logprobs"],
    "reasoning": {"effort": "low"},
    "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
}


def events_of(stream):
    """The events of a stream. The name of each is also its type."""
    events = []
    for block in stream.decode().removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def replayed(events):
    """The output items that a client puts together of the deltas alone."""
    items = []
    for event in events:
        match event["type"]:
            case "response.output_item.added":
                assert event["output_index"] == len(items)
                items.append(event["item"])
            case "response.content_part.added":
                assert event["content_index"] == len(items[event["output_index"]]["content"])
                items[event["output_index"]]["content"].append(event["part"])
            case "response.output_text.delta" | "response.reasoning_text.delta":
                items[event["output_index"]]["content"][0]["text"] += event["delta"]
            case "response.function_call_arguments.delta":
                items[event["output_index"]]["arguments"] += event["delta"]
            case "response.output_item.done":
                assert items[event["output_index"]]["id"] == event["item"]["id"]
                items[event["output_index"]]["status"] = event["item"]["status"]
        if "item_id" in event:
            assert event["item_id"] == items[event["output_index"]]["id"]
    return items


def test_the_events_come_in_openais_order_and_joined_are_the_items():
    writer = ResponseWriter("m", {"temperature": 0.5})
    stream = writer.begin() + writer.reasoning("Let me ") + writer.reasoning('"think"\n')
    stream += writer.text("I ") + writer.text("look.")
    stream += writer.begin_call("call_1", "f") + writer.arguments('{"a":') + writer.arguments("1}") + writer.end_call()
    stream += writer.begin_call("call_2", "g") + writer.arguments("{}")
    stream += writer.end("completed", usage={"total_tokens": 3})
    events = events_of(stream)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    text = ["output_item.added", "content_part.added", "{0}.delta", "{0}.delta", "{0}.done", "content_part.done"]
    call = ["output_item.added", "{0}.delta", "{0}.done", "output_item.done"]
    arguments = "function_call_arguments"
    assert [event["type"].removeprefix("response.") for event in events] == [
        *("created", "in_progress"),
        *(name.format("reasoning_text") for name in [*text, "output_item.done"]),
        *(name.format("output_text") for name in [*text, "output_item.done"]),
        *(name.format(arguments) for name in [*call[:2], *call[1:]]),
        *(name.format(arguments) for name in call),
        "completed",
    ]
    created, in_progress = (event["response"] for event in events[:2])
    assert created == in_progress
    assert (created["output"], created["status"], created["temperature"]) == ([], "in_progress", 0.5)
    assert replayed(events) == writer.document["output"] == events[-1]["response"]["output"]
    reasoning, message, first, second = events[-1]["response"]["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": 'Let me "think"\n'}]
    assert message["content"][0]["text"] == "I look."
    assert (first["call_id"], first["name"], first["arguments"]) == ("call_1", "f", '{"a":1}')
    assert (second["call_id"], second["name"], second["arguments"]) == ("call_2", "g", "{}")
    assert {item["status"] for item in (reasoning, message, first, second)} == {"completed"}


def test_a_response_that_is_cut_or_fails_ends_so_and_log_probabilities_are_in_deltas_and_text():
    ends = {
        "incomplete": ({"reason": "max_output_tokens"}, "incomplete_details", {"reason": "max_output_tokens"}),
        "failed": ({"error": {"code": "server_error"}}, "error", {"code": "server_error"}),
    }
    for status, (fields, name, told) in ends.items():
        writer = ResponseWriter("m", {})
        writer.begin()
        writer.text("Once upon")
        (*_, last) = events_of(writer.end(status, **fields))
        assert last["type"] == f"response.{status}"
        assert (last["response"][name], last["response"]["completed_at"]) == (told, None)
        assert last["response"]["output"][0]["status"] == "incomplete"
    writer = ResponseWriter("m", {})
    writer.begin()
    events = events_of(writer.text("a", [LOGPROB]) + writer.text("b", [LOGPROB]) + writer.end("completed"))
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [delta["logprobs"] for delta in deltas] == [[LOGPROB], [LOGPROB]]
    assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == [LOGPROB, LOGPROB]


# --- Parts of a server's answer ---


def answered(parts, **fields):
    """The response as JSON."""
    writer = ResponseWriter("m", {})
    answer = ResponsesAnswer(writer, read_responses_request({"input": "hi", **fields}).chat)
    writer.begin()
    for part in parts:
        answer.take([part])
        if answer.done:
            break
    answer.end()
    return json.loads(json.dumps(writer.document))


def shape(response):
    """The items without their ids."""
    return [
        (item["type"], item["name"], item["arguments"], item["status"])
        if item["type"] == "function_call"
        else (item["type"], item["content"][0]["text"], item["status"])
        for item in response["output"]
    ]


def test_parts_become_items_in_their_order():
    response = answered([Part(reasoning="hm"), Part(text=TWO_CALLS), LAST], **TOOLS)
    call = ("function_call", "f", '{"a": 1}', "completed")
    assert shape(response) == [("reasoning", "hm", "completed"), ("message", "I look.", "completed"), call, call]
    assert response["status"] == "completed"
    both = answered([Part(reasoning="hm", text="Yes", finish_reason="stop")])
    assert shape(both) == [("reasoning", "hm", "completed"), ("message", "Yes", "completed")]
    assert shape(answered([Part(text=TWO_CALLS, finish_reason="stop")])) == [("message", TWO_CALLS, "completed")]
    cut = answered([Part(text=TWO_CALLS[:60], finish_reason="length")], **TOOLS)
    assert shape(cut) == [("message", "I look.", "completed"), ("function_call", "f", "{", "incomplete")]
    assert (cut["status"], cut["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    ended = answered([Part(text="half", finish_reason="cancelled")])
    assert shape(ended) == [("message", "half", "incomplete")]
    assert (ended["status"], ended["error"]["code"]) == ("failed", "server_error")
    one_call = answered([Part(text=TWO_CALLS), Part(text="more"), LAST], parallel_tool_calls=False, **TOOLS)
    assert [kind for kind, *_ in shape(one_call)] == ["message", "function_call"]
    assert (one_call["status"], one_call["id"][:5]) == ("completed", "resp_")
    assert one_call["id"] != response["id"]
    cached, reasoning = {"cached_tokens": 4, "cache_write_tokens": 0}, {"reasoning_tokens": 2}
    usage = {"input_tokens": 5, "output_tokens": 5, "total_tokens": 10}
    usage |= {"input_tokens_details": cached, "output_tokens_details": reasoning}
    assert answered([Part(text="a", num_output_tokens=2), LAST])["usage"] == usage


@pytest.mark.slow
@pytest.mark.parametrize("asked", [{"model": "m", "input": "hi"}, REQUEST], ids=["bare", "with all"])
def test_response_and_events_have_the_shapes_of_openais_description(asked):
    logprobs = '[{"5": {"logprob": -0.5, "rank": 1, "decoded_token": "a"}}]'
    parts = [Part(reasoning="hm"), Part(text=TWO_CALLS, logprobs=logprobs)]
    for finish_reason in ("stop", "length", "cancelled", None):
        request = read_responses_request({**asked, "stream": True})
        writer = ResponseWriter("m", request.echoed)
        answer = ResponsesAnswer(writer, request.chat)
        stream = writer.begin() + answer.take(parts)
        if finish_reason:
            stream += answer.take([Part(finish_reason=finish_reason, num_output_tokens=9)]) + answer.end()
        else:
            stream += answer.fail("server_error", "gone")
            assert events_of(stream)[-1]["type"] == "response.failed"
        assert faults(json.loads(json.dumps(writer.document)), "Response") == []
        events = events_of(stream)
        assert len(events) > 8
        assert [fault for event in events for fault in faults(event, "ResponseStreamEvent")] == []


@pytest.mark.slow
@settings(max_examples=50)
@given(st.lists(st.integers(0, len(TWO_CALLS)), max_size=8))
def test_any_cut_gives_the_same_response(places):
    edges = [0, *sorted(places), len(TWO_CALLS)]
    parts = [Part(text=TWO_CALLS[start:end]) for start, end in pairwise(edges)]
    assert shape(answered([*parts, LAST], **TOOLS)) == shape(answered([Part(text=TWO_CALLS), LAST], **TOOLS))
