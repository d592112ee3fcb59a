"""Calls as OpenAI's clients get them: put together from deltas as the openai SDK does."""

import json
from typing import Any

from deepseek_triton_tools.gateway.tool_calls.answer_calls import AnswerCalls
from deepseek_triton_tools.gateway.tool_calls.tool_call_parser import ArgumentsPiece, CallBegins, TextPiece

CALLS = "<｜tool▁calls▁begin｜>"
FIRST = '<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜>'
SECOND = '<｜tool▁call▁begin｜>get_time<｜tool▁sep｜>{"zone": "é"}<｜tool▁call▁end｜>'
TWO_CALLS = f"Look:{CALLS}{FIRST}{SECOND}<｜tool▁calls▁end｜>"


def accumulate(whole: dict[str, Any], delta: dict[str, Any]) -> None:
    """Join a delta as the openai SDK does: strings are joined, numbers added, list elements found by their index."""
    for key, value in delta.items():
        if key not in whole or whole[key] is None or key in ("index", "type"):
            whole[key] = value
        elif isinstance(value, dict):
            accumulate(whole[key], value)
        else:
            whole[key] += value


def streamed(calls: AnswerCalls, chunks: list[str]) -> tuple[str, list[dict[str, Any]]]:
    """Return the text and the calls that a client puts together."""
    text, joined = "", dict[int, dict[str, Any]]()
    pieces = [piece for chunk in chunks for piece in calls.feed(chunk)] + calls.end()
    for piece in pieces:
        if isinstance(piece, TextPiece):
            text += piece.text
        elif isinstance(piece, CallBegins | ArgumentsPiece):
            delta = json.loads(calls.delta(piece))
            accumulate(joined.setdefault(delta["index"], {}), delta)
    return text, [joined[index] for index in sorted(joined)]


def test_deltas_joined_are_the_whole_calls() -> None:
    calls = AnswerCalls()
    text, joined = streamed(calls, list(TWO_CALLS))
    assert text == "Look:"
    assert [{key: call[key] for key in ("id", "type", "function")} for call in joined] == [
        call.document() for call in calls.calls
    ]
    assert [call["function"] for call in joined] == [
        {"name": "get_weather", "arguments": '{"city": "Paris"}'},
        {"name": "get_time", "arguments": '{"zone": "é"}'},
    ]


def test_every_call_has_an_id_of_its_own() -> None:
    answers = [AnswerCalls(), AnswerCalls()]
    for calls in answers:
        calls.feed(TWO_CALLS)
    ids = [call.call_id for calls in answers for call in calls.calls]
    assert len(set(ids)) == 4
    assert all(call_id.startswith("call_") for call_id in ids)


def test_calls_that_nobody_wants_are_left_out_of_the_text() -> None:
    calls = AnswerCalls(drop=True)
    assert streamed(calls, [TWO_CALLS, "Then."]) == ("Look:Then.", [])
    assert calls.calls == []


def test_only_the_first_call_is_given_where_one_is_asked_for() -> None:
    calls = AnswerCalls(only_first=True)
    begin, rest = TWO_CALLS[:60], TWO_CALLS[60:]
    calls.feed(begin)
    assert not calls.complete
    calls.feed(rest)
    assert calls.complete
    text, joined = streamed(AnswerCalls(only_first=True), list(TWO_CALLS + "more"))
    assert text == "Look:"
    assert [call["function"]["name"] for call in joined] == ["get_weather"]
