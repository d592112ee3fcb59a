"""A response while it grows: its events, in order, tell the same as the response itself."""

import json
from typing import Any

from deepseek_triton_tools.gateway.protocol.responses_output import ResponseWriter

LOGPROB = {"token": "a", "bytes": [97], "logprob": -0.5, "top_logprobs": []}


def events_of(stream: bytes) -> list[dict[str, Any]]:
    """The events of a stream. The name of each is also its type."""
    events = []
    for block in stream.decode().removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def replayed(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The output items that a client puts together of the deltas alone."""
    items: list[dict[str, Any]] = []
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


def write_everything(writer: ResponseWriter) -> bytes:
    stream = writer.begin()
    stream += writer.reasoning("Let me ") + writer.reasoning('"think"\n')
    stream += writer.text("I ") + writer.text("look.")
    stream += writer.begin_call("call_1", "f") + writer.arguments('{"a":') + writer.arguments("1}") + writer.end_call()
    stream += writer.begin_call("call_2", "g") + writer.arguments("{}")
    return stream + writer.end("completed", usage={"total_tokens": 3})


def test_the_events_come_in_openais_order() -> None:
    events = events_of(write_everything(ResponseWriter("m", {})))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    part_of_a_text = ["content_part.added", "{}.delta", "{}.delta", "{}.done", "content_part.done"]
    item = ["output_item.added", "*", "output_item.done"]
    arguments = "function_call_arguments"
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        item[0],
        *(name.format("reasoning_text") for name in part_of_a_text),
        item[2],
        item[0],
        *(name.format("output_text") for name in part_of_a_text),
        item[2],
        *(item[0], f"{arguments}.delta", f"{arguments}.delta", f"{arguments}.done", item[2]),
        *(item[0], f"{arguments}.delta", f"{arguments}.done", item[2]),
        "completed",
    ]


def test_the_deltas_joined_are_the_items() -> None:
    writer = ResponseWriter("m", {})
    events = events_of(write_everything(writer))
    assert replayed(events) == writer.document["output"] == events[-1]["response"]["output"]
    reasoning, message, first, second = events[-1]["response"]["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": 'Let me "think"\n'}]
    assert message["content"][0]["text"] == "I look."
    assert (first["call_id"], first["name"], first["arguments"]) == ("call_1", "f", '{"a":1}')
    assert (second["call_id"], second["name"], second["arguments"]) == ("call_2", "g", "{}")
    assert {item["status"] for item in (reasoning, message, first, second)} == {"completed"}


def test_the_first_events_show_a_response_without_output() -> None:
    writer = ResponseWriter("m", {"temperature": 0.5})
    created, in_progress = events_of(writer.begin())
    assert created["response"] == in_progress["response"]
    assert created["response"]["output"] == []
    assert (created["response"]["status"], created["response"]["temperature"]) == ("in_progress", 0.5)


def test_an_answer_that_is_cut_is_incomplete() -> None:
    writer = ResponseWriter("m", {})
    writer.begin()
    writer.text("Once upon")
    (*_, last) = events_of(writer.end("incomplete", reason="max_output_tokens"))
    assert last["type"] == "response.incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert last["response"]["completed_at"] is None
    assert last["response"]["output"][0]["status"] == "incomplete"


def test_an_error_after_the_first_event_ends_the_response() -> None:
    writer = ResponseWriter("m", {})
    writer.begin()
    writer.text("Once upon")
    (*_, last) = events_of(writer.end("failed", error={"code": "server_error", "message": "gone"}))
    assert last["type"] == "response.failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "gone"}


def test_logprobs_are_in_the_deltas_and_in_the_text() -> None:
    writer = ResponseWriter("m", {})
    writer.begin()
    events = events_of(writer.text("a", [LOGPROB]) + writer.text("b", [LOGPROB]) + writer.end("completed"))
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [delta["logprobs"] for delta in deltas] == [[LOGPROB], [LOGPROB]]
    assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == [LOGPROB, LOGPROB]


def test_ids_are_openais_and_never_the_same() -> None:
    documents = [ResponseWriter("m", {}).document for _ in range(2)]
    assert len({str(document["id"]) for document in documents}) == 2
    assert all(str(document["id"]).startswith("resp_") for document in documents)
