"""The conversation of a request and its tools."""

import json

import pytest

from deepseek_backend.contract import MAX_JSON_DEPTH, MAX_MESSAGES
from deepseek_backend.messages import NO_TOOLS, ToolUse, joined, read_messages, read_tool_use, without_old_reasoning

CALLS = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]


PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
SILENT = [{"type": "thinking", "thinking": "Hm."}, {"type": "refusal", "refusal": "No."}]
KEPT = [  # a message, and what changes of it
    ({"role": "user", "content": "Hi"}, {}),
    ({"role": "developer", "content": ""}, {"role": "system"}),
    ({"role": "tool", "content": "4", "tool_call_id": "1", "name": "f"}, {}),
    ({"role": "assistant", "content": "4", "reasoning_content": "Hm."}, {}),
    ({"role": "assistant", "content": "", "tool_calls": CALLS}, {}),
    ({"role": "assistant", "content": None, "tool_calls": CALLS}, {}),
    ({"role": "assistant", "tool_calls": CALLS}, {"content": None}),
    ({"role": "user", "content": PARTS}, {"content": "ab"}),
    ({"role": "user", "content": []}, {"content": ""}),
    ({"role": "assistant"}, {"content": ""}),
    ({"role": "assistant", "content": None, "reasoning_content": "Hm."}, {"content": ""}),
    ({"role": "assistant", "content": SILENT}, {"content": ""}),
    ({"role": "assistant", "content": [*SILENT, *PARTS]}, {"content": "ab"}),
    ({"role": "assistant", "content": ["a", {"type": "output_text", "text": "b"}]}, {"content": "ab"}),
    ({"role": "assistant", "content": [{"type": "text", "text": None}]}, {"content": ""}),
    ({"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}, {"content": "Hi"}),
    ({"role": "system", "content": None}, {"content": ""}),
    ({"role": "assistant", "tool_calls": [{**CALLS[0], "type": None}]}, {"content": None, "tool_calls": CALLS}),
    ({"role": "tool", "content": None, "tool_call_id": "1"}, {"content": ""}),
    ({"role": "tool", "tool_call_id": "1"}, {"content": ""}),
    ({"role": "user", "content": "\U0001f600 深"}, {}),
]


def test_a_message_is_kept_and_its_content_made_one_text():
    user = {"role": "user", "content": "Go on."}
    before = [user, answer(tool_calls=CALLS, content=None), user]
    read_ones = [joined(read_messages(json.dumps([*before, message])), "") for message, _ in KEPT]
    assert read_ones == [[*before, {**message, **changed}] for message, changed in KEPT]


OBJECT = "expected an object with role and content"
ROLES = "expected one of system, developer, user, assistant, tool, latest_reminder"
FUNCTION = 'expected {"type": "function", "function": {...}}'


def user(content, **more):
    return {"role": "user", "content": content, **more}


def answer(**more):
    return {"role": "assistant", "content": None, **more}


def call(name="f", arguments="{}", **more):
    return {"type": "function", "function": {"name": name, "arguments": arguments}, **more}


IMAGE = [{"type": "text", "text": "See"}, {"type": "image_url", "image_url": {}}]
CONTENT = ".content: expected text or an array of text parts"
REFUSED = [
    ("Hi", f": {OBJECT}, got 'Hi'"),
    (["user", "Hi"], f": {OBJECT}, got an array"),
    ({}, f": {OBJECT}, got no key at all"),
    ({"role": "user", "text": "Hi"}, f": {OBJECT}, got 'role', 'text'"),
    ({"tool_calls": CALLS}, f": {OBJECT}, got 'tool_calls'"),
    ({"role": "user"}, f": {OBJECT}, got 'role' without content"),
    ({"role": 1, "content": "Hi"}, f".role: {ROLES}, got 1"),
    ({"role": ["user"], "content": "Hi"}, f".role: {ROLES}, got an array"),
    ({"role": "function", "content": "Hi"}, f".role: {ROLES}, got 'function'"),
    (user(None), f"{CONTENT}, got None"),
    (user(7), f"{CONTENT}, got 7"),
    (user(["Hi"]), ".content[0]: expected an object of type 'text', got 'Hi'"),
    (user(IMAGE), ".content[1]: expected a part of type 'text', got one of type 'image_url'"),
    (user([{"text": "Hi"}]), ".content[0]: expected a part of type 'text', got one of type None"),
    (
        user([{"type": "refusal", "refusal": "No."}]),
        ".content[0]: expected a part of type 'text', got one of type 'ref",
    ),
    (user([{"type": "text"}]), ".content[0].text: expected a string, got None"),
    (answer(function_call={"name": "f"}), ".function_call: expected tool_calls"),
    (answer(tool_calls={"a": 1}), ".tool_calls: expected an array, got an object"),
    (answer(tool_calls=["f"]), f".tool_calls[0]: {FUNCTION}, got 'f'"),
    (answer(tool_calls=[{"type": "custom", "function": {}}]), f".tool_calls[0]: {FUNCTION}, got {{"),
    (answer(tool_calls=[call("f g")]), ".tool_calls[0].function.name: expected 1 to 64 letters, digits, "),
    (answer(tool_calls=[call("")]), ".tool_calls[0].function.name: expected 1 to 64 letters, digits, "),
    (answer(tool_calls=[call(arguments=[1])]), ".tool_calls[0].function.arguments: expected JSON text or an object"),
    (user("", tool_calls=CALLS), ".tool_calls: expected on messages of the assistant only, got one of role user"),
    (user("", prefix=True), ".prefix: expected on the last message only, the assistant"),
    (answer(tool_calls=CALLS, prefix=True), ".prefix: expected on the last message only, the assistant's, without"),
    (answer(content="", prefix="yes"), ".prefix: expected true or false, got 'yes'"),
    (user("\ud83d"), ": expected whole characters, got '\\ud83d', half of a surrogate pair"),
    (user([{"type": "x" * 10_000}]), ".content[0]: expected a part of type 'text'"),
]
NO_CONVERSATIONS = {
    "[]": "expected at least one message, got an empty array",
    "null": "expected a JSON array of messages, got None",
    '"Hi"': "expected a JSON array of messages, got 'Hi'",
    '{"messages": []}': "expected a JSON array of messages, got an object",
    "Hi": "expected a JSON array, got text that is not JSON (Expecting value: line 1 column 1 (char 0))",
}


def test_a_message_is_refused_with_its_place_what_was_expected_and_what_came(subtests):
    rows = [(json.dumps([user("Hi"), message]), f"messages[1]{problem}") for message, problem in REFUSED]
    rows += [(text, f"messages: {problem}") for text, problem in NO_CONVERSATIONS.items()]
    for text, problem in rows:
        with subtests.test(problem):
            with pytest.raises(ValueError, match=r"^messages") as raised:
                joined(read_messages(text), "")
            assert str(raised.value).startswith(problem)
            assert len(str(raised.value)) < 250


def read(*messages):
    return list(read_messages(json.dumps(messages)))


def test_arguments_are_text_and_the_last_message_may_be_a_prefix():
    for arguments in ('{"a": 1}', {"a": "ö"}, {}, "", None, "no JSON"):
        text = json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else arguments or "{}"
        assert read(answer(tool_calls=[call(arguments=arguments)])) == [answer(tool_calls=[call(arguments=text)])]
    messages = [user("Hi"), answer(content="He", prefix=True)]
    assert read(*messages) == messages
    assert read(*messages[:1], answer(content="He", prefix=False)) == [messages[0], answer(content="He", prefix=False)]


def test_no_calls_are_the_same_as_none_named():
    assert read(user("Hi"), {"role": "assistant", "tool_calls": []}, user("Hi"))[1] == answer(content="")


def result(call_id):
    return {"role": "tool", "content": f"of {call_id}", **({"tool_call_id": call_id} if call_id else {})}


def test_results_stand_in_the_order_of_their_calls_and_unknown_ids_are_refused():
    rounds = [answer(tool_calls=[call(id=name) for name in names]) for names in ("abc", "xy")]
    messages = read(rounds[0], *map(result, "cab"), rounds[1], *map(result, "yx"), answer(content="Done."))
    assert [message["content"][-1] for message in messages if message["role"] == "tool"] == list("abcxy")
    asked = answer(tool_calls=[call(id="a"), call(id="b")])
    assert [message["content"] for message in read(asked, result("b"), result(None))[1:]] == ["of b", "of None"]
    with pytest.raises(ValueError, match=r"messages\[2\].tool_call_id: expected the id of .*'a', 'b', got 'c'"):
        read(asked, result("a"), result("c"))
    with pytest.raises(ValueError, match=r"messages\[1\]: .*tool_calls"):
        read(user("Hi"), result("a"), asked, result("a"))


def test_reasoning_is_kept_only_after_the_last_user_message():
    old, new = answer(content="", reasoning_content="old"), answer(tool_calls=CALLS, reasoning="new", name="x")
    messages = without_old_reasoning(read(user("Hi"), old, user("Hi"), new, result("1")))
    assert messages[1] == answer(content="")
    assert messages[3] == answer(tool_calls=CALLS, reasoning_content="new", name="x")


def test_json_is_read_to_its_limit_of_nesting():
    # The list of messages and the message itself are two of the levels.
    deepest = "[" * (MAX_JSON_DEPTH - 2) + "]" * (MAX_JSON_DEPTH - 2)
    conversation = '[{"role": "user", "content": "a", "more": %s}]'
    assert read_messages(conversation % deepest)[0]["content"] == "a"
    with pytest.raises(ValueError, match=f"text that is not JSON \\(it is nested more than {MAX_JSON_DEPTH} deep\\)"):
        read_messages(conversation % f"[{deepest}]")
    with pytest.raises(ValueError, match="is nested"):
        read_messages(conversation % ("[" * 1100 + "]" * 1100))


@pytest.mark.slow
def test_thousands_of_results_find_their_calls_and_a_wrong_one_is_told_in_a_line():
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


def tool(name="f", **more):
    return {"type": "function", "function": {"name": name, **more}}


def named(name):
    return json.dumps(tool(name))


ONE, TWO = [tool("f")], [tool("f"), tool("g", description="G", parameters={"type": "object"})]
EXTRA = {"cache_control": {"type": "ephemeral"}, "parameters": {}, "params": {}, "output_schema": {"type": "object"}}


CHOICES = [
    ([], None, NO_TOOLS),
    ([], "auto", NO_TOOLS),
    (TWO, None, ToolUse(tools=TWO)),
    (TWO, "auto", ToolUse(tools=TWO)),
    (TWO, '"auto"', ToolUse(tools=TWO)),
    (TWO, "none", NO_TOOLS),
    (TWO, "required", ToolUse(tools=TWO, required=True)),
    (ONE, "required", ToolUse(tools=ONE, required=True, name="f")),
    (TWO, named("g"), ToolUse(tools=TWO, required=True, name="g")),
    ([tool("f", description=None, strict=True)], None, ToolUse(tools=[tool("f", strict=True)])),
    ([tool("f", **EXTRA)], None, ToolUse(tools=[tool("f", **EXTRA)])),
]
REFUSED_TOOLS = [
    ("{", None, r"^tools: expected a JSON array, got '\{' \(Expecting"),
    ({}, None, r"^tools: expected a JSON array of functions, got {}$"),
    (["f"], None, r"""^tools\[0\]: expected {"type": "function", .*, got 'f'$"""),
    ([{"type": "web_search"}], None, r"^tools\[0\]: expected .*, got {'type': 'web_search'}$"),
    ([{"type": "function", "name": "f"}], None, r"^tools\[0\]: expected "),
    ([tool(None)], None, r"^tools\[0\].function.name: expected 1 to 64 letters.*, got None$"),
    ([tool("a" * 65)], None, r"^tools\[0\].function.name: expected 1 to 64 letters"),
    ([tool("a b")], None, r"^tools\[0\].function.name: .*, got 'a b'$"),
    ([tool("f", description=1)], None, r"^tools\[0\].function.description: expected text, got 1$"),
    ([tool("f", parameters=[])], None, r"^tools\[0\].function.parameters: expected a JSON schema, .* got \[\]$"),
    ([tool("f", paramters={})], None, r"^tools\[0\].function: no key 'paramters'; did you mean 'parameters'"),
    ([tool("f", input={"type": "object"})], None, r"^tools\[0\].function: no key 'input'; did you mean 'param"),
    ([tool("f", x="\ud83d")], None, r"^tools: expected whole characters"),
    ([*TWO, tool("f")], None, r"^tools: expected each name once, got 'f' twice$"),
    ([tool(f"f{n}") for n in range(129)], None, r"^tools: expected at most 128, got 129$"),
    ([], "required", r"^tool_choice: expected tools beside 'required', got none$"),
    (ONE, "any", r"^tool_choice: expected one of auto, none, required or a JSON object, got 'any'"),
    (ONE, "3", r"^tool_choice: expected auto, none, required or .*, got 3$"),
    (ONE, '{"type": "function"}', r"^tool_choice: expected auto, none, required or "),
    (TWO, named("h"), r"^tool_choice: expected one of the tools, f, g, got 'h'$"),
    (TWO, named(["f"]), r"^tool_choice: expected one of the tools, f, g, got \['f'\]$"),
]


def test_tools_and_the_choice_among_them():
    assert [read_tool_use(json.dumps(tools), choice) for tools, choice, _ in CHOICES] == [use for *_, use in CHOICES]


def test_what_is_wrong_is_said_with_what_was_expected_and_what_came(subtests):
    for tools, choice, problem in REFUSED_TOOLS:
        with subtests.test(problem), pytest.raises(ValueError, match=problem):
            read_tool_use(tools if isinstance(tools, str) else json.dumps(tools), choice)
