from __future__ import annotations

import json
from typing import Any

import pytest

from deepseek_backend.request.messages import read_messages

CALLS = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]


@pytest.mark.parametrize(
    ("message", "read"),
    [
        ({"role": "user", "content": "Hi"}, {}),
        ({"role": "developer", "content": ""}, {}),
        ({"role": "tool", "content": "4", "tool_call_id": "1", "name": "f"}, {}),
        ({"role": "assistant", "content": "4", "reasoning_content": "Hm."}, {}),
        ({"role": "assistant", "content": "", "tool_calls": CALLS}, {}),
        ({"role": "assistant", "content": None, "tool_calls": CALLS}, {}),
        ({"role": "assistant", "tool_calls": CALLS}, {"content": None}),
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"content": "ab"},
        ),
        ({"role": "user", "content": []}, {"content": ""}),
        ({"role": "user", "content": "\U0001f600 深"}, {}),
    ],
)
def test_a_message_is_kept_and_its_content_made_one_text(message: dict[str, Any], read: dict[str, Any]) -> None:
    user = {"role": "user", "content": "Go on."}

    assert read_messages(json.dumps([user, message])) == [user, {**message, **read}]


OBJECT = "expected an object with role and content"


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ("Hi", f": {OBJECT}, got 'Hi'"),
        (["user", "Hi"], f": {OBJECT}, got an array"),
        ({}, f": {OBJECT}, got no key at all"),
        ({"role": "user", "text": "Hi"}, f": {OBJECT}, got 'role', 'text'"),
        ({"content": "Hi"}, f": {OBJECT}, got 'content'"),
        ({"tool_calls": CALLS}, f": {OBJECT}, got 'tool_calls'"),
        ({"role": "assistant", "tool_calls": []}, f": {OBJECT}, got 'role', 'tool_calls'"),
        ({"role": "", "content": "Hi"}, ".role: expected a string that is not empty, got ''"),
        ({"role": 1, "content": "Hi"}, ".role: expected a string that is not empty, got 1"),
        ({"role": "user", "content": None}, ".content: expected text or an array of text parts, got None"),
        ({"role": "user", "content": 7}, ".content: expected text or an array of text parts, got 7"),
        ({"role": "user", "content": {"a": 1}}, ".content: expected text or an array of text parts, got an object"),
        ({"role": "user", "content": ["Hi"]}, ".content[0]: expected an object of type 'text', got 'Hi'"),
        (
            {"role": "user", "content": [{"type": "text", "text": "See"}, {"type": "image_url", "image_url": {}}]},
            ".content[1]: expected a part of type 'text', got one of type 'image_url'",
        ),
        (
            {"role": "user", "content": [{"text": "Hi"}]},
            ".content[0]: expected a part of type 'text', got one of type None",
        ),
        ({"role": "user", "content": [{"type": "text"}]}, ".content[0].text: expected a string, got None"),
        (
            {"role": "user", "content": "\ud83d"},
            ": expected whole characters, got '\\ud83d', half of a surrogate pair",
        ),
    ],
)
def test_a_message_is_refused_with_its_place_what_was_expected_and_what_came(message: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=r"^messages") as raised:
        read_messages(json.dumps([{"role": "user", "content": "Hi"}, message]))

    assert str(raised.value) == f"messages[1]{problem}"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[]", "expected at least one message, got an empty array"),
        ("null", "expected a JSON array of messages, got None"),
        ('"Hi"', "expected a JSON array of messages, got 'Hi'"),
        ('{"messages": []}', "expected a JSON array of messages, got an object"),
        (
            "Hi",
            "expected a JSON array, got text that is not JSON (Expecting value: line 1 column 1 (char 0))",
        ),
    ],
)
def test_what_is_no_conversation_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=r"^messages") as raised:
        read_messages(text)

    assert str(raised.value) == f"messages: {problem}"


def test_a_refusal_stays_short() -> None:
    with pytest.raises(ValueError, match=r"^messages") as raised:
        read_messages(json.dumps([{"role": "user", "content": [{"type": "x" * 10_000}]}]))

    assert len(str(raised.value)) < 200


def test_a_message_of_any_depth_is_read_or_refused() -> None:
    refused = 0
    for depth in range(1100):
        try:
            read_messages('[{"role": "user", "content": "", "x": ' + "[" * depth + "]" * depth + "}]")
        except ValueError:
            refused += 1

    assert 0 < refused < 1100
