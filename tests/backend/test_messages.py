from __future__ import annotations

import json
from typing import Any

import pytest

from deepseek_backend.contract import MAX_JSON_DEPTH, MAX_MESSAGES
from deepseek_backend.request.messages import read_messages

CALLS = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]


@pytest.mark.parametrize(
    ("message", "read"),
    [
        ({"role": "user", "content": "Hi"}, {}),
        ({"role": "developer", "content": ""}, {"role": "system"}),
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
ROLES = "expected one of system, developer, user, assistant, tool"
FUNCTION = 'expected {"type": "function", "function": {...}}'


def answer(**more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, **more}


def call(name: str = "f", arguments: Any = "{}", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}, **more}


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
        ({"role": "", "content": "Hi"}, f".role: {ROLES}, got ''"),
        ({"role": 1, "content": "Hi"}, f".role: {ROLES}, got 1"),
        ({"role": ["user"], "content": "Hi"}, f".role: {ROLES}, got an array"),
        ({"role": "function", "content": "Hi"}, f".role: {ROLES}, got 'function'"),
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
        (answer(tool_calls={"a": 1}), ".tool_calls: expected an array, got an object"),
        (answer(tool_calls=["f"]), f".tool_calls[0]: {FUNCTION}, got 'f'"),
        (answer(tool_calls=[{"type": "custom", "function": {}}]), f".tool_calls[0]: {FUNCTION}, got {{"),
        (answer(tool_calls=[call("f g")]), ".tool_calls[0].function.name: expected 1 to 64 letters, digits, "),
        (answer(tool_calls=[call("")]), ".tool_calls[0].function.name: expected 1 to 64 letters, digits, "),
        (
            answer(tool_calls=[call(arguments=[1])]),
            ".tool_calls[0].function.arguments: expected JSON text or an object, got an array",
        ),
        (
            {"role": "user", "content": "", "tool_calls": CALLS},
            ".tool_calls: expected on messages of the assistant only, got one of role user",
        ),
        ({"role": "user", "content": "", "prefix": True}, ".prefix: expected on the last message only, the assistant"),
        (answer(tool_calls=CALLS, prefix=True), ".prefix: expected on the last message only, the assistant's, without"),
        (answer(content="", prefix="yes"), ".prefix: expected true or false, got 'yes'"),
        (
            {"role": "user", "content": "\ud83d"},
            ": expected whole characters, got '\\ud83d', half of a surrogate pair",
        ),
    ],
)
def test_a_message_is_refused_with_its_place_what_was_expected_and_what_came(message: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=r"^messages") as raised:
        read_messages(json.dumps([{"role": "user", "content": "Hi"}, message]))

    assert str(raised.value).startswith(f"messages[1]{problem}")


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


def read(*messages: dict[str, Any]) -> list[Any]:
    return list(read_messages(json.dumps(messages)))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"a": 1}', '{"a": 1}'),
        ({"a": "ö"}, '{"a": "ö"}'),
        ({}, "{}"),
        ("", "{}"),
        (None, "{}"),
        ("no JSON", "no JSON"),
    ],
)
def test_arguments_are_text(arguments: Any, expected: str) -> None:
    assert read(answer(tool_calls=[call(arguments=arguments)])) == [answer(tool_calls=[call(arguments=expected)])]


def result(call_id: str | None) -> dict[str, Any]:
    return {"role": "tool", "content": f"of {call_id}", **({"tool_call_id": call_id} if call_id else {})}


def test_results_stand_in_the_order_of_their_calls_in_each_round() -> None:
    rounds = [answer(tool_calls=[call(id=name) for name in names]) for names in ("abc", "xy")]

    messages = read(rounds[0], *map(result, "cab"), rounds[1], *map(result, "yx"), answer(content="Done."))

    assert [message["content"][-1] for message in messages if message["role"] == "tool"] == list("abcxy")


def test_results_without_ids_keep_their_places_and_unknown_ids_are_refused() -> None:
    asked = answer(tool_calls=[call(id="a"), call(id="b")])
    assert [message["content"] for message in read(asked, result("b"), result(None))[1:]] == ["of b", "of None"]
    with pytest.raises(ValueError, match=r"messages\[2\].tool_call_id: expected the id of .*'a', 'b', got 'c'"):
        read(asked, result("a"), result("c"))


def test_reasoning_is_kept_only_after_the_last_user_message() -> None:
    user = {"role": "user", "content": "Hi"}
    old, new = answer(content="", reasoning_content="old"), answer(tool_calls=CALLS, reasoning="new", name="x")

    messages = read(user, old, user, new, result("1"))

    assert messages[1] == answer(content="")
    assert messages[3] == answer(tool_calls=CALLS, reasoning_content="new", name="x")


def test_the_last_message_may_be_a_prefix() -> None:
    messages = [{"role": "user", "content": "Hi"}, answer(content="He", prefix=True)]
    assert read(*messages) == messages
    assert read(*messages[:1], answer(content="He", prefix=False)) == [messages[0], answer(content="He", prefix=False)]


def test_json_is_read_to_its_limit_of_nesting() -> None:
    # The list of messages and the message itself are two of the levels.
    deepest = "[" * (MAX_JSON_DEPTH - 2) + "]" * (MAX_JSON_DEPTH - 2)
    conversation = '[{"role": "user", "content": "a", "more": %s}]'
    assert read_messages(conversation % deepest)[0]["content"] == "a"
    with pytest.raises(ValueError, match=f"text that is not JSON \\(it is nested more than {MAX_JSON_DEPTH} deep\\)"):
        read_messages(conversation % f"[{deepest}]")


def test_thousands_of_results_find_their_calls_and_a_wrong_one_is_told_in_a_line() -> None:
    numbers = range(MAX_MESSAGES - 1)
    calls = [{"id": str(number), "type": "function", "function": {"name": "f"}} for number in numbers]
    results = [{"role": "tool", "content": "", "tool_call_id": str(number)} for number in reversed(numbers)]
    turn = [{"role": "assistant", "content": None, "tool_calls": calls}, *results]
    assert [message.get("tool_call_id") for message in read_messages(json.dumps(turn))[1:]] == list(map(str, numbers))
    with pytest.raises(ValueError, match="messages: expected at most 10,000 messages, got 10,001"):
        read_messages(json.dumps([*turn, turn[-1]]))
    turn[-1]["tool_call_id"] = "none"
    with pytest.raises(ValueError, match=r"'7' and 9,991 more, got 'none'"):
        read_messages(json.dumps(turn))
